"""Preference data: what is read, what is refused, what is left unopened, and pairs from rewards."""

import io
import json
import math
import subprocess
import sys

import pytest
from PIL import Image

from flowrl.core.pairs import Pair, PairSet, _column, best_and_worst, check_pairs, open_image, read_pairs, write_pairs
from flowrl.errors import ConfigError

NAN = math.nan
RED, BLUE, GREEN = (200, 10, 20), (30, 40, 250), (5, 180, 60)


def png(colour, form="PNG"):
    stream = io.BytesIO()
    Image.new("RGB", (3, 2), colour).save(stream, format=form)
    return stream.getvalue()


def colour(image):
    assert image.mode == "RGB"
    return image.getpixel((0, 0))


@pytest.fixture
def folder(tmp_path):
    """An empty folder with the images a.png (red) and sub/b.png (blue)."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.png").write_bytes(png(RED))
    (tmp_path / "sub" / "b.png").write_bytes(png(BLUE))
    return tmp_path


def jsonl(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def parquet(path, columns, row_group_size=2, **options):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, row_group_size=row_group_size, **options)
    return path


def colours(pairs):
    return [tuple(None if image is None else colour(image) for image in pair.open()) for pair in pairs]


ROW = {"prompt": "p", "image_w": "a.png", "image_l": "sub/b.png"}


@pytest.mark.parametrize("name", ["pairs.jsonl", "metadata.jsonl", "other.jsonl"])
def test_jsonl_beside_its_images(folder, name):
    rows = [ROW | {"reward_w": 2, "reward_l": 0.5, "seed": 3}, "", {**ROW, "prompt": "q", "kind": "x"}]
    path = jsonl(folder / name, *rows)
    pairs = read_pairs(path if name == "other.jsonl" else folder)
    assert len(pairs) == 2 and pairs.has_losers and not pairs.dropped
    assert colours(pairs) == [(RED, BLUE)] * 2
    assert [(pair.reward_w, pair.reward_l) for pair in pairs] == [(2.0, 0.5), (None, None)]
    assert pairs[1].where == f"{path}:3"
    prompts = pairs.prompt_set()
    assert prompts.prompts == ["p", "q"] and prompts.columns == {"kind": [None, "x"], "seed": [3, None]}


def test_sft_rows(folder):
    pairs = read_pairs(jsonl(folder / "x.jsonl", {"prompt": "p", "image": "sub/b.png", "n": 1}))
    assert not pairs.has_losers and pairs[0].loser is None and pairs[0].columns == {"n": 1}
    assert colours(pairs) == [(BLUE, None)]


def test_pairs_jsonl_goes_before_the_others(folder):
    jsonl(folder / "pairs.jsonl", ROW)
    jsonl(folder / "metadata.jsonl", ROW, ROW)
    assert len(read_pairs(folder)) == 1


def test_a_slice_keeps_what_was_dropped():
    pairs = PairSet([Pair("a", b""), Pair("b", b""), Pair("c", b"")], {"ties": 4})
    assert pairs[1:].prompt_set().prompts == ["b", "c"] and pairs[1:].dropped == {"ties": 4}


def test_a_jpeg_is_turned_upright_and_an_alpha_channel_is_dropped(tmp_path):
    image = Image.new("RGB", (3, 2), RED)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(tmp_path / "turned.jpg").size == (2, 3)
    assert colour(open_image(Image.new("RGBA", (3, 2), (*GREEN, 255)))) == GREEN


@pytest.mark.parametrize("as_file", [True, False])
def test_round_trip(tmp_path, as_file):
    noise = Image.frombytes("RGB", (8, 8), bytes((7 * i * i + 3) % 256 for i in range(192)))
    noise.save(tmp_path / "noise.bmp")
    winner = tmp_path / "noise.bmp" if as_file else noise
    pairs = [Pair("né", winner, png(BLUE), 1.5, -2.0, {"seed": 3, "tags": ["a"]}), Pair("q", png(RED), noise)]
    assert write_pairs(tmp_path / "out", iter(pairs)) == 2
    again = read_pairs(tmp_path / "out")
    assert again[0].open()[0].tobytes() == again[1].open()[1].tobytes() == noise.tobytes()
    assert colour(again[0].open()[1]) == BLUE and colour(again[1].open()[0]) == RED
    assert [(p.prompt, p.reward_w, p.reward_l, p.columns) for p in again] == [
        ("né", 1.5, -2.0, {"seed": 3, "tags": ["a"]}),
        ("q", None, None, {}),
    ]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["images", "pairs.jsonl"]
    assert len(list((tmp_path / "out" / "images").glob("*.png"))) == 4


def test_round_trip_of_sft_rows(tmp_path):
    (tmp_path / "out").mkdir()  # an empty folder will do
    write_pairs(tmp_path / "out", [Pair("p", png(GREEN))])
    assert json.loads((tmp_path / "out" / "pairs.jsonl").read_text(encoding="utf-8")) == {
        "prompt": "p",
        "image": "images/000000.png",
    }
    assert colours(read_pairs(tmp_path / "out")) == [(GREEN, None)]


def test_a_write_that_breaks_leaves_no_pairs_jsonl(tmp_path):
    with pytest.raises(ConfigError, match="row 2: cannot read the image"):
        write_pairs(tmp_path / "out", [Pair("p", png(RED)), Pair("q", b"no image", where="row 2")])
    assert not (tmp_path / "out" / "pairs.jsonl").exists()
    with pytest.raises(ConfigError, match="neither pairs.jsonl"):
        read_pairs(tmp_path / "out")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "no pairs to write"),
        ([Pair("p", png(RED), columns={"image_w": 1})], "rename the columns image_w"),
        ([Pair("p", png(RED), columns={"x": object()})], "cannot be written as JSON"),
        ([Pair("p", png(RED), reward_w=NAN)], "'reward_w' is nan"),
        ([Pair("p", png(RED)), Pair("p", png(RED), png(BLUE))], "a pair and an SFT row"),
    ],
)
def test_what_is_not_written(tmp_path, pairs, message):
    with pytest.raises(ConfigError, match=message):
        write_pairs(tmp_path / "out", pairs)
    assert not (tmp_path / "out" / "pairs.jsonl").exists()


def test_a_folder_in_use_is_not_written_to(folder):
    for taken in (folder, folder / "a.png"):
        with pytest.raises(ConfigError, match="exists and is not an empty folder"):
            write_pairs(taken, [Pair("p", png(RED))])
    assert sorted(path.name for path in folder.iterdir()) == ["a.png", "sub"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ({"image": "a.png", "text": "t"}, r"no 'prompt'; rename the column that holds it \(found: image, text\)"),
        (ROW | {"prompt": 3}, "'prompt' is not text but 3"),
        ({"prompt": "p", "x": 1}, "or 'image' alone for SFT data; has prompt, x"),
        ({"prompt": "p", "image_w": "a.png"}, "'image_w' and 'image_l', .* has image_w"),
        (ROW | {"image": "a.png"}, "has image and image_l and image_w"),
        (ROW | {"image_l": None}, "'image_l' is None, expected the path"),
        (ROW | {"image_w": "c.png"}, r"image_w: no file .*c\.png"),
        (ROW | {"image_l": "./a.png"}, "are the same file"),
        (ROW | {"reward_w": "high"}, "'reward_w' is 'high'"),
        (ROW | {"reward_l": True}, "'reward_l' is True"),
        ('{"prompt": "p", "image": "a.png", "reward_w": NaN}', "'reward_w' is nan"),
        ({"prompt": "p", "image": "a.png"}, "a pair and an SFT row .*x.jsonl:1 is the other kind"),
    ],
)
def test_refused_rows_are_named(folder, row, message):
    path = jsonl(folder / "x.jsonl", ROW, row)
    with pytest.raises(ConfigError, match=rf"x\.jsonl:2: .*{message}"):
        read_pairs(path)


def test_refused_files(folder):
    (folder / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    for name, message in [
        ("none", "no such file"),
        ("none-*.parquet", "no such file"),
        ("a.png", "read from .jsonl or .parquet"),
        ("sub", "neither pairs.jsonl, metadata.jsonl nor"),
        (jsonl(folder / "empty.jsonl", "").name, "no pairs in it"),
        ("latin.jsonl", "not UTF-8"),
    ]:
        with pytest.raises(ConfigError, match=message) as error:
            read_pairs(folder / name)
        assert name in str(error.value)


def test_a_broken_image_is_met_when_it_is_opened(folder):
    whole = png(RED)
    (folder / "half.png").write_bytes(whole[: len(whole) - 25])
    path = jsonl(folder / "x.jsonl", ROW, ROW | {"image_w": "half.png"})
    pairs = read_pairs(path)
    pairs[0].open()
    with pytest.raises(ConfigError, match=r"x\.jsonl:2: cannot read .*half\.png"):
        pairs[1].open()
    with pytest.raises(ConfigError, match=r"half\.png"):
        check_pairs(path)


def test_check_pairs_counts(folder):
    rows = [ROW, ROW, ROW | {"prompt": "q"}]
    assert check_pairs(jsonl(folder / "x.jsonl", *rows)) == {"pairs": 3, "prompts": 2}


@pytest.mark.parametrize("kind", ["path", "bytes", "struct", "struct of a path"])
def test_parquet_images(folder, kind):
    pa = pytest.importorskip("pyarrow")
    (folder / "c.png").write_bytes(png(GREEN))
    files, contents = ["a.png", "sub/b.png", "c.png"], [png(RED), png(BLUE), png(GREEN)]
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = {
        "path": pa.array(files),
        "bytes": pa.array(contents),
        "struct": pa.array([{"bytes": content, "path": "elsewhere.png"} for content in contents], struct),
        "struct of a path": pa.array([{"bytes": None, "path": name} for name in files], struct),
    }[kind]
    columns = {"prompt": ["a", "b", "c"], "reward_w": [1.0, None, 3.0], "seed": [7, 8, 9], "other": [b"x"] * 3}
    pairs = read_pairs(parquet(folder / "x.parquet", columns | {"image_w": images, "image_l": images.take([1, 2, 0])}))
    assert colours(pairs) == [(RED, BLUE), (BLUE, GREEN), (GREEN, RED)]
    assert [pair.reward_w for pair in pairs] == [1.0, None, 3.0]
    assert pairs.prompt_set().columns == {"seed": [7, 8, 9]}
    assert pairs[2].where.endswith("x.parquet:3")
    sft = read_pairs(parquet(folder / "y.parquet", {"prompt": ["a", "b", "c"], "image": images}))
    assert colours(sft) == [(RED, None), (BLUE, None), (GREEN, None)]


def picks(*labels, has_label=None):
    """Pick-a-Pic rows: the first image red, the second blue."""
    n = len(labels)
    return {
        "caption": [f"c{i}" for i in range(n)],
        "jpg_0": [png(RED)] * n,
        "jpg_1": [png(BLUE)] * n,
        "label_0": [float(label) for label in labels],
        "label_1": [1.0 - label for label in labels],
        "has_label": has_label or [True] * n,
        "user_id": list(range(n)),
    }


def test_pick_a_pic(tmp_path):
    rows = picks(1, 0.5, 0, 0, 0.5, 1, has_label=[True, True, True, False, False, True])
    pairs = read_pairs(parquet(tmp_path / "x.parquet", rows))
    assert [pair.prompt for pair in pairs] == ["c0", "c2", "c5"]
    assert colours(pairs) == [(RED, BLUE), (BLUE, RED), (RED, BLUE)]
    assert pairs.dropped == {"ties": 1, "unlabelled": 2}
    assert check_pairs(tmp_path / "x.parquet") == {"pairs": 3, "prompts": 3, "ties": 1, "unlabelled": 2}
    assert [pair.where.rpartition(":")[2] for pair in pairs] == ["1", "3", "6"]
    assert pairs.prompt_set().columns == {}


def test_pick_a_pic_refusals(tmp_path):
    rows = picks(1, 0.5)
    for change, message in [
        ({"label_1": [1.0, 0.5]}, r"x\.parquet:1: label_0, label_1 are \(1\.0, 1\.0\)"),
        ({"has_label": [False, True]}, "no pairs in it .*1 dropped: unlabelled; 1 dropped: ties"),
        ({"caption": [None, "x"]}, r"x\.parquet:1: 'prompt' is not text but None"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_pairs(parquet(tmp_path / "x.parquet", rows | change))
    del rows["has_label"], rows["label_1"]
    with pytest.raises(ConfigError, match=r"x\.parquet: .* but no label_1, has_label"):
        read_pairs(parquet(tmp_path / "x.parquet", rows))


def test_shards(tmp_path):
    for split, i, labels in [("train", 1, [0]), ("train", 0, [1, 1]), ("test", 0, [0.5])]:
        parquet(tmp_path / f"{split}-{i:05d}-of-00002-0abc.parquet", picks(*labels))
    with pytest.raises(ConfigError, match=r"the splits test, train; choose one: .*test-\*\.parquet"):
        read_pairs(tmp_path)
    pairs = read_pairs(tmp_path / "train-*.parquet")
    assert colours(pairs) == [(RED, BLUE), (RED, BLUE), (BLUE, RED)]
    (tmp_path / "test-00000-of-00002-0abc.parquet").unlink()
    assert len(read_pairs(tmp_path)) == 3 and not read_pairs(tmp_path).dropped


def test_parquet_refusals(folder):
    image = png(RED)
    for columns, message in [
        ({"text": ["a"], "image": [image]}, r"x\.parquet: no 'prompt'"),
        ({"prompt": ["a"], "image_w": [image]}, r"x\.parquet: needs 'image_w' and 'image_l'"),
        ({"prompt": [b"a"], "image": [image]}, r"x\.parquet:1: 'prompt' is not text"),
        ({"prompt": ["a"], "image": ["none.png"]}, r"x\.parquet:1: image: no file"),
        ({"prompt": ["a"], "image_w": ["a.png"], "image_l": ["a.png"]}, r"x\.parquet:1: .* same file"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_pairs(parquet(folder / "x.parquet", columns))
    (folder / "y.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(ConfigError, match=r"y\.parquet: not a parquet file"):
        read_pairs(folder / "y.parquet")


def test_parquet_cells_are_met_when_they_are_opened(folder):
    images = [png(RED), b"junk", None]
    pairs = read_pairs(parquet(folder / "x.parquet", {"prompt": ["a", "b", "c"], "image": images}))
    assert colour(pairs[0].open()[0]) == RED
    with pytest.raises(ConfigError, match=r"x\.parquet:2: cannot read the image"):
        pairs[1].open()
    with pytest.raises(ConfigError, match=r"x\.parquet:3: no image in 'image'"):
        pairs[2].open()


def test_reading_leaves_the_bytes_of_images_in_the_file(tmp_path):
    """The page header of the images is destroyed: reading does not notice, opening does."""
    path = parquet(tmp_path / "x.parquet", {"prompt": ["a", "b"], "image": [png(RED)] * 2}, use_dictionary=False)
    import pyarrow.parquet as pq

    start = pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    content = path.read_bytes()
    path.write_bytes(content[:start] + b"\xff" * 20 + content[start + 20 :])
    pairs = read_pairs(path)
    assert [pair.prompt for pair in pairs] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"x\.parquet:1: not a parquet file that can be read"):
        pairs[0].open()


def test_a_row_group_is_read_once_for_its_rows(tmp_path):
    pairs = read_pairs(parquet(tmp_path / "x.parquet", picks(1, 0, 1, 0), row_group_size=4))
    _column.cache_clear()
    colours(pairs)
    assert _column.cache_info().misses == 2


def test_without_pyarrow_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pip install 'flowrl-align\[parquet\]'"):
        read_pairs(tmp_path / "x.parquet")


def test_import_costs_neither_torch_nor_pyarrow():
    code = "import sys, flowrl.core.pairs; assert not {'torch', 'pyarrow', 'diffusers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("rewards", "groups", "margin", "expected"),
    [
        ([1.0, 3.0, 2.0, 0.0], [0, 0, 0, 0], 0.0, [(1, 3)]),
        ([1.0, 3.0, 2.0, 0.0], [5, 2, 5, 2], 0.0, [(2, 0), (1, 3)]),
        ([1.0, 3.0, 2.0, 0.0], [5, 2, 5, 2], 1.0, [(1, 3)]),  # a difference of the margin itself is too small
        ([4.0, 4.0, 1.0, 1.0], [0, 0, 0, 0], 0.0, [(0, 2)]),
        ([2.0, 2.0], [0, 0], 0.0, []),
        ([NAN, 1.0, 5.0, NAN], [0, 0, 0, 1], 0.0, [(2, 1)]),
        ([NAN, 1.0], [0, 0], 0.0, []),
        ([-math.inf, 1.0], [0, 0], 0.0, [(1, 0)]),
        ([], [], 0.0, []),
    ],
)
def test_best_and_worst(rewards, groups, margin, expected):
    assert best_and_worst(rewards, groups, margin=margin) == expected


def test_best_and_worst_refusals():
    with pytest.raises(ValueError, match="margin must not be negative"):
        best_and_worst([1.0], [0], margin=-0.1)
    with pytest.raises(ValueError, match="shorter|longer"):
        best_and_worst([1.0, 2.0], [0])
