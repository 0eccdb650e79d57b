"""Whole runs in this process: what moves the weights, and what must not."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

import flowrl
from flowrl.config import load_config
from flowrl.errors import RewardError
from flowrl.run import train

SMALL = [
    "iterations=2",
    "rollout.num_prompts=2",
    "rollout.group_size=4",
    "rollout.num_inference_steps=4",
    "method.steps.range=[0,3]",
    "method.steps.size=2",
    "method.beta=0",
    "optimizer.updates_per_rollout=1",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "eval.num_prompts=6",
    "eval.num_inference_steps=2",
    "log.grid_every=0",
    "log.checkpoint_every=1",
    "log.keep_checkpoints=9",
]


def run(folder, *overrides):
    train(load_config(None, [*SMALL, f"output_dir={folder}", *overrides]))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for record in records if "reward" in record]


def weights(folder, iteration, name="policy"):
    return load_file(folder / "checkpoints" / f"{iteration:06d}" / f"{name}.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_equal_rewards_move_nothing(tmp_path):
    records = run(tmp_path, "rewards={'fake_rewards:constant': 1}")
    assert [record["frac_reward_zero_std"] for record in records] == [1, 1]
    assert same(weights(tmp_path, 0), weights(tmp_path, 2))


def test_different_rewards_move_the_weights_and_the_average_follows(tmp_path, exact):
    records = run(tmp_path, "rewards={'fake_rewards:dark': 1}", "optimizer.ema_decay=0.9")
    assert not same(weights(tmp_path, 0), weights(tmp_path, 1))
    assert not same(weights(tmp_path, 2), weights(tmp_path, 2, "ema"))
    assert all(record["ratio_deviation_first"] < exact for record in records)
    assert all(record["update_to_weight"] > 0 and record["grad_norm"] > 0 for record in records)


def test_how_often_one_saves_changes_nothing(tmp_path):
    shared = ["rewards={'fake_rewards:dark': 1}", "optimizer.ema_decay=0.9", "optimizer.updates_per_rollout=2"]
    run(tmp_path / "often", *shared)
    run(tmp_path / "once", *shared, "log.checkpoint_every=0", "eval.every=1", "log.grid_every=1")
    for name in ("policy", "ema"):
        assert same(weights(tmp_path / "often", 2, name), weights(tmp_path / "once", 2, name))


def test_equal_rewards_still_pull_towards_the_reference_where_there_is_a_kl_term(tmp_path):
    """The KL term acts on every sample; only without it are samples of advantage 0 left out."""
    run(tmp_path / "a", "rewards={'fake_rewards:dark': 1}", "method.beta=0.5", "optimizer.learning_rate=1e-3")
    records = run(
        tmp_path / "b",
        "rewards={'fake_rewards:constant': 1}",
        "method.beta=0.5",
        "optimizer.weight_decay=0",
    )
    assert all(record["kl"] == 0 for record in records)
    assert same(weights(tmp_path / "b", 0), weights(tmp_path / "b", 2))
    first, second = (
        json.loads(line)["kl"]
        for line in (tmp_path / "a" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1:3]
    )
    assert first == 0 < second


def test_several_updates_leave_the_ratio_at_one_only_for_the_first(tmp_path, exact):
    shared = ["rewards={'fake_rewards:dark': 1}", "optimizer.learning_rate=1e-3"]
    once = run(tmp_path / "one", *shared)
    twice = run(tmp_path / "two", *shared, "optimizer.updates_per_rollout=2")
    assert all(record["ratio_deviation"] < exact for record in once)
    assert all(record["ratio_deviation_first"] < exact < 1e-4 < record["ratio_deviation"] for record in twice)


@pytest.mark.parametrize("kind", ["none", "nan", "inf"])
def test_missing_scores_are_counted_and_spoil_nothing(tmp_path, kind):
    rewards = f"rewards=[{{name: 'fake_rewards:EveryThird', params: {{kind: {kind}}}}}]"
    records = run(tmp_path, rewards, "rollout.batch_size=8")
    assert [record["num_missing_scores"] for record in records] == [1, 1]
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path, 2).values())
    assert not same(weights(tmp_path, 0), weights(tmp_path, 2))


def test_a_reward_of_weight_zero_only_monitors(tmp_path):
    shared = ["log.checkpoint_every=0"]
    run(tmp_path / "a", "rewards={'fake_rewards:dark': 1}", *shared)
    records = run(tmp_path / "b", "rewards={'fake_rewards:dark': 1, 'fake_rewards:never': 0}", *shared)
    assert same(weights(tmp_path / "a", 2), weights(tmp_path / "b", 2))
    assert records[0]["rewards/fake_rewards:never/mean"] is None
    assert records[0]["num_missing_scores"] == 0


def test_a_run_without_any_score_stops(tmp_path):
    with pytest.raises(RewardError, match="no sample got a score of fake_rewards:never"):
        run(tmp_path, "rewards={'fake_rewards:never': 1}")


@pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"),
    reason="torch's bfloat16 attention fails where this hides the AVX-512 that the processor has",
)
@pytest.mark.parametrize("lora", [True, False])
def test_bfloat16_runs_to_the_end_with_float32_weights(tmp_path, lora):
    extra = ["model.lora.rank=4"] if lora else []
    settings = ["model.dtype=bfloat16", "iterations=1", "method.beta=0.1", "method.steps.range=[0,2]", *extra]
    records = run(tmp_path, "rewards={'fake_rewards:dark': 1}", *settings)
    # eps/2 4e-3 x sqrt(40 roundings in a row) = 0.025 of a velocity of 1, times |d mean / d v| / std: at most 0.6 on
    # the first two steps, 75 on the one to the tiny last sigma
    assert records[0]["ratio_deviation_first"] < 0.05
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path, 1).values())
    assert "reloaded into the stock pipeline" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    _, result = flowrl.evaluate(tmp_path)
    assert result.weights == "raw"


def test_reward_rises(tmp_path):
    """Ten iterations are enough to make pictures darker, on prompts that were not trained on."""
    run(
        tmp_path,
        "rewards={'fake_rewards:dark': 1}",
        "iterations=10",
        "rollout.num_prompts=4",
        "rollout.group_size=8",
        "optimizer.learning_rate=2e-4",
        "eval.num_prompts=48",
        "eval.num_inference_steps=4",
        "log.checkpoint_every=0",
    )
    record = next(
        r for r in json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) if r["subset"] == "all"
    )
    assert record["difference"] > 5 * record["standard_error"] > 0
    assert record["difference"] > 0.1 * record["before"]
