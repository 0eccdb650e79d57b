"""Lagged copies of the weights: what they are, and what they leave alone."""

import pytest
import torch

from flowrl.core.types import SampleIds
from flowrl.flow.endpoints import EndpointPlan
from flowrl.flow.matching import power_times


def prepared(make_policy, lora, **options):
    policy = make_policy(num_inference_steps=4, **options)
    policy.add_lora(4, 8) if lora else policy.train_all(keep_reference=True)
    policy.keep_lagged(("old",))
    return policy


def perturb(policy, scale=0.1):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in policy.trainable_parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def velocity(policy):
    x, sigma = policy.noise([torch.Generator().manual_seed(0)]), torch.tensor([0.5])
    with torch.no_grad():
        return policy.predict_at(x, sigma, torch.tensor([0]))


@pytest.mark.parametrize("lora", [True, False])
def test_a_lagged_copy_follows_by_its_decay_and_changes_nothing_else(make_policy, lora):
    policy = prepared(make_policy, lora)
    names = [name for name, _ in policy.trainable_parameters()]
    start = velocity(policy)
    with policy.lagged("old"):
        torch.testing.assert_close(velocity(policy), start, rtol=0, atol=0)
    perturb(policy)
    trained = velocity(policy)
    assert (trained - start).abs().max() > 1e-3
    with policy.lagged("old"):
        torch.testing.assert_close(velocity(policy), start, rtol=0, atol=0)
    with policy.reference():
        torch.testing.assert_close(velocity(policy), start, rtol=0, atol=0)
    torch.testing.assert_close(velocity(policy), trained, rtol=0, atol=0)
    assert [name for name, _ in policy.trainable_parameters()] == names, "the same weights are trained afterwards"
    before = {name: tensor.clone() for name, tensor in policy.lagged_weights["old"].items()}
    policy.move_lagged("old", 0.75)
    weights = dict(policy.trainable_parameters())
    for name, tensor in policy.lagged_weights["old"].items():
        torch.testing.assert_close(tensor, 0.75 * before[name] + 0.25 * weights[name])
    policy.move_lagged("old", 0.0)
    with policy.lagged("old"):
        torch.testing.assert_close(velocity(policy), trained, rtol=0, atol=0)


@pytest.mark.parametrize("lora", [True, False])
def test_a_gradient_taken_around_lagged_evaluations_is_whole(make_policy, lora):
    policy = prepared(make_policy, lora)
    perturb(policy)
    x, sigma, rows = policy.noise([torch.Generator().manual_seed(0)]), torch.tensor([0.5]), torch.tensor([0])

    def gradient(around):
        policy.model.zero_grad()
        loss = policy.predict_at(x, sigma, rows).square().sum()
        if around:
            with torch.no_grad(), policy.lagged("old"):
                policy.predict_at(x, sigma, rows)
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in policy.trainable_parameters()}

    plain, mixed = gradient(False), gradient(True)
    assert all(torch.equal(plain[name], mixed[name]) for name in plain)
    assert max(value.abs().max() for value in plain.values()) > 0


def test_an_exported_lora_holds_the_trained_adapter_only(make_policy, shapes_path, tmp_path, exact):
    from flowrl.flow.export import export_policy

    policy = prepared(make_policy, True)
    perturb(policy)
    assert export_policy(policy, shapes_path, tmp_path) < exact


def ids(num=4):
    return SampleIds(torch.arange(num), torch.arange(num) // 2, torch.arange(num) // 2)


def test_endpoints_come_from_the_weights_that_the_plan_names(make_policy):
    policy = prepared(make_policy, False)
    plan = EndpointPlan(2, power_times, sampler="old")
    before = policy.rollout(ids(), plan, seed=0, iteration=0).clean
    perturb(policy)
    torch.testing.assert_close(policy.rollout(ids(), plan, seed=0, iteration=0).clean, before, rtol=0, atol=0)
    own = policy.rollout(ids(), EndpointPlan(2, power_times), seed=0, iteration=0).clean
    assert (own - before).abs().max() > 1e-3


def test_draws_depend_on_the_sample_and_not_on_the_batch(make_policy, exact):
    policy = prepared(make_policy, False)
    plan = EndpointPlan(3, power_times)
    whole = policy.rollout(ids(), plan, seed=0, iteration=5)
    parts = [policy.rollout(ids()[rows], plan, seed=0, iteration=5) for rows in (slice(0, 1), slice(1, 4))]
    rows, units = torch.tensor([3, 1, 2]), torch.tensor([2, 1, 0])
    a = whole.pick(rows, units, torch.ones(3)).inputs
    for part, place in ((policy.join(parts), rows), (parts[1], rows - 1)):
        b = part.pick(place, units, torch.ones(3)).inputs
        torch.testing.assert_close(a.x, b.x, rtol=0, atol=exact)
        assert torch.equal(a.sigma, b.sigma)
    torch.testing.assert_close(a.x, a.clean + a.sigma[:, None, None, None] * a.target)  # (1 - s) x0 + s eps
    every = whole.pick(torch.zeros(3, dtype=torch.long), torch.arange(3), torch.ones(3)).inputs
    assert (every.sigma.square() * 3).floor().sort().values.tolist() == [0, 1, 2], (
        "one in each part of the distribution"
    )
