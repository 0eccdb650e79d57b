import pytest
import torch
from gaussian_flows import WEIGHTS, at, data_velocity, draws, endpoint_law, iterate, regress

from flowrl.flow.matching import nft_loss, noised, ram_target

M, VAR = 0.7, 0.5  # data of the reference


def ram_fixed_point(reward):
    """Law of the endpoints where the velocity is its own RAM target; rewards are centred, as by a large group."""
    reference = data_velocity(M, VAR)

    def update(velocity, mean, var):
        clean, noise, x = draws(mean, var)
        rewards = reward(clean)
        rewards = rewards - (rewards @ WEIGHTS)[:, None]
        ends = (at(reference, x), at(velocity, x), noise - clean)
        target = ram_target(*(values.flatten() for values in ends), rewards.flatten(), multiplier=1.0)
        return regress(x, target.reshape(x.shape))

    return iterate(reference, update, tolerance=1e-6)


def tilt(lam, k):
    """N(M, VAR) times e^(lam x - k x^2 / 2): precisions add."""
    return (M + lam * VAR) / (1 + k * VAR), VAR / (1 + k * VAR)


def test_the_reference_returns_its_own_data():
    assert endpoint_law(data_velocity(M, VAR)) == pytest.approx((M, VAR), abs=1e-6)


@pytest.mark.parametrize("lam", [1.0, -0.5, 2.0])
def test_ram_reaches_the_tilt_of_a_linear_reward(lam):
    assert ram_fixed_point(lambda x: lam * x) == pytest.approx(tilt(lam, 0), abs=1e-5)


@pytest.mark.parametrize(
    ("k", "found", "exact"), [(0.5, (0.5746, 0.4068), (0.56, 0.4)), (2.0, (0.415, 0.272), (0.35, 0.25))]
)
def test_ram_tilts_too_little_by_a_curved_reward(k, found, exact):
    """The path cost is left out of the target; values of an Euler flow, whose error is 3e-4 here."""
    assert tilt(0, k) == pytest.approx(exact)
    law = ram_fixed_point(lambda x: -0.5 * k * x**2)
    assert law == pytest.approx(found, abs=1e-3)
    assert law[0] - exact[0] > 0.01 and law[1] - exact[1] > 0.005


def test_ram_s_bias_is_of_second_order_in_the_curvature():
    def bias(k):
        return torch.tensor(ram_fixed_point(lambda x: -0.5 * k * x**2)) - torch.tensor(tilt(0, k))

    assert (bias(0.1) / bias(0.05)).tolist() == pytest.approx([4, 4], rel=0.1)


def test_nft_at_the_old_policy_with_the_adaptive_weight():
    """Both losses are the adaptive error, and the gradient is that of (2 r - 1) times the residual over its size."""
    clean, noise, old = torch.randn(3, 4, 6).unbind(0)
    sigma, share = torch.tensor([0.2, 0.5, 0.7, 0.9]), torch.tensor([0.0, 0.3, 0.5, 1.0])
    x = noised(clean, noise, sigma)
    v = old.clone().requires_grad_()
    negative, positive = (nft_loss(v, old, x, clean, sigma, torch.full_like(share, r), beta=1.0) for r in (0.0, 1.0))
    torch.testing.assert_close(negative, positive)
    (gradient,) = torch.autograd.grad(nft_loss(v, old, x, clean, sigma, share, beta=0.1).sum(), v)
    residual = old - (noise - clean)
    # error -t residual: d/dv of mean(error^2) / sg(mean |error|) is 2 t residual / 6 over mean |residual|
    size = residual.abs().mean(1)
    torch.testing.assert_close(gradient, ((2 * share - 1) * sigma / (3 * size))[:, None] * residual)
