import math
from itertools import pairwise

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler
from torch.distributions import Normal

from flowrl.core.gaussian import gaussian_log_prob
from flowrl.flow.transitions import cps, dance_sde, ddim, flow_sde, noise_excess, ode_step, preserve


def rows(value, num=1):
    return torch.full((num,), float(value))


def step(transition, x, v, sigma, sigma_next, level, top=0.96):
    """`sigma` and the others as numbers, the same for each row."""
    num = len(x)
    return transition(x, v, rows(sigma, num), rows(sigma_next, num), rows(level, num), rows(top, num))


def sd3_grid(num_steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(num_steps)
    return scheduler.sigmas.tolist()


def shift3_grid(num_steps):
    """DanceGRPO's: linspace(1, 0, N + 1), shifted once."""
    return [3 * s / (1 + 2 * s) for s in (1 - i / num_steps for i in range(num_steps + 1))]


# dance_sde


def test_dance_sde_by_hand():
    # sigma 0.5 -> 0.3, s = 0.4, x = 1, v = 2: eps_hat = 1 + 0.5 * 2 = 2, pull = 0.16 / (2 * 0.5) * 2 = 0.32
    mean, std = step(dance_sde, torch.ones(1, 1), torch.full((1, 1), 2.0), 0.5, 0.3, 0.4)
    assert mean.item() == pytest.approx(1 - 0.2 * 2.32)
    assert std.item() == pytest.approx(0.4 * math.sqrt(0.2))
    # finite at sigma 1, without the grid's second entry: eps_hat = x = 1, pull = 0.16 / 2
    mean, std = step(dance_sde, torch.ones(1, 1), torch.full((1, 1), 2.0), 1.0, 0.9, 0.4, top=math.nan)
    assert mean.item() == pytest.approx(1 - 0.1 * 2.08)
    assert std.item() == pytest.approx(0.4 * math.sqrt(0.1))


@pytest.mark.parametrize("sigma", [1.0, 0.8, 0.3])
def test_dance_sde_is_the_reverse_sde_with_the_score_of_the_marginal(sigma):
    # Reverse SDE over a step D: x - D v + (s^2 D / 2) grad log p_sigma(x) + s sqrt(D) z. Data N(m, d^2).
    m, d, s, size = 1.0, 0.5, 0.3, 0.05
    x = torch.linspace(-2, 2, 9)[:, None].requires_grad_()
    law = Normal((1 - sigma) * m, math.hypot((1 - sigma) * d, sigma))
    (score,) = torch.autograd.grad(law.log_prob(x).sum(), x)
    noise = -sigma * score  # E[eps | x]
    v = noise - (x - sigma * noise) / (1 - sigma) if sigma < 1 else noise - m
    x, v = x.detach(), v.detach()
    mean, std = step(dance_sde, x, v, sigma, sigma - size, s)
    torch.testing.assert_close(mean, x - size * v + s**2 * size / 2 * score, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(std, rows(s * math.sqrt(size), 9))


def test_rows_are_independent(exact):
    x, v = torch.randn(2, 3, 2, 2).unbind(0)
    sigma, after, level = torch.tensor([0.9, 0.5, 0.2]), torch.tensor([0.7, 0.4, 0.1]), torch.tensor([0.1, 0.5, 0.9])
    for transition in (dance_sde, flow_sde, cps, ddim):
        mean, std = transition(x, v, sigma, after, level, rows(0.95, 3))
        for i in range(3):
            alone = transition(x[[i]], v[[i]], sigma[[i]], after[[i]], level[[i]], rows(0.95))
            torch.testing.assert_close(mean[[i]], alone[0], rtol=0, atol=exact)
            torch.testing.assert_close(std[[i]], alone[1], rtol=0, atol=exact)


def marginal(transition, grid, level, m=1.0, d=0.5):
    """Mean and std of the samples for data N(m, d^2), without sampling: every step is affine in x."""
    mean, variance = 0.0, 1.0
    for index, (sigma, after) in enumerate(pairwise(grid)):
        kernel = ode_step if index == len(grid) - 2 else transition
        x = torch.tensor([[0.0], [1.0]])
        slope = (sigma - (1 - sigma) * d**2) / (((1 - sigma) * d) ** 2 + sigma**2)  # Cov(eps - x0, x) / Var(x)
        found, std = step(kernel, x, -m + slope * (x - (1 - sigma) * m), sigma, after, level, grid[1])
        offset, factor = found[0].item(), (found[1] - found[0]).item()
        mean, variance = offset + factor * mean, factor**2 * variance + std[0].item() ** 2
    return mean, math.sqrt(variance)


@pytest.mark.parametrize("level", [0.3, 0.7])
def test_dance_sde_marginals_converge_to_those_of_the_data(level):
    def error(num_steps):
        mean, std = marginal(dance_sde, torch.linspace(1, 0, num_steps + 1).tolist(), level)
        return max(abs(mean - 1.0), abs(std - 0.5))

    few, more, many = error(25), error(100), error(400)
    assert many < 0.002
    # first order: four times the steps, a quarter of the error
    assert 3 < few / more < 6 and 3 < more / many < 6


def test_dance_sde_and_the_ode_have_the_same_limit_on_the_way():
    grid = torch.linspace(1, 0.4, 801).tolist()
    stochastic, deterministic = marginal(dance_sde, grid, 0.7), marginal(ode_step, grid, 0.0)
    exact = (0.6, math.hypot(0.6 * 0.5, 0.4))
    assert stochastic == pytest.approx(exact, abs=0.001)
    assert deterministic == pytest.approx(exact, abs=0.001)


# ddim


def stable_diffusion(kind, **options):
    options = {"set_alpha_to_one": False, "steps_offset": 1, **options} if kind is DDIMScheduler else options
    return kind(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, **options)


def ddim_step(scheduler, x, epsilon, timestep, previous, eta):
    sigma, after = ((1 - scheduler.alphas_cumprod[t]).sqrt() for t in (timestep, previous))
    return step(ddim, x, epsilon, sigma, after, eta)


@pytest.mark.parametrize("timestep", [901, 701, 401, 201, 101])
def test_ddim_equals_the_scheduler_of_diffusers(timestep, exact):
    scheduler = stable_diffusion(DDIMScheduler)
    scheduler.set_timesteps(10)
    assert timestep in scheduler.timesteps
    x, epsilon, z = torch.randn(3, 2, 4, 4).unbind(0)

    mean, std = ddim_step(scheduler, x, epsilon, timestep, timestep - 100, 0.0)
    torch.testing.assert_close(mean, scheduler.step(epsilon, timestep, x, eta=0.0).prev_sample, rtol=0, atol=exact)
    assert (std == 0).all()

    _, std = ddim_step(scheduler, x, epsilon, timestep, timestep - 100, 1.0)
    expected = scheduler._get_variance(timestep, timestep - 100).sqrt().expand(2)
    torch.testing.assert_close(std, expected, rtol=0, atol=exact)

    for eta in (0.4, 1.0):
        mean, std = ddim_step(scheduler, x, epsilon, timestep, timestep - 100, eta)
        expected = scheduler.step(epsilon, timestep, x, eta=eta, variance_noise=z).prev_sample
        torch.testing.assert_close(mean + std[:, None, None] * z, expected, rtol=0, atol=exact)


@pytest.mark.parametrize("timestep", [950, 500, 50])
def test_ddim_with_eta_1_is_the_ancestral_step_of_ddpm(timestep, exact):
    scheduler = stable_diffusion(DDPMScheduler)
    x, epsilon = torch.randn(2, 2, 4, 4).unbind(0)
    found = scheduler.step(epsilon, timestep, x, generator=torch.Generator().manual_seed(3)).prev_sample
    z = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    mean, std = ddim_step(scheduler, x, epsilon, timestep, timestep - 1, 1.0)
    torch.testing.assert_close(mean + std[:, None, None] * z, found, rtol=0, atol=exact)


# cps, preserve


def test_cps_by_hand():
    # a = 1/3: sin(pi / 6) = 1/2. x = 1, v = 2, sigma 0.5 -> 0.4: x0_hat = 0, eps_hat = 2, std = 0.2
    mean, std = step(cps, torch.ones(1, 1), torch.full((1, 1), 2.0), 0.5, 0.4, 1 / 3)
    assert std.item() == pytest.approx(0.2)
    assert mean.item() == pytest.approx(2 * math.sqrt(0.4**2 - 0.2**2))
    # v = 4: x0_hat = -1, eps_hat = 3
    mean, _ = step(cps, torch.ones(1, 1), torch.full((1, 1), 4.0), 0.5, 0.4, 1 / 3)
    assert mean.item() == pytest.approx(-0.6 + 3 * math.sqrt(0.4**2 - 0.2**2))


@pytest.mark.parametrize(("sigma", "after"), [(1.0, 0.9), (0.5, 0.2), (0.1, 0.0)])
def test_cps_is_preserve_on_the_rectified_path(sigma, after, exact):
    x0, eps = torch.randn(2, 3, 4).unbind(0)
    std = rows(after * math.sin(0.35 * math.pi), 3)
    expected = preserve(x0, eps, rows(1 - after, 3), rows(after, 3), std)
    found = step(cps, (1 - sigma) * x0 + sigma * eps, eps - x0, sigma, after, 0.7)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=exact)
    assert (found[1] > 0).all() == (after > 0)


def test_preserve_keeps_the_noise_and_never_takes_the_root_of_a_negative():
    clean, noise = torch.tensor([[2.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    # 3-4-5: sigma' = 0.5, std = 0.3 leaves 0.4 of the old noise; alpha' = 0.7
    mean, std = preserve(clean, noise, rows(0.7, 2), rows(0.5, 2), rows(0.3, 2))
    assert mean.flatten().tolist() == pytest.approx([1.4, 0.4])
    assert std.tolist() == pytest.approx([0.3, 0.3])
    mean, _ = preserve(clean, noise, rows(0.7, 2), rows(0.5, 2), rows(0.5000001, 2))
    assert mean.flatten().tolist() == pytest.approx([1.4, 0.0])


# noise_excess


def excess(transition, grid, level):
    return [noise_excess(transition, grid[i], grid[i + 1], level, grid[1]) for i in range(len(grid) - 2)]


def test_the_grid_is_that_of_sd3():
    known = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]
    assert sd3_grid(10) == pytest.approx(known, abs=6e-5)


def test_noise_excess_of_flow_sde_is_the_known_table():
    known = [1.04, 1.06, 1.03, 1.02, 1.03, 1.04, 1.07, 1.23]
    found = excess(flow_sde, sd3_grid(10), 0.7)
    assert found[:8] == pytest.approx(known, abs=0.006)
    assert found[8] == pytest.approx(26.9, abs=0.06)
    found = excess(flow_sde, shift3_grid(16), 0.7)
    assert found[13:] == pytest.approx([1.06, 1.24], abs=0.006)
    assert max(found[2:13]) < 1.03
    # the first step, by hand: std a, mean sigma' - a^2 / 2 where x0 = 0 and eps = 1
    first = shift3_grid(16)[1]
    assert found[0] == pytest.approx(math.hypot(first - 0.245, 0.7) / first, rel=1e-5)


def test_flow_sde_weighs_the_velocity_more_the_less_noise_there_is():
    """|d mean / d v| / std, the last column of the table."""
    known = [0.057, 0.078, 0.129, 0.188, 0.264, 0.371, 0.536, 0.825, 1.49]
    grid, x = sd3_grid(10), torch.zeros(1, 1)
    for index, expected in enumerate(known):
        mean, std = step(flow_sde, x, torch.ones(1, 1), grid[index], grid[index + 1], 0.7, grid[1])
        assert mean.item() < 0  # towards clean the state moves against v
        assert -mean.item() / std.item() == pytest.approx(expected, abs=0.006 if expected > 1 else 6e-4)


def test_the_last_noisy_step_of_sd3_turns_the_noise_around():
    grid, one = sd3_grid(10), torch.ones(1, 1)  # x0 = 0, eps = 1: x = sigma, v = 1
    signs = [step(flow_sde, grid[i] * one, one, grid[i], grid[i + 1], 0.7, grid[1])[0].item() > 0 for i in range(9)]
    assert signs == [True] * 8 + [False]


def test_noise_excess_of_dance_sde_is_the_known_table():
    found = excess(dance_sde, shift3_grid(16), 0.3)
    assert max(found[:13]) < 1.0075
    assert found[13] == pytest.approx(1.015, abs=6e-4)
    assert found[14] == pytest.approx(1.10, abs=0.006)


@pytest.mark.parametrize("grid", [sd3_grid(10), shift3_grid(16), shift3_grid(4)])
def test_cps_leaves_exactly_the_noise_of_the_path(grid):
    for level in (0.3, 0.8, 1.0):
        assert excess(cps, grid, level) == pytest.approx([1.0] * (len(grid) - 2), abs=1e-6)


# pseudo log-prob


def test_the_pseudo_log_ratio_is_the_true_one_times_twice_the_variance():
    x, old, new = torch.randn(3, 4, 2, 3).unbind(0)
    std = torch.tensor([0.1, 0.4, 1.0, 2.0])
    law_old, law_new = (Normal(mean, std[:, None, None]) for mean in (old, new))
    true = (law_new.log_prob(x) - law_old.log_prob(x)).mean((1, 2))
    pseudo = [gaussian_log_prob(x, mean, std, reduction="pseudo") for mean in (new, old)]
    torch.testing.assert_close(pseudo[0] - pseudo[1], 2 * std**2 * true, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pseudo[0], -(x - new).square().mean((1, 2)))
    assert (true.abs() > 0.01).all()  # the ratios are not all 1
