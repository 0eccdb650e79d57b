"""The methods of the Flow-GRPO family without a model: advantages, selection, and what they refuse."""

import math

import numpy as np
import pytest
import torch

from flowrl.catalog import METHODS
from flowrl.config import RolloutSection
from flowrl.core.types import SampleIds, Scores
from flowrl.flow.methods.branch_grpo import BranchGRPO
from flowrl.flow.methods.dance_grpo import DanceGRPO
from flowrl.flow.methods.dense_grpo import DenseGRPO
from flowrl.flow.methods.entropy_grpo import EntropyGRPO
from flowrl.flow.methods.flow_grpo import FlowGRPO
from flowrl.flow.methods.granular_grpo import GranularGRPO
from flowrl.flow.methods.grpo_guard import GRPOGuard
from flowrl.flow.methods.pref_grpo import PrefGRPO
from flowrl.flow.methods.smart_grpo import SmartGRPO
from flowrl.flow.methods.stepwise import StepwiseMethod
from flowrl.flow.methods.turning_point_grpo import TurningPointGRPO

NAN = math.nan


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def scored(rewards, group, num_units=1):
    """Scores of a single reward of weight 1 from rewards (N, V)."""
    return Scores(rewards.double()[:, :, None], torch.ones(1, dtype=torch.float64), group, num_units)


def chosen(method, scores, units, seed=0):
    """Selected units (N, U), as the trainer asks for them."""
    advantages = method.advantages(scores).expand(-1, units)
    return method.select(advantages, scores, np.random.default_rng(seed))


# advantages


def test_dense_advantages_are_increments_normalised_at_each_step_in_each_group():
    # group 0: rewards 0, 1, 1 and 0, 3, 0: increments 1, 0 and 3, -3.
    #   step 1: mean 2, std 1: -1, 1 over 1 + 1e-4.  step 2: mean -1.5, std 1.5: 1.5, -1.5 over 1.5 + 1e-4.
    # group 1: rewards 0, 0, 0 and 0, 10, 10: increments 0, 0 and 10, 0.
    #   step 1: mean 5, std 5: -5, 5 over 5 + 1e-4.  step 2: equal, so 0.
    rewards, group = doubles([[0, 1, 1], [0, 0, 0], [0, 3, 0], [0, 10, 10]]), torch.tensor([0, 1, 0, 1])
    found = DenseGRPO().advantages(scored(rewards, group, 2))
    a, b, c = 1 / 1.0001, 1.5 / 1.5001, 5 / 5.0001
    torch.testing.assert_close(found, doubles([[-a, b], [-c, 0], [a, -b], [c, 0]]))
    # the same reward for the image itself is not the same credit: plain Flow-GRPO prefers sample 0 to sample 2
    assert FlowGRPO().advantages(scored(rewards, group, 2))[[0, 2], 0].sign().tolist() == [1, -1]


def test_granular_advantages_are_summed_over_the_granularities():
    # three granularities in a group of two: (0, 1), (3, 5), (7, 7): normalised -1, 1 | -1, 1 | 0, 0
    rewards, group = doubles([[0, 3, 7], [1, 5, 7]]), torch.zeros(2, dtype=torch.long)
    method = GranularGRPO(std_floor=0)
    torch.testing.assert_close(method.advantages(scored(rewards, group)), doubles([[-2], [2]]))
    # where they disagree they cancel, whatever their scales
    rewards = doubles([[0, 500, 7], [1, 300, 7]])
    torch.testing.assert_close(method.advantages(scored(rewards, group)), doubles([[0], [0]]))


def test_granular_advantages_are_clamped_after_the_sum():
    # one outlier among 24: sqrt(23) = 4.796 at each of three granularities, within the clamp, and 14.39 in the sum;
    # the others have -1 / sqrt(23) each
    rewards, group = torch.zeros(24, 3), torch.zeros(24, dtype=torch.long)
    rewards[5] = 1
    found = GranularGRPO(std_floor=0).advantages(scored(rewards, group))
    assert found.shape == (24, 1)
    assert found[5].item() == 5
    torch.testing.assert_close(found[:5], torch.full((5, 1), -3 / 23**0.5, dtype=torch.float64))
    # 40 samples: sqrt(39) = 6.24, beyond the clamp, for the only good one, and -sqrt(19) for one of two bad ones;
    # together 1.89, where 5 - sqrt(19) would be 0.64
    rewards = torch.zeros(40, 2)
    rewards[5] = torch.tensor([1.0, -1.0])
    rewards[6, 1] = -1
    found = GranularGRPO(strides=(1, 2), std_floor=0).advantages(scored(rewards, torch.zeros(40, dtype=torch.long)))
    assert found[5].item() == pytest.approx(39**0.5 - 19**0.5)


def test_one_granularity_is_plain():
    rewards, group = torch.randn(12, 1), torch.arange(3).repeat(4)
    plain = FlowGRPO(advantage_scale="group", std_floor=1e-8).advantages(scored(rewards, group))
    torch.testing.assert_close(GranularGRPO(strides=(1,)).advantages(scored(rewards, group)), plain)
    torch.testing.assert_close(EntropyGRPO().advantages(scored(rewards, group)), plain)


def test_turning_point_floor_is_relative_to_the_rewards():
    rewards, group = torch.randn(12, 6, dtype=torch.float64), torch.arange(2).repeat_interleave(6)
    method = TurningPointGRPO()
    large, small = scored(rewards, group, 5), scored(1e-3 * rewards, group, 5)
    found = method.advantages(large)
    assert found.shape == (12, 5)
    torch.testing.assert_close(method.advantages(small), found, rtol=0, atol=1e-9)
    # an absolute floor shrinks the advantages of small rewards: 1e-3 over (1e-3 + 1e-2)
    absolute = method.model_copy(update={"relative_std_floor": False})
    assert absolute.advantages(small).abs().mean() < 0.2 * found.abs().mean()


def test_turning_points_count_all_that_follows_in_the_advantage():
    # group of two, 3 steps. Sample 0: 0, -1, 1, 2: step 2 turns (d_1 = -1 against +2, then +2, and +1 follows),
    #   so it is worth R_3 - R_1 = 3 instead of 2.
    # Sample 1: 0, 3, 2, 1: no turning point: 3, -1, -1. Increments -1, 3, 1 | 3, -1, -1; one sign is missing, so the
    #   only turning point is kept. Centered: step 1: -2, 2; step 2: 2, -2; step 3: 1, -1.
    rewards, group = doubles([[0, -1, 1, 2], [0, 3, 2, 1]]), torch.zeros(2, dtype=torch.long)
    method = TurningPointGRPO(advantage_scale="none")
    torch.testing.assert_close(method.advantages(scored(rewards, group, 3)), doubles([[-2, 2, 1], [2, -2, -1]]))


@pytest.mark.parametrize("transform", [torch.exp, torch.atan, lambda x: x**3 - 5, lambda x: 1e-3 * x])
def test_pref_advantages_see_only_the_order_of_scores(transform):
    rewards, group = torch.randn(16, 1, dtype=torch.float64), torch.arange(2).repeat(8)
    method = PrefGRPO()
    found = method.advantages(scored(rewards, group))
    assert torch.equal(method.advantages(scored(transform(rewards), group)), found)
    assert found.abs().max() > 1
    # the scores themselves are not that patient
    plain = method.model_copy(update={"preference": False})
    once, again = plain.advantages(scored(rewards, group)), plain.advantages(scored(rewards.exp(), group))
    assert (once - again).abs().max() > 0.05


def test_pref_advantages_by_hand():
    # 1, 2, 1000 beat 0, 1/2, 1 of the group: mean 1/2, std sqrt(1/6); the outlier counts no more than its rank
    rewards, group = doubles([[1], [1000], [2]]), torch.zeros(3, dtype=torch.long)
    edge = 0.5 / (6**-0.5 + 1e-4)
    torch.testing.assert_close(PrefGRPO().advantages(scored(rewards, group)), doubles([[-edge], [edge], [0]]))


def test_branch_advantages_by_hand():
    # leaves 1, 3, 5, 11; splits at 0 and 2. Units 0, 1: edges worth 2 and 8: mean 5, std 3: -1, 1.
    # Units 2, 3: the leaves, mean 5, centered -4, -2, 0, 6, std sqrt((16 + 4 + 36) / 4) = sqrt(14).
    method, root = BranchGRPO(steps={"splits": (0, 2)}, std_floor=0), 14**0.5
    rewards, group = doubles([[1], [3], [5], [11]]), torch.zeros(4, dtype=torch.long)
    found = method.advantages(scored(rewards, group, 4))
    expected = doubles([[-1, -1, -4, -4], [-1, -1, -2, -2], [1, 1, 0, 0], [1, 1, 6, 6]])
    torch.testing.assert_close(found, expected / doubles([1, 1, root, root]))


def test_branch_advantages_of_each_depth_have_mean_zero_and_std_one_within_a_tree():
    # two trees on different scales
    method, group = BranchGRPO(), torch.arange(2).repeat_interleave(16)
    rewards = torch.randn(32, 1, dtype=torch.float64)
    rewards[16:] = 100 + 7 * rewards[16:]
    scores = scored(rewards, group, 19)
    advantages, keep = method.advantages(scores), chosen(method, scores, 19)
    assert advantages.shape == (32, 19)
    for tree in (slice(0, 16), slice(16, 32)):
        for unit in range(19):
            edges = advantages[tree, unit][keep[tree, unit]]
            assert edges.mean().item() == pytest.approx(0, abs=1e-9)
            assert edges.std(correction=0).item() == pytest.approx(1, abs=1e-6)


# selection


def test_everything_is_selected_by_default():
    scores = scored(torch.randn(6, 1), torch.arange(2).repeat(3))
    assert chosen(FlowGRPO(), scores, 4).all()


def test_keep_best_takes_the_best_and_the_worst_of_each_group():
    # group 0: 3, 1, 9, 4, 7, 5 -> worst 1, 3, best 7, 9; group 1: -3, -1, -9, -4, -7, -5 -> worst -9, -7, best -3, -1
    first, second = [3, 1, 9, 4, 7, 5], [-3, -1, -9, -4, -7, -5]
    rewards = doubles([[value] for pair in zip(first, second, strict=True) for value in pair])
    group = torch.tensor([0, 1] * 6)
    keep = chosen(DanceGRPO(keep_best=4, timestep_fraction=1.0), scored(rewards, group), 3)
    assert rewards[keep[:, 0], 0].tolist() == [3, -3, 1, -1, 9, -9, 7, -7]
    assert torch.equal(keep, keep[:, :1].expand(-1, 3))  # all steps of a sample, or none


def test_keep_best_passes_over_samples_without_a_score():
    rewards, group = doubles([[NAN], [3], [1], [NAN], [2], [4]]), torch.zeros(6, dtype=torch.long)
    keep = chosen(DanceGRPO(keep_best=2, timestep_fraction=1.0), scored(rewards, group), 1)
    assert keep[:, 0].tolist() == [False, False, True, False, False, True]


@pytest.mark.parametrize(("fraction", "units"), [(0.6, 9), (0.6, 15), (0.5, 3), (0.3, 10), (0.99, 9)])
def test_timestep_fraction_keeps_as_many_steps_of_each_sample(fraction, units):
    scores = scored(torch.randn(64, 1), torch.arange(4).repeat(16))
    method = DanceGRPO(timestep_fraction=fraction)
    keep = chosen(method, scores, units)
    assert (keep.sum(1) == math.floor(fraction * units)).all()
    # each sample draws its own steps, and every step has its turn
    assert len({tuple(row) for row in keep.tolist()}) > 1
    assert keep.any(0).all()
    assert torch.equal(chosen(method, scores, units), keep)
    assert not torch.equal(chosen(method, scores, units, seed=1), keep)


def test_branch_trains_each_edge_once():
    # splits at 0 and 2 of 4 units, two trees of 4 leaves: edges are told apart by their first leaf
    method = BranchGRPO(steps={"splits": (0, 2)})
    keep = chosen(method, scored(torch.randn(8, 1), torch.arange(2).repeat_interleave(4), 4), 4)
    assert [column.nonzero()[:, 0].tolist() for column in keep.T] == [[0, 2, 4, 6]] * 2 + [list(range(8))] * 2


@pytest.mark.parametrize("splits", [(0, 3, 6, 9), (1, 2), (4,), (0, 1, 2)])
def test_branch_selects_one_leaf_below_each_edge(splits):
    leaves, units = 2 ** len(splits), 12
    method = BranchGRPO(steps={"splits": splits})
    scores = scored(torch.randn(3 * leaves, 1), torch.arange(3).repeat_interleave(leaves), units)
    keep = chosen(method, scores, units)
    for unit in range(units):
        # which way a leaf went at each split so far; leaves of one tree with the same history share the edge
        so_far = sum(split <= unit for split in splits)
        history = [(leaf // leaves, leaf % leaves >> (len(splits) - so_far)) for leaf in range(3 * leaves)]
        picked = [edge for edge, kept in zip(history, keep[:, unit].tolist(), strict=True) if kept]
        assert sorted(picked) == sorted(set(history))
        assert len(picked) == 3 * 2**so_far


# initial noise


class FakePolicy:
    """Noise is keyed by sample; a clean prediction is the noise itself."""

    def draw(self, seed, iteration, keys, step, *, purpose="rollout"):
        made = []
        for key in keys:
            number = 1_000_000 * (purpose == "rollout") + 10_000 * (step + 1) + key
            made.append(torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(number)))
        return torch.stack(made)

    def predict_clean(self, latents, prompt_rows):
        return latents

    def starts(self, ids):
        return ids.sample


def test_without_a_search_there_is_no_noise_of_its_own():
    ids = SampleIds(torch.arange(4), torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 3, 3]))
    for method in (SmartGRPO(noise_search={"rounds": 0}), FlowGRPO()):
        assert method.start(FakePolicy(), None, ids, seed=0, iteration=0) is None


def test_searched_noise_scores_better_than_plain_noise_for_the_prompt_of_each_group(exact):
    # prompt 5 wants bright latents, prompt 3 dark ones
    ids = SampleIds(torch.arange(16), torch.arange(2).repeat_interleave(8), torch.tensor([5] * 8 + [3] * 8))

    def score(latents, prompt_rows):
        sign = torch.where(prompt_rows == 5, 1.0, -1.0)
        return sign * latents.flatten(1).mean(1)

    policy = FakePolicy()
    found = SmartGRPO().start(policy, score, ids, seed=0, iteration=0)
    plain = policy.draw(0, 0, ids.sample.tolist(), -1)
    assert found.shape == plain.shape
    torch.testing.assert_close(found.flatten(1).norm(dim=1), torch.full((16,), 4.0))  # sqrt(16 elements)
    gain = score(found, ids.prompt) - score(plain, ids.prompt)
    assert gain[:8].mean() > 0.3 and gain[8:].mean() > 0.3
    assert len(found.flatten(1).unique(dim=0)) == 16  # samples of a group still differ
    # a rank that holds one group alone draws the same
    alone = SmartGRPO().start(policy, score, ids[slice(8, 16)], seed=0, iteration=0)
    torch.testing.assert_close(alone, found[8:], rtol=0, atol=exact)


# what does not fit


@pytest.mark.parametrize("name", list(METHODS))
def test_defaults_fit_twenty_steps_and_groups_of_sixteen(name):
    method = METHODS.load(name)(name=name)
    assert method.problems(RolloutSection(num_inference_steps=20, group_size=16)) == []


WINDOW, TREE = {"kind": "window", "size": 2}, {"kind": "tree", "splits": (0, 2)}
CPS = {"transition": "cps", "noise_level": 0.7}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (FlowGRPO(noise_level=0), "method.noise_level=0 makes steps deterministic, but method.name=flow_grpo learns"),
        (FlowGRPO(noise_level=(0.7,) * 8 + (0.0,)), "method.noise_level=0 makes steps deterministic"),
        (FlowGRPO(noise_level=(0.7,) * 10), "method.noise_level has 10 values; rollout.num_inference_steps=10 has 9"),
        (FlowGRPO(transition="cps", noise_level=1.2), "method.noise_level=1.2: with method.transition=cps at most 1"),
        (FlowGRPO(timestep_fraction=0.1), "method.timestep_fraction=0.1 of 9 trained step(s) trains none"),
        (FlowGRPO(steps=WINDOW, timestep_fraction=0.4), "method.timestep_fraction=0.4 of 2 trained step(s) trains"),
        (DanceGRPO(keep_best=3), "method.keep_best=3 must be even and at most rollout.group_size=16"),
        (DanceGRPO(keep_best=18), "method.keep_best=18 must be even and at most rollout.group_size=16"),
        (BranchGRPO(steps=TREE), "rollout.group_size=16: method.steps.splits=[0, 2] grows a tree with 4 leaves"),
        (BranchGRPO(steps={"kind": "all"}), "method.credit=tree and method.steps.kind=all: a tree needs both"),
        (
            FlowGRPO(steps=TREE | {"splits": (0, 1, 2, 3)}),
            "method.credit=image and method.steps.kind=tree: a tree needs both",
        ),
        (GranularGRPO(steps=WINDOW), "method.credit=granularities needs one stochastic step: method.steps.kind"),
        (
            GRPOGuard(**CPS, log_prob_reduction="pseudo"),
            "method.surrogate=guard needs true log-probs, averaged over elements; use",
        ),
        (FlowGRPO(**CPS, surrogate="divergence", log_prob_reduction="pseudo"), "method.surrogate=divergence needs"),
        (GRPOGuard(log_prob_reduction="sum"), "method.surrogate=guard needs true log-probs, averaged"),
        (GranularGRPO(strides=(2, 3)), "method.strides=[2, 3] must hold 1"),
        (
            BranchGRPO(steps={"splits": (0, 1, 2, 3)}, keep_best=4),
            "method.credit=tree trains every edge: it goes with neither keep_best",
        ),
        (
            FlowGRPO(log_prob_reduction="pseudo"),
            "method.log_prob_reduction=pseudo is for method.transition=cps, not flow_sde",
        ),
    ],
)
def test_what_does_not_fit_is_named(method, message):
    found = method.problems(RolloutSection(num_inference_steps=10, group_size=16))
    assert len(found) == 1
    assert found[0].startswith(message)


@pytest.mark.parametrize(
    "method",
    [
        FlowGRPO(noise_level=(0.7,) * 9),
        FlowGRPO(**{**CPS, "noise_level": 1.0}),
        FlowGRPO(timestep_fraction=0.12),  # 0.12 * 9 = 1.08
        DanceGRPO(keep_best=16),
        FlowGRPO(**CPS, log_prob_reduction="pseudo"),
        GRPOGuard(**CPS),
        GranularGRPO(steps={"kind": "entropy"}),
    ],
)
def test_what_just_fits_is_accepted(method):
    assert method.problems(RolloutSection(num_inference_steps=10, group_size=16)) == []


def test_a_single_inference_step_is_too_few():
    for name in [name for name in METHODS if issubclass(METHODS.load(name), StepwiseMethod)]:
        found = METHODS.load(name)(name=name).problems(RolloutSection(num_inference_steps=1, group_size=16))
        assert found == ["rollout.num_inference_steps=1: at least 2 are needed"]


def test_a_pairwise_reward_is_not_ranked_again():
    """Win rates of 0.51, 0.5, 0.49 are no clear wins; a scalar reward beside them is ranked."""
    table = torch.tensor([[[0.51, 7.0]], [[0.50, 9.0]], [[0.49, 8.0]]], dtype=torch.float64)
    scores = Scores(table, torch.tensor([1.0, 1.0]), torch.zeros(3, dtype=torch.long), 1, torch.tensor([True, False]))
    # sums of the columns as they should be: 0.51 + 0, 0.5 + 1, 0.49 + 0.5
    values = torch.tensor([0.51, 1.5, 0.99], dtype=torch.float64)
    expected = (values - values.mean()) / (values.std(correction=0) + 1e-4)
    torch.testing.assert_close(PrefGRPO().advantages(scores)[:, 0], expected)


def test_a_search_must_select():
    with pytest.raises(ValueError, match="elites=4 must be fewer than its candidates=2"):
        SmartGRPO(noise_search={"candidates": 2, "elites": 4})
