"""Prompt files: every format gives back what was written, and nothing else gets through."""

import csv
import io
import json
import logging
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowrl.core.pairs import read_pairs
from flowrl.core.prompts import is_flagged, read_prompts
from flowrl.errors import ConfigError

fuzz = settings(derandomize=True, deadline=None, max_examples=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("prompts")


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table(rows, delimiter=","):
    stream = io.StringIO(newline="")
    csv.writer(stream, delimiter=delimiter).writerows(rows)
    return stream.getvalue()


def parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow.parquet", reason="needs the extra")
    import pyarrow as pa

    pyarrow.write_table(pa.table(columns), path)
    return path


LINES = '{"prompt": "a cat", "n": 1}\n{"prompt": "a dog", "n": true}\n'
ARRAY = '[{"prompt": "a cat", "n": 1},\n {"prompt": "a dog", "n": true}]'


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.json", "a.txt", "a.csv", "a"])
@pytest.mark.parametrize("content", [LINES, ARRAY], ids=["lines", "array"])
def test_objects_are_read_as_json_whatever_the_suffix_says(tmp_path, name, content):
    found = read_prompts(write(tmp_path, name, content))
    assert found.prompts == ["a cat", "a dog"]
    assert found.columns == {"n": [1, True]}, "values of JSON keep their types"


def test_an_array_of_texts_and_a_single_object_are_prompts(tmp_path):
    assert read_prompts(write(tmp_path, "a.json", '["a cat", "a dog"]')).prompts == ["a cat", "a dog"]
    assert read_prompts(write(tmp_path, "b.json", '{\n "prompt": "a cat"\n}')).prompts == ["a cat"]


def test_text_that_only_begins_like_json_stays_text(tmp_path):
    assert read_prompts(write(tmp_path, "a.txt", "[portrait] a cat\n{red} dog")).prompts == [
        "[portrait] a cat",
        "{red} dog",
    ]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.CSV", ","), ("a.tsv", "\t")])
def test_tables_give_text(tmp_path, name, delimiter):
    rows = [["n", "prompt"], ["1", "a cat, red"], ["true", 'the "dog"\ton\ntwo lines']]
    found = read_prompts(write(tmp_path, name, table(rows, delimiter)))
    assert found.prompts == ["a cat, red", 'the "dog"\ton\ntwo lines']
    assert found.columns == {"n": ["1", "true"]}


def test_parquet_keeps_types(tmp_path):
    found = read_prompts(parquet(tmp_path / "a.PARQUET", {"prompt": ["a cat", "a dog"], "n": [1, None]}))
    assert (found.prompts, found.columns) == (["a cat", "a dog"], {"n": [1, None]})


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'flowrl\[parquet\]'"):
        read_prompts(write(tmp_path, "a.parquet", b"PAR1"))


@pytest.mark.parametrize("suffix", [".xlsx", ".md", ".yaml"])
def test_other_files_are_refused_with_the_formats_that_are_read(tmp_path, suffix):
    path = write(tmp_path, "a" + suffix, "a cat\n")
    with pytest.raises(ConfigError, match=r"prompts are read from \.txt, \.jsonl, .*\.parquet files") as error:
        read_prompts(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\xff", b"a\0b", "a cat".encode("utf-16")])
def test_what_is_no_text_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match="a.txt: not .*save it as UTF-8"):
        read_prompts(write(tmp_path, "a.txt", content))


@pytest.mark.parametrize(("name", "content"), [("a.txt", "a cat"), ("a.jsonl", LINES), ("a.csv", "prompt,n\na cat,1")])
def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path, name, content):
    assert read_prompts(write(tmp_path, name, b"\xef\xbb\xbf" + content.encode())).prompts[0] == "a cat"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "a cat\n\na dog\n"),
        ("a.jsonl", '{"prompt": "a cat"}\n\n{"prompt": "a dog"}\n'),
        ("a.csv", "prompt\na cat\na dog\n"),
    ],
)
def test_line_ends_of_windows_leave_nothing_behind(tmp_path, name, content):
    found = read_prompts(write(tmp_path, name, content.replace("\n", "\r\n")))
    assert (found.prompts, found.num_skipped) == (["a cat", "a dog"], 0)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv"])
def test_other_separators_do_not_split_a_prompt(tmp_path, name):
    prompt = "a cat\u2028a dog\x85a\x0bb"
    content = {".txt": prompt, ".csv": table([["prompt"], [prompt]])}.get(name[1:])
    found = read_prompts(write(tmp_path, name, content or json.dumps({"prompt": prompt}, ensure_ascii=False)))
    assert found.prompts == [prompt]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"prompt": "a cat"}\n{"prompt": " "}\n{"prompt": ""}\n'),
        ("a.json", '["a cat", "", " "]'),
        ("a.csv", 'prompt,n\na cat,1\n,2\n"  ",3\n'),
    ],
)
def test_blank_prompts_are_skipped_counted_and_told_once(tmp_path, caplog, name, content):
    path = write(tmp_path, name, content)
    with caplog.at_level(logging.WARNING, "flowrl"):
        assert [read_prompts(path) for _ in range(2)][1].num_skipped == 2
    assert [record.getMessage() for record in caplog.records] == [f"{path}: left out 2 row(s) with a blank prompt"]


def test_rows_without_a_blank_prompt_count_none(tmp_path):
    assert read_prompts(write(tmp_path, "a.txt", "a cat\n\n\n")).num_skipped == 0, "blank lines are no rows"


REFUSED = [
    ("a.jsonl", '{"prompt": "a"}\n{"prompt": "\\ud800"}', "a.jsonl:2: '\\ud800' is half of a surrogate pair"),
    ("a.jsonl", '{"prompt": "a", "x": [{"\\udc00": 1}]}', "a.jsonl:1: '\\udc00' is half of a surrogate pair"),
    ("a.json", '["a",\n"\\ud800"]', "a.json, row 2: '\\ud800' is half of a surrogate pair"),
    ("a.jsonl", '{"prompt": "a"}\n{"prompt": 3}', "a.jsonl:2: expected an object with a text 'prompt'; it is 3"),
    ("a.jsonl", '{"text": "a"}', "a.jsonl:1: expected an object with a text 'prompt'; found: 'text'"),
    ("a.jsonl", '{"prompt": "a"}\n3', "a.jsonl:2: expected an object"),
    ("a.jsonl", '{"prompt": "a"}\n{"prompt"', "a.jsonl:2: not JSON"),
    ("a.jsonl", '{"prompt"\n{"prompt": "a"}', "a.jsonl:1: not JSON"),
    ("a.json", '[{"prompt": "a"},\n {"prompt"]', "a.json: not JSON: Expecting ':' delimiter: line 2"),
    ("a.json", "[" * 100000, "a.json:1: not JSON"),
    ("a.jsonl", '{"prompt": "a", "prompt": "b"}', "a.jsonl:1: not JSON: 'prompt' stands twice"),
    ("a.csv", "text,n\na,1", "a.csv:1: no column 'prompt'; rename the one that holds it (found: 'text', 'n')"),
    ("a.csv", "prompt,n\na,1\nb", "a.csv:3: 1 cells, but the header has 2"),
    ("a.csv", "prompt,n\na, b,1", "a.csv:2: 3 cells, but the header has 2; quote a cell that holds ','"),
    ("a.csv", "prompt,n,n\na,1,2", "a.csv:1: the column 'n' stands there twice"),
    ("a.csv", "prompt,prompt\na,1", "a.csv:1: the column 'prompt' stands there twice"),
    ("a.csv", 'prompt\n"a', "a.csv:2: not a table"),
    ("a.parquet", b"PAR1", "a.parquet: not a parquet file"),
    ("a.csv", "", "a.csv: no prompts in it"),
    ("a.json", "[]", "a.json: no prompts in it"),
    ("a.json", '[""]', "a.json: no prompts in it, only 1 blank ones"),
    *(
        ("a.jsonl", json.dumps({"prompt": "a", name: 1}), f"a.jsonl:1: rename the column '{name}'")
        for name in ("prompts", "completions", "opponents", "self")
    ),
    ("a.csv", "prompt,prompts\na,1", "a.csv:2: rename the column 'prompts'"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_malformed_files_are_refused_with_file_and_line(tmp_path, name, content, message):
    with pytest.raises(ConfigError) as error:
        read_prompts(write(tmp_path, name, content))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_parquet_row_without_a_prompt_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.parquet:2: .*; it is None"):
        read_prompts(parquet(tmp_path / "a.parquet", {"prompt": ["a", None]}))


@pytest.mark.parametrize("value", ["[1]", "{}"])
def test_a_category_that_no_table_can_show_is_refused_in_eval_files_only(tmp_path, value):
    path = write(tmp_path, "a.jsonl", f'{{"prompt": "a"}}\n{{"prompt": "b", "category": {value}}}')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: 'category' is"):
        read_prompts(path, for_eval=True)
    assert len(read_prompts(path)) == 2


def test_a_held_out_that_is_neither_true_nor_false_is_refused_in_eval_files_only(tmp_path):
    path = write(tmp_path, "a.csv", "prompt,held_out\na,False\nb,maybe\n")
    with pytest.raises(ConfigError, match=r"a\.csv:3: 'held_out': 'maybe' is neither true nor false"):
        read_prompts(path, for_eval=True)
    assert len(read_prompts(path)) == 2


def test_flags_are_read_as_they_are_meant():
    assert [is_flagged(value) for value in (True, 1, 1.0, "true", "YES", " 1 ")] == [True] * 6
    assert [is_flagged(value) for value in (False, 0, None, "false", "No", "0", "", " ")] == [False] * 8
    for value in (2, "maybe", [], float("nan")):
        with pytest.raises(ValueError, match="neither true nor false"):
            is_flagged(value)


def test_pairs_files_are_read_as_strictly(tmp_path):
    write(tmp_path, "x.png", b"")
    row = '"prompt": "a", "image": "x.png"'
    assert read_pairs(write(tmp_path, "a.JSONL", b"\xef\xbb\xbf{" + row.encode() + b"}"))[0].prompt == "a"
    for extra, message in (
        ('"completions": 1', "rename the column 'completions'"),
        ('"x": "\\ud800"', "half of a surrogate pair"),
        ('"prompt": "b"', "'prompt' stands twice"),
    ):
        with pytest.raises(ConfigError, match=r"a\.JSONL:1") as error:
            read_pairs(write(tmp_path, "a.JSONL", f"{{{row}, {extra}}}"))
        assert message in str(error.value)


prompt_lists = st.lists(st.text().filter(lambda text: text.strip() and "\0" not in text), min_size=1)
lines_of_text = st.lists(
    st.text(st.characters(exclude_characters="\r\n\0\ufeff", exclude_categories=["Cs"])).map(str.strip).filter(bool),
    min_size=1,
)


@fuzz
@given(prompt_lists)
def test_known_prompts_come_back_exactly(folder, prompts):
    objects = [{"prompt": prompt, "n": number} for number, prompt in enumerate(prompts)]
    rows = [["prompt", "n"], *([prompt, str(number)] for number, prompt in enumerate(prompts))]
    for name, content in {
        "a.jsonl": "\n".join(map(json.dumps, objects)),
        "b.ndjson": "\r\n".join(json.dumps(item, ensure_ascii=False) for item in objects),
        "c.json": json.dumps(objects, indent=1),
        "d.json": json.dumps(prompts),
        "e.csv": table(rows),
        "f.tsv": table(rows, "\t"),
    }.items():
        assert read_prompts(write(folder, name, content)).prompts == prompts, name
    assert read_prompts(parquet(folder / "g.parquet", {"prompt": prompts})).prompts == prompts


@fuzz
@given(lines_of_text)
def test_known_lines_come_back_exactly(folder, prompts):
    assert read_prompts(write(folder, "a.txt", "\n".join(prompts))).prompts == prompts


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("prompt"), inner),
)
contents = st.one_of(
    st.binary(),
    st.text().map(str.encode),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.lists(json_values).map(lambda values: "\n".join(map(json.dumps, values)).encode()),
    st.lists(st.lists(st.text())).map(lambda rows: table([["prompt", "n"], *rows]).encode()),
)
suffixes = st.sampled_from([".txt", ".JSONL", ".json", ".ndjson", ".csv", ".TSV", ".parquet", ".xlsx", ".md", ""])


@fuzz
@given(contents, suffixes, st.booleans())
@example(b"[" * 100000, ".jsonl", False)
@example(b'{"prompt": ' + b"1" * 5000 + b"}", ".jsonl", False)
@example(b'{"prompt": "\\ud800"}', ".jsonl", False)
def test_any_file_is_read_or_refused(folder, content, suffix, for_eval):
    try:
        found = read_prompts(write(folder, "any" + suffix, content), for_eval=for_eval)
    except ConfigError:
        return
    assert all(prompt.strip() and prompt.encode() for prompt in found.prompts)
    assert all(len(values) == len(found) for values in found.columns.values())
