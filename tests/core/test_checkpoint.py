"""Checkpoints are whole or absent, and a broken one costs no more than itself."""

import json
import logging

import pytest
import torch

from flowrl.core.checkpoint import load_checkpoint, load_newest, save_checkpoint
from flowrl.core.manifest import MANIFEST, list_checkpoints, made_of
from flowrl.errors import CheckpointError


def save(folder, iteration, keep=2):
    weights = {"policy": {"w": torch.full((2,), float(iteration))}}
    return save_checkpoint(folder, iteration, weights, {"seen": iteration}, keep=keep, made_of={"config": {"a": 1}})


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def test_the_newest_are_kept_and_what_is_not_finished_does_not_count(tmp_path):
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    assert names(tmp_path) == ["000002", "000003"]
    path, weights, state = load_newest(tmp_path)
    assert path.name == "000003"
    assert weights["policy"]["w"].tolist() == [3, 3]
    assert state == {"iteration": 3, "seen": 3}
    assert made_of(path) == {"config": {"a": 1}}
    (tmp_path / ".partial-000004").mkdir()
    (tmp_path / "000005").mkdir()  # nothing in it
    assert names(tmp_path) == ["000002", "000003"]
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        load_checkpoint(tmp_path / "000005")
    save(tmp_path, 6)
    assert not (tmp_path / ".partial-000004").exists()


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def empty(path):
    path.write_bytes(b"")


def other(path):
    """As long as before, one bit different."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("old", "new"), [('"bytes"', '"cytes"'), ('"made_of": {', '"made_of": 1, "x": {'), ("{", "[{")]
)
def test_a_manifest_of_another_form_is_a_broken_one(tmp_path, old, new):
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / MANIFEST
    manifest.write_text(manifest.read_text("utf-8").replace(old, new, 1), encoding="utf-8")
    assert names(tmp_path) == ["000001"]


@pytest.mark.parametrize("file", ["state.pt", "policy.safetensors", MANIFEST])
@pytest.mark.parametrize("spoil", [cut, empty, other, lambda path: path.unlink()], ids=["cut", "empty", "bit", "gone"])
def test_a_broken_checkpoint_is_named_and_the_one_before_is_used(tmp_path, caplog, file, spoil):
    save(tmp_path, 1)
    spoil(save(tmp_path, 2) / file)
    with caplog.at_level(logging.WARNING):
        path, weights, _ = load_newest(tmp_path)
    assert path.name == "000001" and weights["policy"]["w"].tolist() == [1, 1]
    assert "000002 is broken" in caplog.text and "going back to" in caplog.text and str(path) in caplog.text


def test_where_all_are_broken_each_is_named(tmp_path):
    for iteration in (1, 2):
        empty(save(tmp_path, iteration) / "state.pt")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint in .*000001: state\.pt.*000002: state\.pt"):
        load_newest(tmp_path)


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="cannot write the checkpoint .*000002"):
        save_checkpoint(tmp_path, 2, {"no/such/folder": {"w": torch.zeros(2)}}, {}, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


def test_a_manifest_lists_every_file(tmp_path):
    folder = save(tmp_path, 1)
    listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    assert set(listed) == {path.name for path in folder.iterdir()} - {MANIFEST}
