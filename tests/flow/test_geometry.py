import itertools

import pytest
import torch

from flowrl.flow.geometry import metric_error, metric_strength, sensitivities
from flowrl.flow.matching import mean_square
from flowrl.flow.preferences import dpo_logit, dpo_loss

D = 4
J = torch.randn(D, D, generator=torch.Generator().manual_seed(0))


def linear(x):
    """A noise prediction J x + 1."""
    return (x.flatten(1) @ J.to(x).T + 1).reshape(x.shape)


def all_signs():
    """Every Rademacher vector of D elements, `(2^D, D)`."""
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=D)))


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_a_linear_reference_gives_j_z_in_one_call(exact):
    j, x, probes, seen = J.double(), rows(3, 2, 2), torch.randint(0, 2, (5, 3, 2, 2)) * 2.0 - 1, []

    def noise_of(inputs):
        seen.append(inputs)
        return linear(inputs)

    u = sensitivities(noise_of, x, linear(x), probes, step=0.5)
    torch.testing.assert_close(u.flatten(2), probes.flatten(2) @ j.T, rtol=0, atol=exact)
    (inputs,) = seen
    # row k B + b is probe k of row b, half the row's root mean square away
    moved = inputs.reshape(5, 3, 4) - x.flatten(1)
    rms = x.flatten(1).norm(dim=1) / 2
    torch.testing.assert_close(moved, 0.5 * rms[:, None] * probes.flatten(2), rtol=0, atol=exact)


def test_sensitivities_keep_no_graph():
    x = rows(3, D).requires_grad_()
    assert not sensitivities(linear, x, linear(x), torch.ones(2, 3, D)).requires_grad


@pytest.mark.parametrize("diagonal", [False, True])
def test_over_all_probes_the_metric_is_its_closed_form(diagonal):
    """The mean over z of u u^T is J J^T, so numerator and trace are e^T (I + lam J J^T) e and tr(I + lam J J^T)."""
    e, lam = rows(3, D), torch.tensor([0.3, 1.0, 5.0])
    u = (all_signs() @ J.T)[:, None].expand(-1, 3, -1)
    found = metric_error(e, u, lam, diagonal=diagonal)
    for row in range(3):
        product = J.double() @ J.double().T
        m = torch.eye(D) + lam[row] * (product.diag().diag() if diagonal else product)
        own = e[row].double()
        assert found[row].item() == pytest.approx((own @ m @ own / m.trace()).item(), rel=1e-5)


def test_an_error_along_a_sensitive_direction_counts_more():
    """J = diag(3, 1), lam = 1: M = 2 diag(10, 2) / 12, so unit errors give 10/12 and 2/12; they used to be 1/2 each."""
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=2)))
    u = (signs * torch.tensor([3.0, 1.0]))[:, None].expand(-1, 2, -1)
    for diagonal in (False, True):
        found = metric_error(torch.eye(2), u, torch.ones(2), diagonal=diagonal)
        assert found.tolist() == pytest.approx([10 / 12, 2 / 12], rel=1e-5)


def test_equal_sensitivity_everywhere_changes_nothing():
    e, u = rows(3, D), (2.5 * all_signs())[:, None].expand(-1, 3, -1)
    torch.testing.assert_close(metric_error(e, u, torch.full((3,), 0.7)), mean_square(e))


@pytest.mark.parametrize("diagonal", [False, True])
def test_strength_zero_is_diffusion_dpo_to_the_bit(diagonal):
    residual, u = rows(4, 7, 3, 5, 5), rows(2, 7, 3, 5, 5)
    isotropic = [mean_square(part) for part in residual]
    metric = [metric_error(part, u, torch.zeros(7), diagonal=diagonal) for part in residual]
    assert all(torch.equal(a, b) for a, b in zip(isotropic, metric, strict=True))
    assert torch.equal(dpo_loss(dpo_logit(*metric, beta=2000.0)), dpo_loss(dpo_logit(*isotropic, beta=2000.0)))


def test_the_default_strength_and_the_gate():
    e, u = rows(3, D), 4 * rows(2, 3, D)
    inside = torch.tensor([True, False, True])
    lam = metric_strength(u, relative=2.0, inside=inside)
    assert (lam * u.square().mean((0, 2))).tolist() == pytest.approx([2.0, 0.0, 2.0])
    gated = metric_error(e, u, lam)
    assert torch.equal(gated[1], mean_square(e)[1])
    assert (gated - mean_square(e))[[0, 2]].abs().min() > 1e-3
    # a reference that does not react at all: nothing to weigh
    assert torch.equal(metric_error(e, torch.zeros_like(u), metric_strength(torch.zeros_like(u))), mean_square(e))


def test_gradients_reach_the_residual_only():
    """d/de of e^T M e / d at one probe: (2 e + 2 lam <e, u> u) / (d + lam |u|^2)."""
    e = torch.tensor([[1.0, 2.0]], requires_grad=True)
    u = torch.tensor([[[3.0, -1.0]]], requires_grad=True)
    lam = torch.tensor([0.5], requires_grad=True)
    metric_error(e, u, lam).sum().backward()
    # <e, u> = 1, |u|^2 = 10: (2 + 3, 4 - 1) / 7
    assert e.grad.flatten().tolist() == pytest.approx([5 / 7, 3 / 7])
    assert u.grad is None and lam.grad is None


def test_wrong_shapes_are_refused():
    x = rows(3, D)
    with pytest.raises(ValueError, match="expected probes"):
        sensitivities(linear, x, x, torch.ones(2, 4, D))
    with pytest.raises(ValueError, match="expected u"):
        metric_error(x, rows(2, 1, D), torch.ones(3))
    with pytest.raises(ValueError, match="expected u"):
        metric_error(x, rows(2, 3, D), torch.ones(1))
