"""Completions, branches, shared prefixes: the numbers of doing it one by one, with the network calls it should cost."""

import pytest
import torch

from flowrl.core.types import SampleIds
from flowrl.flow.plans import all_steps, dense_completions, granular_completions, merged, tree, window
from flowrl.flow.rollout import integrate, sigma_path
from flowrl.flow.transitions import TRANSITIONS, ode_step

GRID = torch.tensor([1.0, 0.9, 0.75, 0.55, 0.3, 0.05, 0.0])
LEVELS = (0.7,) * 5


class Network:
    """A nonlinear velocity that counts its rows and calls."""

    def __init__(self):
        self.rows = self.calls = 0

    def __call__(self, x, sigma, rows):
        self.rows, self.calls = self.rows + len(x), self.calls + 1
        return torch.tanh(2 * x) * (1 + sigma[:, None]) - x + 0.1 * rows[:, None]


def draw(numbers, step):
    return torch.stack([torch.randn(3, generator=torch.Generator().manual_seed(1000 * n + step + 1)) for n in numbers])


def roll(plan, num=4, transition="cps", **options):
    network, completer = Network(), Network()
    samples = torch.arange(num)
    found = integrate(
        network, samples, GRID, plan, TRANSITIONS[transition], draw, complete_velocity=completer, **options
    )
    return found, network, completer


def euler(x, rows, path):
    sigmas, network = sigma_path(GRID, path), Network()
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        s, t = sigma.expand(len(x)), sigma_next.expand(len(x))
        x = ode_step(x, network(x, s, rows), s, t, s, s)[0]
    return x


def test_completions_equal_completing_each_state_on_its_own(exact):
    found, network, completer = roll(dense_completions(all_steps(LEVELS)))
    assert found.views.shape == (4, 6)
    for state in range(5):
        expected = euler(found.states[:, state], torch.arange(4), range(state, 7))
        torch.testing.assert_close(found.clean[found.views[:, state]], expected, rtol=0, atol=exact)
    assert network.rows == 4 * 6, "the trajectory is never recomputed"
    assert completer.rows == 4 * (6 + 5 + 4 + 3 + 2)
    assert completer.calls == 6, "all completions advance together"


def test_the_last_view_is_the_sample_and_is_not_completed_again(exact):
    found, _, _ = roll(dense_completions(all_steps(LEVELS)))
    plain, _, _ = roll(all_steps(LEVELS))
    torch.testing.assert_close(found.clean[found.views[:, -1]], plain.clean, rtol=0, atol=exact)
    last = euler(found.states[:, 5], torch.arange(4), (5, 6))
    torch.testing.assert_close(plain.clean, last, rtol=0, atol=exact)


def test_a_shorter_completion_takes_fewer_steps():
    _, _, completer = roll(dense_completions(window(LEVELS, start=1, size=2), num_steps=2))
    assert completer.rows == 4 * 2 * 2


def test_samples_that_share_their_noise_are_one_state_until_they_branch():
    plan = window(LEVELS, start=2, size=2).sharing_noise(4)
    found, network, _ = roll(plan, num=8)
    assert network.rows == 2 * 3 + 8 * 3, "three steps for each of two groups, then eight samples"
    assert found.shared.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [4, 4], [4, 5], [4, 6], [4, 7]]
    assert all(torch.equal(found.states[0, 0], found.states[i, 0]) for i in range(4))
    assert not torch.equal(found.states[0, 0], found.states[4, 0])
    assert len({tuple(row.tolist()) for row in found.states[:, 1]}) == 8


def test_a_shared_completion_is_made_once():
    plan = dense_completions(window(LEVELS, start=1, size=2)).sharing_noise(4)
    found, _, completer = roll(plan, num=8)
    assert completer.rows == 2 * 5 + 8 * 4
    assert found.views[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(found.clean) == 2 + 8 + 8


def test_a_batch_that_cuts_a_group_changes_nothing(exact):
    plan = dense_completions(window(LEVELS, start=1, size=2)).sharing_noise(4)
    whole, _, _ = roll(plan, num=8)
    part = integrate(Network(), torch.arange(2, 7), GRID, plan, TRANSITIONS["cps"], draw)
    # the toy network sees row numbers, so shift them: compare only what does not depend on them
    assert part.shared.tolist() == whole.shared[2:7].tolist()
    full = integrate(lambda x, s, rows: -x, torch.arange(8), GRID, plan, TRANSITIONS["cps"], draw)
    cut = integrate(lambda x, s, rows: -x, torch.arange(2, 7), GRID, plan, TRANSITIONS["cps"], draw)
    torch.testing.assert_close(cut.clean[cut.views], full.clean[full.views][2:7], rtol=0, atol=exact)


def test_a_tree_shares_every_prefix():
    plan = tree(LEVELS, splits=(0, 2))
    found, network, _ = roll(plan, num=8)  # two trees of four leaves
    # states before the steps: 1, 2, 2, 4, 4, 4 of each tree
    assert network.rows == 2 * (1 + 2 + 2 + 4 + 4 + 4)
    assert found.shared[:4].tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 2, 2, 2, 2], [0, 2, 2, 3, 3]]
    assert torch.equal(found.states[0, 2], found.states[1, 2])
    assert not torch.equal(found.states[0, 3], found.states[1, 3])
    assert not torch.equal(found.states[0, 1], found.states[2, 1])


def test_granularities_complete_the_branched_state(exact):
    plan = granular_completions(merged(LEVELS, step=1, length=1), (1, 2)).sharing_noise(4)
    found, network, completer = roll(plan)
    assert network.rows == 2 + 4 * 4
    assert completer.rows == 4 * 3  # 2 -> 3 -> 5 -> 6
    expected = euler(found.states[:, 1], torch.arange(4), (2, 3, 5, 6))
    torch.testing.assert_close(found.clean[found.views[:, 0]], expected, rtol=0, atol=exact)


def test_a_merged_step_goes_there_at_once():
    found, network, _ = roll(merged(LEVELS, step=1, length=3))
    assert network.rows == 4 * 4
    assert found.sigma[0].tolist() == pytest.approx([0.9])
    assert found.sigma_next[0].tolist() == pytest.approx([0.3])


def test_given_noise_is_used():
    noise = torch.randn(4, 3)
    found, _, _ = roll(window(LEVELS, start=0, size=1), noise=noise)
    assert torch.equal(found.states[:, 0], noise)


def test_a_plan_for_another_grid_is_refused():
    with pytest.raises(ValueError, match="the plan ends at position 4, the grid at 6"):
        roll(all_steps((0.7,) * 3))


def ids(num=8, group_size=4):
    return SampleIds(torch.arange(num), torch.arange(num) // group_size, torch.arange(num) // group_size)


def test_one_evaluation_serves_the_group_with_the_gradient_of_the_naive_version(make_policy, exact):
    policy = make_policy(transition="cps", num_inference_steps=6, share_initial_noise=True, group_size=4)
    policy.train_all(keep_reference=False)
    rollout = policy.rollout(ids(), merged(LEVELS, step=1, length=1), seed=0, iteration=0)
    rows, units = torch.arange(8), torch.zeros(8, dtype=torch.long)
    weights = torch.randn(8)

    def gradient(batches):
        policy.model.zero_grad()
        policy.take_counts()
        for part in batches:
            out = policy.replay(rollout.pick(rows[part], units[part], weights[part]))
            (out.log_prob * weights[part]).sum().backward()
        return [p.grad.clone() for _, p in policy.trainable_parameters()], policy.take_counts()["nfe/train"]

    together, evaluated = gradient([torch.arange(8)])
    naive, one_by_one = gradient([torch.tensor([i]) for i in range(8)])
    assert (evaluated, one_by_one) == (2, 8)
    for a, b in zip(together, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=exact)


def test_rollouts_of_several_plans_join(make_policy, exact):
    policy = make_policy(transition="cps", num_inference_steps=6, share_initial_noise=True, group_size=4)
    plans = [granular_completions(merged(LEVELS, step=step, length=1), (1, 2)) for step in (0, 2)]
    parts = [
        policy.rollout(ids()[rows], plan, seed=0, iteration=0)
        for plan, rows in zip(plans, (slice(4), slice(4, 8)), strict=True)
    ]
    joined = policy.join([policy.decode(part) for part in parts])
    t = joined.trajectory
    assert t.sigma[:, 0].unique(return_counts=True)[1].tolist() == [4, 4]
    assert len(joined.completions) == len(t.clean) == 16
    assert t.views[4:].min() == 8
    assert joined.ids.prompt[joined.owners].tolist() == [0] * 8 + [1] * 8
    batch = joined.pick(torch.arange(8), torch.zeros(8, dtype=torch.long), torch.ones(8))
    with torch.no_grad():
        assert ((policy.replay(batch).log_prob - batch.old_log_prob).exp() - 1).abs().max() < exact


def test_flow_sde_warns_once_of_the_step_to_the_tiny_last_sigma(make_policy, caplog):
    policy = make_policy(transition="flow_sde", num_inference_steps=10)
    for _ in range(2):
        policy.rollout(ids(2, 2), all_steps((0.7,) * 9), seed=0, iteration=0)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "step 8, from sigma 0.2780 to 0.0089, leaves 26.9 times the noise" in messages[0]
    assert "method.transition=cps" in messages[0]
    quiet = make_policy(transition="cps", num_inference_steps=10)
    quiet.rollout(ids(2, 2), all_steps((0.7,) * 9), seed=0, iteration=0)
    assert len(caplog.records) == 1
