import math

import pytest
import torch

from flowrl.core.gaussian import gaussian_log_prob
from flowrl.core.surrogates import clipped_surrogate
from flowrl.flow.losses import divergence_masked_surrogate, guarded_surrogate

SHAPE = (5, 2, 3, 4)


def per_row(values):
    return values.reshape(-1, 1, 1, 1)


def drawn(shift=0.1):
    """Old means, means with gradient, stds, and samples x' = old mean + std z."""
    std = torch.tensor([0.05, 0.2, 0.5, 1.0, 2.0])
    old, z = torch.randn(SHAPE), torch.randn(SHAPE)
    mean = (old + shift * torch.randn(SHAPE)).requires_grad_()
    return mean, old, std, z, old + per_row(std) * z


def guarded(mean, old, std, x, advantages, step=None, clip_range=10.0):
    log_prob, before = gaussian_log_prob(x, mean, std), gaussian_log_prob(x, old, std)
    step = torch.ones(len(x)) if step is None else step
    return guarded_surrogate(log_prob, before, advantages, mean, old, std, step, clip_range=clip_range)


def masked(mean, old, std, x, advantages, limit):
    log_prob, before = gaussian_log_prob(x, mean, std), gaussian_log_prob(x, old, std)
    return divergence_masked_surrogate(log_prob, before, advantages, mean, old, std, limit=limit)


def test_guarded_log_ratio_is_the_mean_of_noise_times_shift():
    mean, old, std, z, x = drawn()
    _, metrics = guarded(mean, old, std, x, torch.ones(5))
    expected = (z * (mean.detach() - old)).flatten(1).mean(1)
    assert expected.abs().min() > 1e-3  # a sign or a factor would show
    torch.testing.assert_close(metrics["ratio"].log(), expected, rtol=1e-4, atol=2e-6)


def test_guarded_log_ratio_has_mean_zero_where_the_plain_one_is_biased():
    # shift 0.5 in each of 4 elements, std 0.25: the guarded log-ratio 0.5 mean(z) has std 0.25; the plain one times the
    # std has mean -0.5^2 / (2 * 0.25) = -0.5
    z = torch.randn(20_000, 4)
    old, std = torch.zeros_like(z), torch.full((20_000,), 0.25)
    mean, x = old + 0.5, std[:, None] * z
    log_prob, before = gaussian_log_prob(x, mean, std), gaussian_log_prob(x, old, std)
    assert ((log_prob - before) * std).mean() == pytest.approx(-0.5, abs=0.01)
    ones = torch.ones(20_000)
    _, metrics = guarded_surrogate(log_prob, before, ones, mean, old, std, ones, clip_range=0.5)
    found = metrics["ratio"].log()
    assert abs(found.mean()) < 5 * 0.25 / math.sqrt(20_000)
    assert found.std() == pytest.approx(0.25, rel=0.05)


def test_guard_corrects_each_sample_by_its_own_shift():
    # the authors' code subtracts the mean over the batch; a far-off row would then move the others
    mean, old, std, _, x = drawn()
    loss, metrics = guarded(mean, old, std, x, torch.ones(5))
    far = mean.detach().clone()
    far[-1] += 0.3
    moved, moved_metrics = guarded(far, old, std, x, torch.ones(5))
    assert torch.equal(metrics["ratio"][:-1], moved_metrics["ratio"][:-1])
    assert torch.equal(loss[:-1].detach(), moved[:-1])
    assert metrics["ratio"][-1] != moved_metrics["ratio"][-1]


def test_hand_worked_guarded_loss():
    # z = 1, shift 0.02, std 0.5: log r = 0.02, whatever the std. A = 2, step 0.25:
    #   clip 1:    -2 e^0.02 / 0.25 = -8 e^0.02
    #   clip 0.01: -2 * 1.01 / 0.25 = -8.08, and no gradient
    # A = -2 with clip 0.01: the ratio may be pushed back, +8 e^0.02
    for advantage, clip_range, expected, stopped in [
        (2.0, 1.0, -8 * math.exp(0.02), False),
        (2.0, 0.01, -8.08, True),
        (-2.0, 0.01, 8 * math.exp(0.02), False),
    ]:
        mean = torch.full((1, 6), 0.02, requires_grad=True)
        old, std, x = torch.zeros(1, 6), torch.tensor([0.5]), torch.full((1, 6), 0.5)
        loss, metrics = guarded(mean, old, std, x, torch.tensor([advantage]), torch.tensor([0.25]), clip_range)
        loss.sum().backward()
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        assert metrics["clipped"].tolist() == [stopped]
        assert (mean.grad == 0).all() == stopped


def test_guarded_loss_is_divided_by_the_step_of_each_row():
    mean, old, std, _, x = drawn()
    step = torch.tensor([0.5, 0.25, 0.125, 2.0, 4.0])
    advantages = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5])
    plain, _ = guarded(mean, old, std, x, advantages)
    loss, _ = guarded(mean, old, std, x, advantages, step)
    torch.testing.assert_close(loss * step, plain, rtol=1e-6, atol=0)


def test_guarded_gradient_is_that_of_the_explicit_formula():
    mean, old, std, z, x = drawn()
    advantages, step = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5]), torch.tensor([0.5, 0.25, 0.125, 2.0, 4.0])
    loss, _ = guarded(mean, old, std, x, advantages, step)
    (found,) = torch.autograd.grad(loss.sum(), mean)
    explicit = -advantages * (z * (mean - old)).flatten(1).mean(1).exp() / step
    (expected,) = torch.autograd.grad(explicit.sum(), mean)
    torch.testing.assert_close(loss.detach(), explicit.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_divergence_mask_drops_far_units_that_moved_as_asked_and_no_others():
    # std 1 and a constant shift D: divergence D^2 / 2; log-ratio z D - D^2 / 2, with limit 0.125 = the divergence of
    # D = 0.5, which is at the limit and so counts.
    #   D     z   A   divergence  log r                    (r - 1) A
    #   0.5   1   1   0.125       0.375                    > 0   dropped
    #   0.5   1  -1   0.125       0.375                    < 0   kept
    #   0.5  -1  -1   0.125      -0.625                    > 0   dropped
    #   0.5  -1   1   0.125      -0.625                    < 0   kept
    #   0.25  1   1   0.03125     0.21875                  > 0   kept, below the limit
    shift = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.25])
    z = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    old, std = torch.zeros(SHAPE), torch.ones(5)
    mean = per_row(shift).expand(SHAPE).clone().requires_grad_()
    x = per_row(z).expand(SHAPE)
    loss, metrics = masked(mean, old, std, x, advantages, 0.125)
    ratio = torch.tensor([0.375, 0.375, -0.625, -0.625, 0.21875]).exp()
    kept = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])
    assert metrics["clipped"].tolist() == [True, False, True, False, False]
    torch.testing.assert_close(metrics["divergence"], torch.tensor([0.125, 0.125, 0.125, 0.125, 0.03125]))
    torch.testing.assert_close(metrics["ratio"], ratio)
    torch.testing.assert_close(loss.detach(), -kept * advantages * ratio)
    loss.sum().backward()
    # d(-A r) / d mean = -A r (z - D) / 24 in each of the 24 elements
    expected = -kept * advantages * ratio * (z - shift) / 24
    torch.testing.assert_close(mean.grad, per_row(expected).expand(SHAPE))
    assert (mean.grad[[0, 2]] == 0).all()
    assert (mean.grad[[1, 3, 4]] != 0).all()


def test_divergence_counts_in_units_of_the_std():
    # the same shift 0.1 at stds 0.1 and 1: divergence 0.5 and 0.005
    mean, old, z = torch.full((2, 4), 0.1), torch.zeros(2, 4), torch.ones(2, 4)
    std = torch.tensor([0.1, 1.0])
    _, metrics = masked(mean, old, std, std[:, None] * z, torch.ones(2), 0.1)
    torch.testing.assert_close(metrics["divergence"], torch.tensor([0.5, 0.005]))
    assert metrics["clipped"].tolist() == [True, False]


def test_before_the_first_update_both_are_the_unclipped_policy_gradient():
    _, old, std, z, x = drawn()
    advantages, step = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5]), torch.tensor([0.5, 0.25, 0.125, 2.0, 4.0])
    mean = old.clone().requires_grad_()
    (expected,) = torch.autograd.grad(-(advantages * gaussian_log_prob(x, mean, std)).sum(), mean)
    loss, metrics = masked(mean, old, std, x, advantages, 1e-5)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), mean)[0], expected)
    assert not metrics["clipped"].any()
    log_prob = gaussian_log_prob(x, mean, std)
    plain, _ = clipped_surrogate(log_prob, log_prob.detach(), advantages, clip_low=1e-4, clip_high=1e-4)
    torch.testing.assert_close(torch.autograd.grad(plain.sum(), mean)[0], expected)
    # Guard's is scaled by std / step: -A z / (24 step)
    loss, metrics = guarded(mean, old, std, x, advantages, step, clip_range=2e-6)
    (found,) = torch.autograd.grad(loss.sum(), mean)
    assert (metrics["ratio"] == 1).all() and not metrics["clipped"].any()
    torch.testing.assert_close(found, expected * per_row(std / step))
    torch.testing.assert_close(found, -per_row(advantages / step) * z / 24, rtol=1e-4, atol=1e-5)
