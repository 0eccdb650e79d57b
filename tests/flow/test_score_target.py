import math

import pytest
import torch
from gaussian_flows import TIMES, data_velocity, draws, iterate, regress
from torch import nn

from flowrl.flow.score_target import clip_score, fit_score_calibrated_flow, flow_endpoints, reference_score, scf_target

M = 1.5  # mean of the 1-D density to reach, from a flow whose endpoints are N(0, 1)


def scf_update(var, kappa):
    """The velocity that fits the SCF target for N(M, var), given the law of the endpoints."""

    def update(_, mean, var_now):
        clean, noise, x = draws(mean, var_now)
        sigma = TIMES[:, None].expand_as(x)
        flat = (values.flatten() for values in (clean, noise, sigma, (M - clean) / var))
        return regress(x, scf_target(*flat, kappa=kappa).double().reshape(x.shape))

    return update


def scf_law(var, kappa, share=1.0):
    return iterate(data_velocity(0.0, 1.0), scf_update(var, kappa), share=share, tolerance=3e-5)


def test_target_by_hand():
    one = torch.ones(1, 2)
    # t = 1/4: eps - x0 = -3, correction 3/4 * -1 + 1/4 * 8 = 5/4, times kappa 2
    found = scf_target(2 * one, -one, torch.tensor([0.25]), 8 * one, kappa=2.0)
    assert found.tolist() == [[-5.5, -5.5]]
    with pytest.raises(ValueError, match="differ"):
        scf_target(one, one, torch.tensor([0.25]), torch.ones(1), kappa=0.5)


@pytest.mark.parametrize("kappa", [0.1, 0.5, 3.0])
def test_the_velocity_of_the_target_density_is_a_fixed_point(kappa):
    for var in (0.05, 0.3, 2.0):
        torch.testing.assert_close(scf_update(var, kappa)(None, M, var), data_velocity(M, var), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kappa", [0.1, 0.5, 1.0])
def test_full_updates_reach_a_broad_density(kappa):
    assert scf_law(0.3, kappa) == pytest.approx((M, 0.3), abs=1e-3)


# the least std of the density is 0.2236 and 0.1; kappa times the share may be 2.35 and 2.17 times as large
@pytest.mark.parametrize(
    ("var", "kappa", "safe", "unsafe"),
    [
        (0.05, 1.0, 0.5, 0.55),
        (0.05, 0.5, 1.0, None),
        (0.01, 1.0, 0.2, 0.23),
        (0.01, 0.5, 0.4, 0.46),
        (0.01, 0.1, 1.0, None),
    ],
)
def test_narrow_densities_need_small_updates(var, kappa, safe, unsafe):
    assert scf_law(var, kappa, safe) == pytest.approx((M, var), abs=1e-3)
    for share in (unsafe, 1.0) if unsafe else ():
        assert scf_law(var, kappa, share) is None


def test_clip_score_keeps_directions_and_short_rows():
    score = torch.tensor([[3.0, 4.0], [0.3, -0.4], [0.0, 0.0]])  # root mean squares sqrt(12.5), sqrt(0.125), 0
    found = clip_score(score, 1.0)
    root = math.sqrt(2)
    torch.testing.assert_close(found, torch.tensor([[0.6 * root, 0.8 * root], [0.3, -0.4], [0.0, 0.0]]))
    with pytest.raises(ValueError, match="positive"):
        clip_score(score, 0.0)


def test_reference_score_of_gaussian_data():
    clean = torch.linspace(-2, 3, 11)[:, None]
    for sigma0 in (0.02, 0.005):
        slope = (sigma0 - (1 - sigma0) * 0.3) / ((1 - sigma0) ** 2 * 0.3 + sigma0**2)
        velocity = -M + slope * (clean - (1 - sigma0) * M)
        noised_score = -(clean - (1 - sigma0) * M) / ((1 - sigma0) ** 2 * 0.3 + sigma0**2)
        found = reference_score(clean, velocity, sigma0)
        torch.testing.assert_close(found, noised_score, atol=1e-4, rtol=1e-4)
        assert (found - (M - clean) / 0.3).abs().max() < 40 * sigma0
    with pytest.raises(ValueError, match="sigma0"):
        reference_score(clean, velocity, 0.0)


class Network(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        sizes = [nn.Linear(dim + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, dim)]
        self.layers = nn.Sequential(*sizes)

    def forward(self, x, t):
        return self.layers(torch.cat([x, t[:, None]], 1))


class Growth(nn.Module):
    def forward(self, x, t):
        return (2 * t)[:, None] * x


def test_endpoints_solve_the_ode_from_noise_to_data():
    """dx / dt = 2 t x: x(0) = x(1) / e; the error of the midpoint method falls by four with half the step."""
    errors = [flow_endpoints(Growth(), torch.ones(1, 1), num_steps=n).item() - 1 / math.e for n in (8, 16)]
    assert abs(errors[1]) < 2e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.15)


def test_a_network_learns_a_correlated_gaussian_from_its_score():
    mean, cov = torch.tensor([1.0, -0.5]), torch.tensor([[1.0, 0.4], [0.4, 0.3]])
    precision = torch.linalg.inv(cov)
    network = Network(2, 48)
    sampler = fit_score_calibrated_flow(network, lambda x: (mean - x) @ precision, dim=2, iterations=300)
    assert sampler is not network and not any(p.requires_grad for p in sampler.parameters())
    x = flow_endpoints(sampler, torch.randn(20_000, 2), num_steps=10)
    assert (x.mean(0) - mean).abs().max() < 0.08
    assert (x.T.cov() - cov).abs().max() < 0.1
