import json

import torch

from flowrl.shapes.pretrain import train_vae
from flowrl.shapes.tiny_sd3 import build_pipeline


def weights(pipe):
    return torch.cat([value.flatten() for value in pipe.vae.state_dict().values()])


def test_a_stopped_stage_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    """The stage saves after every second step here; it is stopped after the second and goes on to the fourth."""
    options = {"seed": 0, "batch": 4, "save_every": 2, "num_checked": 20}
    whole = build_pipeline(0)
    (tmp_path / "whole").mkdir()
    train_vae(whole, tmp_path / "whole", 4, **options)

    stopped = tmp_path / "stopped"
    stopped.mkdir()
    train_vae(build_pipeline(0), stopped, 4, stop_after=2, **options)
    again = build_pipeline(0)
    train_vae(again, stopped, 4, **options)
    torch.testing.assert_close(weights(again), weights(whole), rtol=0, atol=0)
    records = [json.loads(line) for line in (stopped / "vae.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [2, 4]
    assert 0 <= records[-1]["strict_after_reconstruction"] <= 1
