import math

import numpy as np
import pytest
import torch

from flowrl.flow.matching import (
    awm_log_prob,
    grid_times,
    logit_normal_times,
    mean_square,
    nft_loss,
    noised,
    power_times,
    ram_target,
    stratified,
    uniform_times,
)

M, VAR, LAM = 0.7, 0.5, 1.0  # data N(M, VAR), reward LAM x0


def posterior(x, t, m=M, var=VAR):
    """Mean and variance of x0 given x_t = (1 - t) x0 + t eps."""
    c = 1 / (1 / var + (1 - t) ** 2 / t**2)
    return c * (m / var + (1 - t) * x / t**2), c


def velocity(x, t, m=M, var=VAR):
    """E[eps - x0 | x_t] = (x - E[x0 | x_t]) / t."""
    return (x - posterior(x, t, m, var)[0]) / t


def test_ram_s_mean_target_is_the_velocity_of_the_tilted_law():
    """At the reference the tilt by e^{lam x0} moves the posterior mean by lam Var(x0 | x_t), for every t."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    nodes, weights = torch.tensor(nodes), torch.tensor(weights / weights.sum())
    for t in (0.05, 0.3, 0.7, 0.99):
        for x in (-1.0, 0.4, 2.0):
            mean, var = posterior(x, t)
            x0 = mean + math.sqrt(var) * nodes
            line = (x - x0) / t
            v = torch.full_like(x0, velocity(x, t))
            rewards = LAM * (x0 - M)  # centered as a large group's would be
            target = ram_target(v[:, None], v[:, None], line[:, None], rewards, multiplier=1.0)[:, 0]
            found = float((weights * target).sum())
            assert found == pytest.approx(velocity(x, t, M + LAM * VAR, VAR), abs=1e-5)


def test_bridge_score_identity():
    """grad_x log p(x0 | x_t) = ((1 - t) / t) (v - (eps - x0)), the step from REINFORCE to RAM."""
    for t in (0.1, 0.5, 0.9):
        x = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
        x0 = torch.tensor(-0.3, dtype=torch.float64)
        mean, var = posterior(x, t)
        log_prob = -0.5 * (x0 - mean) ** 2 / var
        (gradient,) = torch.autograd.grad(log_prob, x)
        line = (x - x0) / t
        assert (gradient - (1 - t) / t * (velocity(x, t) - line)).abs().item() < 1e-8


def test_nft_at_the_old_policy():
    """v = v_old: both implied policies are the old one, and the gradient is that of (2 r - 1) times the residual."""
    torch.manual_seed(0)
    clean, noise, old = torch.randn(3, 4, 2, 2).unbind(0)
    sigma, share = torch.tensor([0.2, 0.5, 0.7, 0.9]), torch.tensor([0.0, 0.3, 0.5, 1.0])
    x = noised(clean, noise, sigma)
    v = old.clone().requires_grad_()
    parts = [nft_loss(v, old, x, clean, sigma, torch.full_like(share, r), beta=1.0, adaptive=False) for r in (0.0, 1.0)]
    torch.testing.assert_close(parts[0], parts[1])
    for beta in (1.0, 0.1):
        loss = nft_loss(v, old, x, clean, sigma, share, beta=beta, adaptive=False)
        (gradient,) = torch.autograd.grad(loss.sum(), v)
        # x0+ - x0 = -sigma (v - line): d l+ / dv = 2 sigma^2 beta (v_old - line) / 4 elements, and l- the opposite
        factor = ((2 * share - 1) * 2 * sigma.square() / 4)[:, None, None]
        torch.testing.assert_close(gradient, factor * (old - (noise - clean)), atol=1e-6, rtol=1e-5)


def test_nft_s_adaptive_weight_is_the_detached_mean_error():
    clean, noise, old = torch.randn(3, 5, 6).unbind(0)
    sigma, share = torch.full((5,), 0.6), torch.ones(5)
    x = noised(clean, noise, sigma)
    plain = nft_loss(old, old, x, clean, sigma, share, beta=1.0, adaptive=False)
    error = (x - 0.6 * old - clean).abs().mean(1)
    torch.testing.assert_close(nft_loss(old, old, x, clean, sigma, share, beta=1.0), plain / error)


def test_awm_weightings_by_hand():
    loss, t = torch.tensor([4.0]), torch.tensor([0.5])
    wanted = {
        "uniform": -4.0,
        "t": -2.0,
        "t2": -1.0,
        "huber": -0.5 * (2 - 1e-5),
        "ghuber": -2 * (4**0.25 - 1e-10**0.25),
    }
    for name, value in wanted.items():
        assert awm_log_prob(loss, t, weighting=name).item() == pytest.approx(value, rel=1e-5)
    with pytest.raises(ValueError, match="unknown weighting"):
        awm_log_prob(loss, t, weighting="t3")


def test_times_have_their_distributions():
    u = (torch.arange(100_000) + 0.5) / 100_000
    assert uniform_times(u, low=0.2, high=0.6).mean() == pytest.approx(0.4, abs=1e-4)
    # density 2 t: mean 2/3, second moment 1/2
    t = power_times(u, exponent=1.0)
    assert (t.mean().item(), t.square().mean().item()) == pytest.approx((2 / 3, 1 / 2), abs=1e-4)
    # logit is normal: the median is the sigmoid of the mean, the 84.13 % quantile one std further
    t = logit_normal_times(u, mean=0.5, std=2.0)
    assert t.median() == pytest.approx(1 / (1 + math.exp(-0.5)), abs=1e-3)
    assert t.quantile(0.841345) == pytest.approx(1 / (1 + math.exp(-2.5)), abs=1e-3)
    assert logit_normal_times(torch.tensor([0.5]), shift=3.0).item() == pytest.approx(0.75)
    assert grid_times(u, [1.0, 0.5, 0.1]).unique(return_counts=True)[1].tolist() == pytest.approx([33333] * 3, abs=1)


def test_stratified_numbers_fill_every_part_once_and_stay_uniform():
    order, u = torch.rand(2, 4000, 5)
    found = stratified(order, u)
    assert (found.mul(5).floor().sort(1).values == torch.arange(5.0)).all()
    # 4000 numbers in each column: mean 1/2 within 3 standard errors, variance 1/12
    assert found.mean(0).tolist() == pytest.approx([0.5] * 5, abs=3 * 0.2887 / 4000**0.5)
    assert found.var().item() == pytest.approx(1 / 12, rel=0.03)


def test_noising_on_both_paths():
    clean, noise, sigma = torch.randn(2, 3), torch.randn(2, 3), torch.tensor([0.6, 0.8])
    torch.testing.assert_close(noised(clean, noise, sigma)[0], 0.4 * clean[0] + 0.6 * noise[0])
    torch.testing.assert_close(
        noised(clean, noise, sigma, path="variance_preserving")[1], 0.6 * clean[1] + 0.8 * noise[1]
    )
    torch.testing.assert_close(mean_square(clean)[0], (clean[0] ** 2).sum() / 3)
