"""The small parts of the trainer core: groups, random keys, EMA, evaluation, records."""

import math

import pytest
import torch

from flowrl.core.distributed import shard
from flowrl.core.ema import EMA
from flowrl.core.evaluation import mean_pairwise_distance, paired_difference
from flowrl.core.groups import iteration_ids
from flowrl.core.random import numpy_generator, torch_generator
from flowrl.core.tracking import MetricsFile, read_metrics


def test_prompts_come_in_shuffled_passes():
    rows = []
    for iteration in range(5):
        ids = iteration_ids(3, iteration, num_rows=10, num_prompts=4, group_size=3)
        assert ids.sample.tolist() == list(range(12))
        assert ids.group.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
        assert ids.prompt.reshape(4, 3).unique(dim=1).shape == (4, 1)
        rows += ids.prompt[::3].tolist()
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]


def test_random_numbers_are_keyed():
    draws = {
        key: torch.randn(4, generator=torch_generator(*key)).tolist()
        for key in [(0, "rollout", 1, 2), (0, "rollout", 2, 1), (1, "rollout", 1, 2), (0, "eval", 1, 2)]
    }
    assert len({str(draw) for draw in draws.values()}) == 4
    assert torch.randn(4, generator=torch_generator(0, "rollout", 1, 2)).tolist() == draws[0, "rollout", 1, 2]
    assert numpy_generator(0, "plan", 1).random() == numpy_generator(0, "plan", 1).random()


@pytest.mark.parametrize(("num", "world"), [(9, 2), (4, 3), (1, 2), (96, 8)])
def test_shards_cover_everything_once(num, world):
    shares = [shard(num, rank, world) for rank in range(world)]
    assert [row for share in shares for row in range(num)[share]] == list(range(num))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_ema_by_hand_and_swap_leaves_the_weights_alone():
    weight = torch.nn.Parameter(torch.tensor([10.0]))
    ema = EMA([("w", weight)], decay=0.5)
    weight.data.fill_(0.0)
    ema.update()  # decay min(0.5, 1/10) = 0.1: 0.1 * 10 + 0.9 * 0
    assert ema.shadow["w"].item() == pytest.approx(1.0)
    ema.update()  # decay min(0.5, 2/11): 1 * 2/11
    assert ema.shadow["w"].item() == pytest.approx(2 / 11)
    with pytest.raises(RuntimeError, match="inside"), ema.applied():
        assert weight.item() == pytest.approx(2 / 11)
        raise RuntimeError("inside")
    assert weight.item() == 0.0


def test_paired_difference_by_hand():
    # differences 1, 3, 2 (the NaN pair is left out): mean 2, std 1, standard error 1 / sqrt(3)
    before = torch.tensor([0.0, 1.0, 2.0, math.nan])
    after = torch.tensor([1.0, 4.0, 4.0, 1.0])
    assert paired_difference(before, after) == pytest.approx((2.0, 3**-0.5))


def test_mean_pairwise_distance_by_hand():
    # prompt a: three samples at 0, 3, 3 in each of 4 pixels: distances 3, 3, 0, mean 2; prompt b occurs once
    samples = torch.tensor([0.0, 3.0, 7.0, 3.0])[:, None, None].expand(4, 2, 2)
    assert mean_pairwise_distance(samples, ["a", "a", "b", "a"]) == pytest.approx(2.0)
    assert math.isnan(mean_pairwise_distance(samples, ["a", "b", "c", "d"]))


def test_metrics_file_forgets_what_a_resumed_run_will_write_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for iteration in (1, 2, 3):
        file.write(iteration, {"reward": float(iteration), "bad": math.nan})
    with path.open("a", encoding="utf-8", newline="\n") as raw:
        raw.write('{"iteration": 4, "rew')  # killed while writing
    kept = [record for record in read_metrics(path) if record["iteration"] <= 2]
    MetricsFile(path, records=kept).write(3, {"reward": 30.0})
    assert [(r["iteration"], r["reward"]) for r in read_metrics(path)] == [(1, 1), (2, 2), (3, 30)]
    assert read_metrics(path)[0]["bad"] is None
