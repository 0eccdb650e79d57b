import math
from itertools import pairwise

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from flowrl.flow.solvers import SOLVERS, solve, solver_step
from flowrl.flow.transitions import ode_step


def curved(x, sigma, rows=None):
    """A velocity that is linear in nothing."""
    return torch.sin(2 * x) - x.roll(1, -1) * sigma[:, None] + torch.cos(3 * sigma)[:, None]


def trajectory(solver, velocity, x, grid):
    states, memory = [x], None
    for sigma, after in pairwise(grid):
        row = torch.arange(len(x))
        x, memory = solver_step(solver, velocity, x, row, sigma.expand(len(x)), after.expand(len(x)), memory)
        states.append(x)
    return torch.stack(states)


# dpmpp_2m


@pytest.mark.parametrize("num_steps", [2, 6, 20])
@pytest.mark.parametrize("from_one", [False, True])
def test_dpmpp_2m_equals_the_scheduler_of_diffusers(num_steps, from_one, exact):
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
        lower_order_final=True,
    )
    scheduler.set_timesteps(num_steps)
    if from_one:  # its own grid starts just below 1
        scheduler.sigmas[0] = 1.0
    grid = scheduler.sigmas
    assert len(grid) == num_steps + 1 and grid[-1] == 0
    x = torch.randn(3, 5)
    states = trajectory("dpmpp_2m", curved, x, grid)
    for index, timestep in enumerate(scheduler.timesteps):
        x = scheduler.step(curved(x, grid[index].expand(3)), timestep, x).prev_sample
        torch.testing.assert_close(states[index + 1], x, rtol=0, atol=exact)
    # of two steps both are first order, and so is Euler; more steps tell the solvers apart
    bend = (states[-1] - trajectory("euler", curved, states[0], grid)[-1]).abs().max()
    assert bend > 1e-2 if num_steps > 2 else bend < exact


def test_a_first_step_of_dpmpp_2m_and_the_step_to_clean_are_euler_steps():
    # x' = (s'/s) x + (1 - s'/s) x0_hat = x + (s' - s) v, on the rectified path
    x, grid = torch.randn(3, 4), torch.tensor([0.8, 0.5, 0.3, 0.0])
    states = trajectory("dpmpp_2m", curved, x, grid)
    for index in (0, 2):
        sigma, after = grid[index].expand(3), grid[index + 1].expand(3)
        expected, _ = ode_step(states[index], curved(states[index], sigma), sigma, after, sigma, sigma)
        torch.testing.assert_close(states[index + 1], expected, atol=1e-5, rtol=1e-5)
    sigma, after = grid[1].expand(3), grid[2].expand(3)
    euler, _ = ode_step(states[1], curved(states[1], sigma), sigma, after, sigma, sigma)
    assert (states[2] - euler).abs().max() > 1e-2


# heun


def test_heun_by_hand():
    # v = x + sigma, x = 1, 0.5 -> 0.3: v = 1.5, Euler 0.7, v there 0.7 + 0.3 = 1, x' = 1 - 0.2 * (1.5 + 1) / 2
    x, memory = solver_step(
        "heun",
        lambda x, sigma, rows: x + sigma[:, None],
        torch.ones(1, 1),
        torch.zeros(1, dtype=torch.long),
        torch.tensor([0.5]),
        torch.tensor([0.3]),
    )
    assert x.item() == pytest.approx(0.75)
    assert memory is None


def test_heun_evaluates_the_second_slope_only_where_the_step_ends_above_zero(exact):
    seen = []

    def velocity(x, sigma, rows):
        seen.append((rows.tolist(), sigma.tolist()))
        return curved(x, sigma)

    x = torch.randn(3, 4)
    sigma, after = torch.tensor([0.5, 0.25, 0.75]), torch.tensor([0.25, 0.0, 0.5])
    found, _ = solver_step("heun", velocity, x, torch.tensor([7, 8, 9]), sigma, after)
    assert seen == [([7, 8, 9], [0.5, 0.25, 0.75]), ([7, 9], [0.25, 0.5])]
    euler, _ = ode_step(x, curved(x, sigma), sigma, after, sigma, sigma)
    torch.testing.assert_close(found[1], euler[1], rtol=0, atol=exact)
    slope = (curved(x, sigma) + curved(euler, after)) / 2
    expected = x + (after - sigma)[:, None] * slope
    torch.testing.assert_close(found[::2], expected[::2], rtol=0, atol=exact)


# convergence

MEAN, SPREAD = 1.0, 0.5


def gaussian(x, sigma, rows=None):
    """Velocity for data N(1, 0.5^2)."""
    s = sigma[:, None]
    slope = (s - (1 - s) * SPREAD**2) / (((1 - s) * SPREAD) ** 2 + s**2)  # Cov(eps - x0, x) / Var(x)
    return -MEAN + slope * (x - (1 - s) * MEAN)


def exact(z, sigma):
    """The ODE carries quantiles along: z standard deviations from the mean at every sigma."""
    return (1 - sigma) * MEAN + math.hypot((1 - sigma) * SPREAD, sigma) * z


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2), ("dpmpp_2m", 2)])
def test_solvers_converge_with_their_order(solver, order):
    z = torch.linspace(-2, 2, 5)[:, None]

    def error(num_steps):
        grid = torch.linspace(0.9, 0.1, num_steps + 1)
        found = solve(gaussian, [(exact(z, 0.9), torch.arange(5), grid)], solver=solver)[0]
        return (found - exact(z, 0.1)).abs().max().item()

    errors = [error(num_steps) for num_steps in (20, 40, 80)]
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.25)
    assert errors[-1] < (0.02 if order == 1 else 1e-3)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 50])
def test_solvers_are_finite_from_pure_noise_to_clean(solver, num_steps):
    z = torch.linspace(-2, 2, 5)[:, None]
    found = solve(gaussian, [(z, torch.arange(5), torch.linspace(1, 0, num_steps + 1))], solver=solver)[0]
    assert found.isfinite().all()
    if num_steps == 1:  # straight to x0_hat, which is the data's mean
        torch.testing.assert_close(found, torch.full_like(z, MEAN))
    if num_steps == 50:
        assert (found - exact(z, 0.0)).abs().max() < (0.05 if solver == "euler" else 0.01)


# solve


@pytest.mark.parametrize("solver", SOLVERS)
def test_states_at_different_places_are_solved_together_as_if_alone(solver, exact):
    grids = [torch.linspace(0.9, 0, 6), torch.tensor([0.5, 0.2]), torch.tensor([1.0, 0.7, 0.2, 0.0]), torch.ones(1)]
    starts, first = [], 0
    for grid, num in zip(grids, (2, 1, 3, 2), strict=True):
        starts.append((torch.randn(num, 4), torch.arange(first, first + num), grid))
        first += num
    scale, calls = torch.randn(first), []

    def velocity(x, sigma, rows):
        calls.append((rows.tolist(), sigma.shape))
        assert len(x) == len(sigma) == len(rows)
        return curved(x, sigma) * scale[rows, None]

    alone = [solve(velocity, [start], solver=solver)[0] for start in starts]
    calls.clear()
    together = solve(velocity, starts, solver=solver)
    assert [x.shape for x in together] == [x.shape for x, _, _ in starts]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=exact)
    torch.testing.assert_close(together[3], starts[3][0])  # a grid of one entry has no step
    # the longest grid has five steps; Heun takes a second look on all but the one to sigma 0
    assert len(calls) == (9 if solver == "heun" else 5)
    assert calls[0][0] == [0, 1, 2, 3, 4, 5]
    assert calls[-1][0] == [0, 1]


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_network_sees_which_row_a_state_is_of(solver):
    """With a constant velocity of its own for each row the end is known: x + (last - first) v."""
    constant = torch.tensor([10.0, -3.0, 0.5, 7.0])
    starts = [
        (torch.zeros(2, 1), torch.tensor([3, 1]), torch.tensor([0.9, 0.6, 0.3, 0.0])),
        (torch.ones(3, 1), torch.tensor([0, 2, 3]), torch.tensor([0.6, 0.5])),
    ]
    found = solve(lambda x, sigma, rows: constant[rows, None].expand_as(x), starts, solver=solver)
    assert found[0].flatten().tolist() == pytest.approx([-0.9 * 7, 0.9 * 3], abs=1e-5)
    assert found[1].flatten().tolist() == pytest.approx([1 - 0.1 * 10, 1 - 0.1 * 0.5, 1 - 0.1 * 7], abs=1e-5)


def test_nothing_to_solve_is_nothing():
    assert solve(curved, []) == []


def test_an_unknown_solver_is_named_with_a_suggestion():
    start = (torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), torch.tensor([0.5, 0.0]))
    with pytest.raises(ValueError, match="unknown solver 'dpmpp2m'; did you mean 'dpmpp_2m'"):
        solve(curved, [start], solver="dpmpp2m")
