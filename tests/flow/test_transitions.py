import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowrl.core.gaussian import gaussian_kl, gaussian_log_prob
from flowrl.flow.plans import StepPlan, all_steps
from flowrl.flow.rollout import integrate, sample_ode
from flowrl.flow.transitions import TRANSITIONS, cps, flow_sde, get_transition, ode_step


def shifted_grid(num_steps, shift=3.0, smallest=1e-3):
    """Sigmas of diffusers' flow-matching scheduler, which shifts its smallest sigma twice."""
    low = shift * smallest / (1 + (shift - 1) * smallest)
    sigmas = torch.linspace(1, low, num_steps, dtype=torch.float64)
    return torch.cat([shift * sigmas / (1 + (shift - 1) * sigmas), torch.zeros(1, dtype=torch.float64)])


def rows(value, num=1):
    return torch.full((num,), float(value))


def step(transition, x, v, sigma, sigma_next, level, top=0.96):
    num = len(x)
    return transition(x, v, rows(sigma, num), rows(sigma_next, num), rows(level, num), rows(top, num))


@pytest.mark.parametrize("name", list(TRANSITIONS))
@pytest.mark.parametrize("index", range(9))
def test_draws_log_prob_and_kl_equal_torch_distributions(name, index):
    grid = shifted_grid(10)
    transition = get_transition(name)
    num = 20_000
    x, v = torch.tensor([[0.3]]).expand(num, 1), torch.tensor([[-0.8]]).expand(num, 1)
    mean, std = step(transition, x, v, grid[index], grid[index + 1], 0.7, grid[1])
    generator = torch.Generator().manual_seed(index)
    draws = mean + std[:, None] * torch.randn(num, 1, generator=generator)
    # standard errors: std / sqrt(n) = 0.7 % of std for the mean, std / sqrt(2 n) = 0.5 % for the std
    assert abs(draws.mean() - mean[0, 0]) < 0.03 * std[0]
    assert abs(draws.std() / std[0] - 1) < 0.02
    law = Normal(mean, std[:, None])
    torch.testing.assert_close(gaussian_log_prob(draws, mean, std), law.log_prob(draws).mean(1), atol=1e-5, rtol=1e-5)
    other = mean + 0.1 * std[:, None]
    expected = kl_divergence(law, Normal(other, std[:, None])).mean(1)
    torch.testing.assert_close(gaussian_kl(mean, other, std), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", list(TRANSITIONS))
def test_noise_level_to_zero_is_the_ode_step(name):
    x, v = torch.randn(2, 5, 4).unbind(0)
    grid = shifted_grid(10)
    for index in range(9):
        expected, _ = step(ode_step, x, v, grid[index], grid[index + 1], 0)
        mean, std = step(get_transition(name), x, v, grid[index], grid[index + 1], 1e-5, grid[1])
        torch.testing.assert_close(mean, expected, atol=1e-5, rtol=1e-5)
        assert (std < 2e-5).all()


def test_flow_sde_closed_forms():
    """The coefficient of v is (1 + a^2 / 2) dt at every sigma < 1, and the first std is exactly a."""
    grid, a = shifted_grid(10), 0.7
    x = torch.zeros(1, 1)
    for index in range(1, 10):
        mean, _ = step(flow_sde, x, torch.ones(1, 1), grid[index], grid[index + 1], a, grid[1])
        dt = float(grid[index + 1] - grid[index])
        assert mean.item() == pytest.approx((1 + a**2 / 2) * dt, rel=1e-5)
    for num_steps in (4, 10, 28):
        grid = shifted_grid(num_steps)
        assert step(flow_sde, x, x, 1.0, grid[1], a, grid[1])[1].item() == pytest.approx(a, rel=1e-5)


def remaining_noise(transition, x0, index, grid, a):
    """Std of the noise around (1 - sigma') x0 after a step with the exact velocity of a single data point, / sigma'."""
    sigma, sigma_next = float(grid[index]), float(grid[index + 1])
    # x = (1 - sigma) x0 + sigma eps, v = eps - x0: the step is affine in eps, so eps = 0 and 1 give its coefficient
    means = []
    for eps in (0.0, 1.0):
        x = torch.full((1, 1), (1 - sigma) * x0 + sigma * eps)
        mean, std = step(transition, x, torch.full((1, 1), eps - x0), sigma, sigma_next, a, grid[1])
        means.append(mean.item())
    assert means[0] == pytest.approx((1 - sigma_next) * x0, abs=1e-5) or transition is flow_sde
    return math.hypot(means[1] - means[0], std.item()) / sigma_next


@pytest.mark.parametrize("num_steps", [2, 4, 10, 28])
def test_cps_keeps_the_noise_level_exactly(num_steps):
    grid = shifted_grid(num_steps)
    for index in range(num_steps - 1):
        assert remaining_noise(cps, 0.7, index, grid, 0.7) == pytest.approx(1, abs=1e-5)


def test_flow_sde_shows_its_known_excess():
    """Ratios of the noise left to the noise wanted, SD3.5 grid with 10 steps, a = 0.7."""
    known = [1.04, 1.06, 1.03, 1.02, 1.03, 1.04, 1.07, 1.23, 26.9]
    grid = shifted_grid(10)
    found = [remaining_noise(flow_sde, 0.0, index, grid, 0.7) for index in range(9)]
    assert found == pytest.approx(known, rel=0.006)


def gaussian_marginal_error(transition, num_steps, level):
    """Data N(1, 0.5^2): how far mean and std of the samples are off, starting from the exact law at sigma 0.8."""
    m, s, num = 1.0, 0.5, 20_000
    generator = torch.Generator().manual_seed(1)

    def velocity(x, sigma):
        variance = ((1 - sigma) * s) ** 2 + sigma**2
        slope = (sigma - (1 - sigma) * s**2) / variance  # Cov(eps - x0, x) / Var(x)
        return -m + slope * (x - (1 - sigma) * m)

    grid = torch.linspace(0.8, 0, num_steps + 1)
    x = 0.2 * m + math.hypot(0.2 * s, 0.8) * torch.randn(num, 1, generator=generator)
    for index in range(num_steps):
        last = index == num_steps - 1  # deterministic, as in every plan
        kernel = ode_step if last else transition
        mean, std = step(kernel, x, velocity(x, grid[index]), grid[index], grid[index + 1], level, grid[1])
        x = mean + std[:, None] * torch.randn(num, 1, generator=generator)
    return max(abs(x.mean().item() - m), abs(x.std().item() - s))


def test_flow_sde_marginals_converge_to_those_of_a_gaussian():
    assert gaussian_marginal_error(flow_sde, 400, 0.7) < 0.012  # 3 standard errors of the mean are 0.011
    assert gaussian_marginal_error(flow_sde, 6, 0.7) > 0.03


def test_cps_marginals_converge_where_its_noise_vanishes_with_the_step():
    """CPS keeps the noise level, not the marginal: with a fixed noise level it loses spread at any step count."""
    assert gaussian_marginal_error(cps, 400, 0.7 * (10 / 400) ** 0.5) < 0.012
    assert gaussian_marginal_error(cps, 400, 0.7) > 0.05


def draw(*shape):
    """Draws keyed by sample and step."""

    def call(numbers, step):
        return torch.stack(
            [torch.randn(shape, generator=torch.Generator().manual_seed(100 * n + step + 1)) for n in numbers]
        )

    return call


def test_integrate_without_noise_is_euler():
    noise, grid = torch.randn(3, 2, 2), shifted_grid(6).float()

    def velocity(x, sigma, rows):
        return torch.sin(x) + sigma[:, None, None]

    plan = StepPlan(tuple(range(7)), (1e-6,) + (0.0,) * 5, (0,))
    found = integrate(velocity, torch.arange(3), grid, plan, cps, draw(2, 2), noise=noise)
    torch.testing.assert_close(found.clean, sample_ode(velocity, noise, grid), atol=1e-5, rtol=1e-5)


def test_integrate_keeps_only_what_is_trained():
    grid = shifted_grid(10).float()
    plan = StepPlan(tuple(range(11)), (0.0, 0.0, 0.7, 0.7) + (0.0,) * 6, (2, 3))
    found = integrate(lambda x, sigma, rows: -x, torch.arange(2), grid, plan, cps, draw(4))
    assert found.states.shape == (2, 3, 4)  # two steps share a latent
    assert found.before.tolist() == [[0, 1]] * 2
    assert found.after.tolist() == [[1, 2]] * 2
    for unit in range(2):
        assert found.sigma[:, unit].tolist() == [grid[2 + unit]] * 2
        assert found.sigma_next[:, unit].tolist() == [grid[3 + unit]] * 2
        x, x_next = found.states[:, unit], found.states[:, unit + 1]
        mean, std = step(cps, x, -x, grid[2 + unit], grid[3 + unit], 0.7)
        torch.testing.assert_close(gaussian_log_prob(x_next, mean, std), found.log_prob[:, unit])


def test_integrate_is_independent_of_the_batch(exact):
    grid, plan = shifted_grid(8).float(), all_steps((0.7,) * 7)

    def run(rows):
        return integrate(lambda x, sigma, rows: x.sin(), torch.tensor(rows), grid, plan, flow_sde, draw(3)).clean

    torch.testing.assert_close(torch.cat([run([0]), run([1, 2]), run([3])]), run([0, 1, 2, 3]), rtol=0, atol=exact)


def test_unknown_transitions_are_refused():
    with pytest.raises(ValueError, match="unknown transition 'flow_sd'; did you mean 'flow_sde'"):
        get_transition("flow_sd")
