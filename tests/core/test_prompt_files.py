"""Prompt files: which are read and how, and what is refused."""

import csv
import io
import json
import logging
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.config import load_config
from flowrl.core.prompts import PromptSet, check_categories, read_prompts, truth
from flowrl.errors import ConfigError
from flowrl.preflight import check_files

SUFFIXES = [".txt", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"]
ROWS = [{"prompt": "a cat, red", "target": "1"}, {"prompt": 'a "dog"', "target": "2"}]
PATTERN = settings(derandomize=True, deadline=None, max_examples=100)


def write(path, content):
    """Writes bytes, or text as UTF-8 with the line ends that it has."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def table(rows, delimiter=",", **options):
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, rows[0], delimiter=delimiter, **options)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def parquet(columns):
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def content(suffix, rows):
    """What the standard writer of the format makes of rows."""
    if suffix == ".txt":
        return "".join(row["prompt"] + "\n" for row in rows)
    if suffix == ".json":
        return json.dumps(rows, indent=1)
    if suffix == ".parquet":
        return parquet({name: [row[name] for row in rows] for name in rows[0]})
    if suffix in (".csv", ".tsv"):
        return table(rows, "," if suffix == ".csv" else "\t")
    return "".join(json.dumps(row) + "\n" for row in rows)


def refused(path, content, message):
    with pytest.raises(ConfigError, match=message):
        read_prompts(write(path, content))


def test_text_and_json_lines(tmp_path):
    assert read_prompts(write(tmp_path / "a.txt", "a cat\n\n a dog \n")).prompts == ["a cat", "a dog"]
    lines = tmp_path / "b.jsonl"
    prompts = read_prompts(write(lines, '{"prompt": "x", "target": "1"}\n{"prompt": "y"}\n'))
    assert prompts.columns == {"target": ["1", None]}
    assert prompts.rows([1, 0, 1]).prompts == ["y", "x", "y"]
    refused(lines, '{"prompt": "x"}\n{"text": "y"}\n', r"b\.jsonl:2: expected an object with a text 'prompt'")
    refused(tmp_path / "a.txt", "\n", r"a\.txt: no prompts")


@pytest.mark.parametrize("suffix", [*SUFFIXES[1:], ".JSONL", ".Json", ".CSV", ".TSV", ".Parquet"])
def test_every_format_is_read_by_its_suffix_in_any_case(tmp_path, suffix):
    prompts = read_prompts(write(tmp_path / f"a{suffix}", content(suffix.lower(), ROWS)))
    assert prompts == PromptSet(["a cat, red", 'a "dog"'], {"target": ["1", "2"]})


def test_an_array_holds_objects_or_texts(tmp_path):
    assert read_prompts(write(tmp_path / "a.json", '["x", {"prompt": "y"}]')).prompts == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.txt", ".jsonl"), ("a.txt", ".json"), ("a.jsonl", ".json"), ("a.json", ".jsonl"), ("a.csv", ".parquet")],
)
def test_the_content_is_believed_where_the_suffix_lies(tmp_path, name, kind):
    assert read_prompts(write(tmp_path / name, content(kind, ROWS))).columns == {"target": ["1", "2"]}


def test_a_text_file_of_json_lines_is_refused_where_a_line_is_none(tmp_path):
    refused(tmp_path / "a.txt", '{"prompt": "x"}\n{"prompt": \n', r"a\.txt:2: not JSON")


def test_text_that_only_looks_like_json_stays_text(tmp_path):
    lines = ["[a cat]", "{a|b} dog", '"quoted"', "7"]
    assert read_prompts(write(tmp_path / "a.txt", "\n".join(lines))).prompts == lines


@pytest.mark.parametrize("name", ["a.md", "a.yaml", "a.xlsx", "a.jsonl.gz", "a"])
def test_an_unknown_suffix_is_refused_with_the_ones_there_are(tmp_path, name):
    refused(tmp_path / name, "a cat\n", r"prompts are read from \.txt, .*\.parquet; save it as one")


@pytest.mark.parametrize("suffix", SUFFIXES[:-1])
def test_what_is_no_text_is_refused(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    refused(path, b"\x89PNG\r\n", "not UTF-8 text: .*; save it as UTF-8")
    refused(path, "prompt\na cat\n".encode("utf-16"), "not UTF-8 text")
    refused(path, b"prompt\na\0cat\n", "holds NUL bytes")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_without_prompts_is_refused(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    refused(path, "", rf"a\{suffix}")
    refused(path, content(suffix, [{"prompt": " "}]), rf"a\{suffix}: no prompts in it")


def test_an_empty_array_has_no_prompts(tmp_path):
    refused(tmp_path / "a.json", "[ ]\n", "no prompts in it")


def test_a_path_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path / "folder.txt"):
        (tmp_path / "folder.txt").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_prompts(path)


def test_parquet_needs_an_extra_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused(tmp_path / "a.parquet", b"", r"pip install 'flowrl-align\[parquet\]'")


@pytest.mark.parametrize("suffix", SUFFIXES[:-1])
def test_a_byte_order_mark_is_not_part_of_the_first_prompt(tmp_path, suffix):
    text = content(suffix, [{"prompt": "a cat"}])
    assert read_prompts(write(tmp_path / f"a{suffix}", text.encode("utf-8-sig"))).prompts == ["a cat"]


def test_lines_end_with_a_line_feed_only(tmp_path):
    text = "a\u2028b\x85c\x0bd\re\r\nf\r\n"
    assert read_prompts(write(tmp_path / "a.txt", text)).prompts == ["a\u2028b\x85c\x0bd\re", "f"]
    lines = "".join(json.dumps({"prompt": p}, ensure_ascii=False) + "\r\n" for p in ("a\u2028b", "c"))
    assert read_prompts(write(tmp_path / "a.jsonl", lines)).prompts == ["a\u2028b", "c"]
    assert read_prompts(write(tmp_path / "a.csv", "prompt\r\na\u2028b\r\nc\r\n")).prompts == ["a\u2028b", "c"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_blank_prompts_are_skipped_counted_and_told_once(tmp_path, caplog, suffix):
    rows = [{"prompt": prompt, "n": str(i)} for i, prompt in enumerate(["", "a cat", " \t\u3000", "a dog", ""])]
    path = write(tmp_path / f"a{suffix}", content(suffix, rows))
    for _ in range(2):
        prompts = read_prompts(path)
    expected = 2 if suffix == ".txt" else 3  # an empty line at the end of a text file is no prompt
    assert (prompts.prompts, prompts.num_skipped) == (["a cat", "a dog"], expected)
    assert prompts.columns == ({} if suffix == ".txt" else {"n": ["1", "3"]})
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("flowrl", logging.WARNING)
    assert record.getMessage() == f"{path}: {expected} blank prompt(s) skipped"


@pytest.mark.parametrize(
    ("suffix", "line"), [(".txt", "{}"), (".jsonl", '{{"prompt": "{}"}}'), (".csv", '"{}"'), (".tsv", "{}")]
)
def test_blank_lines_count_but_not_empty_ones_at_the_end(tmp_path, caplog, suffix, line):
    lines = [line.format("a"), "", line.format("b"), "", "", ""]
    head = ["prompt"] if suffix in (".csv", ".tsv") else []
    for end in ("\n", "\r\n"):
        prompts = read_prompts(write(tmp_path / f"a{suffix}", end.join(head + lines)))
        assert (prompts.prompts, prompts.num_skipped) == (["a", "b"], 1)
    caplog.clear()
    assert read_prompts(write(tmp_path / f"b{suffix}", "\n".join([*head, line.format("a"), "", ""]))).num_skipped == 0
    assert not caplog.records


def test_the_count_of_skipped_prompts_leaves_equality_and_rows_alone():
    some = PromptSet(["x", "y"], {"n": [1, 2]}, 3)
    assert PromptSet(["x"], {}).num_skipped == 0
    assert some == PromptSet(["x", "y"], {"n": [1, 2]})
    assert some.rows([1]) == PromptSet(["y"], {"n": [2]})


@pytest.mark.parametrize("row", ['{"prompt": "a\\ud800"}', '{"prompt": "a", "n": [{"x": "\\udc00"}]}'])
def test_half_a_surrogate_pair_is_refused(tmp_path, row):
    refused(tmp_path / "a.jsonl", '{"prompt": "\\ud83d\\ude00"}\n' + row, r"a\.jsonl:2: .* half a surrogate pair")
    refused(tmp_path / "a.json", '["x",\n "y",\n\n ' + row + "]", r"a\.json:4: .* half a surrogate pair")


@pytest.mark.parametrize("value", ["7", "null", "true", '["x"]', '{"text": "x"}'])
def test_a_prompt_that_is_no_text_is_refused(tmp_path, value):
    refused(tmp_path / "a.jsonl", f'{{"prompt": {value}}}', r"a\.jsonl:1: expected an object with a text 'prompt'")
    refused(
        tmp_path / "a.json", f'["x",\n{{"prompt": {value}}}]', r"a\.json:2: expected an object with a text 'prompt'"
    )


def test_a_row_that_is_no_object_is_refused(tmp_path):
    refused(tmp_path / "a.jsonl", '{"prompt": "x"}\n"y"', r"a\.jsonl:2: expected an object")
    refused(tmp_path / "a.json", '["x", null]', r"a\.json:1: expected an object")
    refused(tmp_path / "a.parquet", parquet({"prompt": ["x", None]}), r"a\.parquet:2: expected")
    refused(tmp_path / "a.parquet", parquet({"prompt": [1, 2]}), r"a\.parquet:1: expected")


@pytest.mark.parametrize("text", ['["x" "y"]', '["x",]', '["x"', '["x"]\n["y"]', '["x"}', "[,]"])
def test_a_malformed_array_is_refused(tmp_path, text):
    refused(tmp_path / "a.json", text, r"a\.json:1: not JSON")


def test_json_that_python_cannot_hold_is_refused(tmp_path):
    refused(tmp_path / "a.jsonl", '{"prompt": "x", "n": ' + "[" * 100_000, r"a\.jsonl:1: not JSON")
    refused(tmp_path / "a.jsonl", '{"prompt": "x", "n": ' + "1" * 10_000 + "}", r"a\.jsonl:1: not JSON")
    assert len(read_prompts(write(tmp_path / "a.txt", "[" * 100_000))) == 1


def test_a_missing_prompt_column_is_refused_with_those_there_are(tmp_path):
    refused(tmp_path / "a.csv", "text,n\nx,1\n", r"a\.csv:1: no column 'prompt'.*'text', 'n'")
    refused(tmp_path / "a.tsv", "prompt,n\nx,1\n", r"a\.tsv:1: no column 'prompt'.*'prompt,n'")
    refused(tmp_path / "a.parquet", parquet({"text": ["x"]}), r"a\.parquet: no column 'prompt'.*'text'")


@pytest.mark.parametrize("row", ["x", "x,1,2"])
def test_a_ragged_row_is_refused(tmp_path, row):
    refused(tmp_path / "a.csv", f'prompt,n\n"two\nlines",1\n{row}\n', r"a\.csv:4: \d values for 2 columns")


@pytest.mark.parametrize("text", ['prompt\n"x\ny\n', 'prompt\n"x"y\n', "prompt\n" + "x" * 200_000])
def test_a_malformed_table_is_refused(tmp_path, text):
    refused(tmp_path / "a.csv", text, r"a\.csv:2: ")


def test_a_name_that_occurs_twice_is_refused(tmp_path):
    refused(tmp_path / "a.csv", "prompt,n,n\nx,1,2\n", r"a\.csv:1: the column 'n' occurs twice")
    refused(tmp_path / "a.jsonl", '{"prompt": "x"}\n{"prompt": "y", "prompt": "z"}', r"a\.jsonl:2: .*occurs twice")
    schema = pa.schema([("prompt", pa.string()), ("n", pa.int64()), ("n", pa.int64())])
    out = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([["x"], [1], [2]], schema=schema), out)
    refused(tmp_path / "a.parquet", out.getvalue(), r"a\.parquet: the column 'n' occurs twice")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "[NaN]"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, value):
    rows = f'{{"prompt": "x"}}\n{{"prompt": "y", "n": {value}}}'
    refused(tmp_path / "a.jsonl", rows, r"a\.jsonl:2: .*no finite number")
    refused(tmp_path / "a.json", "[" + rows.replace("\n", ",\n") + "]", r"a\.json:2: .*no finite number")
    refused(tmp_path / "a.parquet", parquet({"prompt": ["x"], "n": [float("nan")]}), r"a\.parquet:1: .*no finite")


def test_values_keep_their_types_where_the_format_has_any(tmp_path):
    columns = {"a": [1, None], "b": [0.5, 1.5], "c": [True, False], "d": [["x"], []], "e": [{"k": "v"}, {"k": "w"}]}
    rows = [{"prompt": "x", **{name: values[i] for name, values in columns.items()}} for i in range(2)]
    for suffix in (".jsonl", ".json", ".parquet"):
        assert read_prompts(write(tmp_path / f"a{suffix}", content(suffix, rows))).columns == columns
    assert read_prompts(write(tmp_path / "a.csv", "prompt,a,c\nx,1,true\ny,,\n")).columns == {
        "a": ["1", ""],
        "c": ["true", ""],
    }


@pytest.mark.parametrize("name", ["prompts", "completions", "opponents", "self", "", " "])
@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_names_that_a_reward_cannot_be_called_with_are_refused(tmp_path, suffix, name):
    text = content(suffix, [{"prompt": "x", name: "y"}])
    refused(tmp_path / f"a{suffix}", text, r"a column cannot be named '.*'; rename or remove it")


def test_a_name_that_is_no_text_is_refused(tmp_path):
    refused(tmp_path / "a.jsonl", '{"prompt": "x", "\\ud800": 1}', r"a\.jsonl:1: .*surrogate")


@pytest.mark.parametrize("value", ['["a"]', '{"a": 1}'])
def test_a_category_that_is_no_text_is_refused_before_training(tmp_path, value):
    rows = '{"prompt": "x", "category": 7}\n{"prompt": "y", "category": ' + value + "}"
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match=r"a\.jsonl: row 2: 'category' is "):
        check_files(load_config(None, [f"data.eval={path}", f"output_dir={tmp_path / 'run'}"]))


def test_held_out_that_is_no_truth_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.csv: row 2: 'held_out' is 'maybe'; make it true or false"):
        check_categories(PromptSet(["x", "y"], {"held_out": ["no", "maybe"]}), tmp_path / "a.csv")


def test_truths_are_read_from_texts_numbers_and_booleans():
    assert all(truth(value) is True for value in (True, 1, 1.0, "true", "TRUE", "Yes", " 1 ", "1.0"))
    assert all(truth(value) is False for value in (False, None, 0, 0.0, "false", "False", "NO", "0", "", " "))
    assert all(truth(value) is None for value in ("maybe", 2, [], {}, [True]))


FRAGMENTS = st.lists(
    st.sampled_from(['{"prompt": "x"}', '{"prompt":', '"', "[", "]", "{", "}", ",", "\t", "\n", "\r\n", "prompt", " "])
    | st.sampled_from(["prompt,n\n", "x,1\n", "NaN", "null", "\ufeff", "\0", "\u2028", '"\\ud800"', "1e999", "PAR1"])
    | st.text(max_size=5),
    max_size=12,
).map(lambda parts: "".join(parts).encode("utf-8"))
DAMAGED = st.builds(
    lambda at, byte: (
        (whole := parquet({"prompt": ["x", "y"]}))[: at % len(whole)] + byte + whole[at % len(whole) + 1 :]
    ),
    st.integers(4, 2000),
    st.binary(min_size=1, max_size=1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("prompts")


@PATTERN
@given(data=st.binary(max_size=60) | FRAGMENTS | DAMAGED, suffix=st.sampled_from([*SUFFIXES, ".JSONL", ".md", ""]))
def test_any_file_is_read_or_refused(folder, data, suffix):
    try:
        prompts = read_prompts(write(folder / f"any{suffix}", data))
    except ConfigError as error:
        assert f"any{suffix}" in str(error)  # noqa: PT017
    else:
        assert suffix.lower() in SUFFIXES
        assert prompts.prompts
        assert all(prompt.strip() for prompt in prompts.prompts)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip)


@pytest.mark.parametrize("suffix", SUFFIXES)
@PATTERN
@given(prompts=st.lists(TEXTS, min_size=1, max_size=5))
def test_what_the_standard_writers_write_comes_back(folder, suffix, prompts):
    if suffix == ".txt":
        prompts = [" ".join(prompt.split()) for prompt in prompts]
    path = write(folder / f"back{suffix}", content(suffix, [{"prompt": prompt} for prompt in prompts]))
    assert read_prompts(path).prompts == prompts
