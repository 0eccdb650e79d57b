"""Every method through the real trainer: what an iteration costs, and what its limit cases are equal to."""

import numpy as np
import pytest
import torch
from one_iteration import G, P, T, run

from flowrl.catalog import METHODS, method_row
from flowrl.config import load_config
from flowrl.core.random import numpy_generator
from flowrl.core.types import Scores
from flowrl.errors import ConfigError


def kept_share(fraction):
    """Evaluations of the update where each sample trains a part of its steps, and a group shares its first state."""
    order = torch.from_numpy(numpy_generator(0, "select", 0).random((P * G, T - 1))).argsort(1).argsort(1)
    keep = order < int((T - 1) * fraction)
    first = keep[:, 0].reshape(P, G)
    return (int(keep.sum()) - int(first.sum()) + int(first.any(1).sum())) / (P * G)


# method: (rollout, completions, search, update) network evaluations of a sample
COST = {
    "flow_grpo": (T, 0, 0, T - 1),
    "flow_grpo_fast": (T, 0, 0, 3),
    "grpo_guard": (T, 0, 0, T - 1),
    "flow_dppo": (T, 0, 0, T - 1),
    "dance_grpo": (T - 1 + 1 / G, 0, 0, kept_share(0.6)),
    "mix_grpo": (1 / G + T - 1, 0, 0, 1 / G + 3),
    "dense_grpo": (T, T * (T + 1) / 2 - 1, 0, T - 1),
    "turning_point_grpo": (T, T * (T + 1) / 2 - 1, 0, T - 1),
    # step 1, strides 1 and 2: from position 2 to 3, 5, 7, 8
    "granular_grpo": (2 / G + T - 2, 1 + 3, 0, 1 / G),
    # step 1 merged over l = 2 at threshold 1.5: sigma / (1 - sigma) (sigma_1 - sigma_3) = 18 x 0.147
    "entropy_grpo": (2 / G + T - 1 - 2, 0, 0, 1 / G),
    "smart_grpo": (T, 0, 16 * 3 / G, T - 1),
    "pref_grpo": (T - 1 + 1 / G, 0, 0, kept_share(0.6)),
    # splits at 0 and 2: 1, 2, 2, 4, 4, 4, 4, 4 states of a tree before its steps
    "branch_grpo": (25 / 4, 0, 0, 21 / 4),
    "ram": (T, 0, 0, 3 * 8),
    "diffusion_nft": (T, 0, 0, 3 * 9),
    "awm": (T, 0, 0, 4 * 6),
    "rft": (T, 0, 0, 4 * 1 / G),
    "dgpo": (T, 0, 0, 3 * 4),
    # two of a group, each by the trained network and the reference
    "diffusion_dpo": (T, 0, 0, 4 / G),
    "apo": (T, 0, 0, (4 + 2 * 2) / G),
    "diffusion_kto": (T, 0, 0, 4 / G),
    "dspo": (T, 0, 0, 4 / G),
    "mapo": (T, 0, 0, 2 / G),
    "inpo": (T, 0, 0, (4 + 2 * 4) / G),
    # one state of a group before step 1
    "spo": (2 / G + T - 2, 0, 0, 2 / G),
}
MORE = {
    "granular_grpo": ["method.steps.steps=[1]", "method.strides=[1,2]"],
    "entropy_grpo": ["method.steps.steps=[1]", "method.steps.threshold=1.5"],
    "branch_grpo": ["method.steps.splits=[0,2]"],
    "dense_grpo": ["method.beta=0"],
    "turning_point_grpo": ["method.beta=0"],
    "apo": ["method.latest_time=1"],
    "spo": ["method.steps.steps=[1]"],
}


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS.load(name).needs_data])
def test_an_iteration_costs_what_the_method_says(name, tmp_path, exact):
    metrics, _ = run(tmp_path, f"method={name}", *MORE.get(name, []))
    found = [metrics[f"nfe/{phase}"] / (P * G) for phase in ("rollout", "completion", "search", "train")]
    assert found == pytest.approx(COST[name])
    assert metrics.get("ratio_deviation_first", 0) < exact
    assert all(np.isfinite(value) for value in metrics.values())


def test_every_method_says_what_it_is():
    for name in METHODS:
        row = method_row(name)
        assert all(row[key] for key in ("paper", "what it changes", "NFE")), name


def test_guidance_and_the_reference_are_counted(tmp_path):
    metrics, _ = run(tmp_path, "method=flow_grpo_fast", "method.beta=0.1", "rollout.guidance_scale=2")
    assert metrics["nfe/rollout"] == 2 * T * P * G
    assert metrics["nfe/train"] == 2 * 2 * 3 * P * G
    assert metrics["reward_calls"] == P * G


def test_completions_are_scored_once_each(tmp_path):
    metrics, _ = run(tmp_path, "method=dense_grpo", "rollout.share_initial_noise=true")
    # a group shares the completion of its initial noise; the sample itself is the last view
    assert metrics["reward_calls"] == P * (1 + G * (T - 2) + G)


def same(tmp_path, ours, theirs):
    a, b = run(tmp_path / "a", *ours)[1], run(tmp_path / "b", *theirs)[1]
    start = run(tmp_path / "c", *theirs, "optimizer.learning_rate=1e-30")[1]
    assert max((start[name] - b[name]).abs().max() for name in b) > 5e-5, "the iteration moved the weights"
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_smart_grpo_without_rounds_is_flow_grpo(tmp_path):
    assert same(tmp_path, ["method=smart_grpo", "method.noise_search.rounds=0"], ["method=flow_grpo"]) == 0


def test_mix_grpo_whose_window_is_everything_is_flow_grpo(tmp_path):
    parts = ["method.advantage_scale=group", "method.std_floor=1e-8", "rollout.share_initial_noise=true"]
    mix = ["method=mix_grpo", f"method.steps.size={T - 1}"]
    assert same(tmp_path, mix, ["method=flow_grpo", *parts]) == 0


def test_one_granularity_is_the_singular_plan(tmp_path, exact):
    one = ["method=granular_grpo", "method.strides=[1]"]
    assert same(tmp_path, one, ["method=granular_grpo", "method.credit=image"]) < exact


def test_entropy_without_merges_is_the_singular_plan(tmp_path, exact):
    merged = ["method=entropy_grpo", "method.steps.threshold=0"]
    assert same(tmp_path, merged, ["method=granular_grpo", "method.credit=image"]) < exact


def test_equal_noise_levels_are_one_noise_level(tmp_path):
    levels = f"method.noise_level=[{','.join(['0.6'] * (T - 1))}]"
    assert same(tmp_path, ["method=flow_grpo", levels], ["method=flow_grpo", "method.noise_level=0.6"]) == 0


def test_gdpo_of_one_reward_is_the_plain_sum(tmp_path):
    fast = ["method=flow_grpo_fast", "method.advantage_scale=group"]
    assert same(tmp_path, [*fast, "method.reward_aggregation=gdpo"], fast) == 0


def test_parts_combine(tmp_path):
    """Step rewards, a window, Guard's ratio, several rewards normalised each, searched noise: all at once."""
    metrics, _ = run(
        tmp_path,
        "method=turning_point_grpo",
        "method.steps={kind: sliding, size: 3}",
        "method.surrogate=guard",
        "method.reward_aggregation=gdpo",
        "method.noise_search={rounds: 1, candidates: 4, elites: 2}",
        "method.keep_best=2",
        "rewards={'fake_rewards:dark': 1, shapes_partial: 1}",
    )
    assert metrics["nfe/search"] == 4 * P
    assert metrics["nfe/completion"] == P * G * (8 + 7 + 6)
    assert np.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0


def test_self_paced_weights_are_logged_and_move(tmp_path):
    metrics, _ = run(
        tmp_path,
        "method=flow_grpo_fast",
        "rewards={'fake_rewards:dark': 1, shapes_partial: 1}",
        "reward_schedule={order: [shapes_partial, 'fake_rewards:dark']}",
    )
    shares = [metrics["reward_weight/shapes_partial"], metrics["reward_weight/fake_rewards:dark"]]
    assert sum(shares) == pytest.approx(1)
    assert metrics["competence/fake_rewards:dark"] == pytest.approx(metrics["rewards/fake_rewards:dark/mean"])


def test_searched_noise_survives_a_batch_that_cuts_a_group(tmp_path, exact):
    """A group that shares its noise shares the searched one, whichever of its members a batch holds."""
    shared = ["method=smart_grpo", "rollout.share_initial_noise=true"]
    cut, _ = run(tmp_path / "a", *shared, "rollout.batch_size=2")
    assert cut["ratio_deviation_first"] < exact
    whole, _ = run(tmp_path / "b", *shared)
    assert cut["reward"] == pytest.approx(whole["reward"], abs=exact)
    assert cut["reward_std"] == pytest.approx(whole["reward_std"], abs=exact)


def test_missing_scores_of_completions_are_counted(tmp_path, caplog):
    rewards = "rewards={'fake_rewards:never': 0, 'fake_rewards:OnlyTheLast': 1}"
    metrics, _ = run(tmp_path, "method=dense_grpo", "method.beta=0", rewards)
    assert metrics["num_missing_scores"] == P * G * (T - 1)
    assert metrics["nfe/train"] == 0
    assert "nothing to learn from, as 56 of 64 scores are missing" in caplog.text


def test_kept_samples_are_shared_out_evenly(tmp_path):
    metrics, _ = run(tmp_path, "method=dance_grpo", "method.keep_best=2", "optimizer.updates_per_rollout=4")
    assert "ratio_deviation_first" in metrics
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("method", ["dense_grpo", "smart_grpo", "granular_grpo"])
def test_a_judge_of_pairs_is_refused_where_single_completions_are_scored(method, tmp_path):
    with pytest.raises(ConfigError, match=f"compares the samples of a group, but method.name={method} also scores"):
        run(tmp_path, f"method={method}", "rewards={'fake_rewards:Darker': 1}")


def test_a_judge_of_pairs_trains(tmp_path):
    metrics, _ = run(tmp_path, "method=pref_grpo", "rewards={'fake_rewards:Darker': 1}")
    assert metrics["reward"] == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="must be a multiple of rollout.group_size=4"):
        run(tmp_path, "method=pref_grpo", "rewards={'fake_rewards:Darker': 1}", "rollout.batch_size=6")


def test_awm_s_ratio_moves_with_the_second_update(tmp_path, exact):
    """Its old policy is really old: 1 before the first update of a rollout, not before the second."""
    two = ["method=awm", "method.num_draws=2", "optimizer.updates_per_rollout=2", "optimizer.learning_rate=1e-3"]
    metrics, _ = run(tmp_path, *two)
    assert metrics["ratio_deviation_first"] < exact < 1e-4 < metrics["ratio_deviation"]


def test_rft_keeps_the_best_of_each_group():
    method = load_config(None, ["method={name: rft, num_kept: 2}"]).method
    advantages = torch.tensor([0.5, -1.0, 1.2, -0.7, 0.0, 0.0, 0.0, 0.0])[:, None].expand(8, 3)
    scores = Scores(torch.zeros(8, 1, 1), torch.ones(1), torch.tensor([0] * 4 + [1] * 4), 3)
    keep = method.select(advantages, scores, None)
    assert keep.nonzero()[:, 0].unique().tolist() == [0, 2], "none of a group of equals"
    assert keep[[0, 2]].all()


def test_nft_s_shares_of_every_mode():
    a = torch.tensor([-10.0, -2.5, 0.0, 2.5, 10.0])
    wanted = {
        "all": [0, 0.25, 0.5, 0.75, 1],
        "positive_only": [0.5, 0.5, 0.5, 0.75, 1],
        "negative_only": [0, 0.25, 0.5, 0.5, 0.5],
        "one_only": [0.5, 0.5, 0.5, 0.6, 0.6],
        "binary": [0.4, 0.4, 0.5, 0.6, 0.6],
    }
    for mode, shares in wanted.items():
        method = load_config(None, [f"method={{name: diffusion_nft, advantage_mode: {mode}}}"]).method
        assert method.shares(a).tolist() == pytest.approx(shares)
