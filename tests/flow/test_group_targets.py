import math

import pytest
import torch

from flowrl.flow.group_targets import group_weights, ratio_mask


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_weights_by_hand():
    advantages = torch.tensor([1.0, 2.0, -1.0, 0.0, -1.0])
    error = torch.tensor([0.5, 0.7, 0.4, 9.0, 0.6])
    reference = torch.tensor([0.3, 1.1, 0.3, 1.0, 0.4])
    group = torch.tensor([7, 3, 7, 3, 3])
    # A (e - ref): 0.2, -0.8, -0.1, 0, -0.2 -> group 7: 0.05; group 3: -1 / 3
    found = group_weights(advantages, error, reference, group, beta=10.0)
    a, b = sigmoid(0.5), sigmoid(-10 / 3)
    assert found.tolist() == pytest.approx([a, b, a, b, b], rel=1e-5)


def test_weight_is_one_half_at_the_reference_and_falls_as_the_preference_is_fitted():
    advantages, reference, group = torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]), torch.zeros(2, dtype=torch.long)
    weights = [
        group_weights(advantages, torch.tensor([0.5 - gap, 0.5 + gap]), reference, group, beta=50.0)[0].item()
        for gap in (-0.02, 0.0, 0.02, 0.2)
    ]
    assert weights[1] == 0.5
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > 0.7 and weights[3] < 1e-3


def preference_gradient(logit, parameters):
    return torch.autograd.grad(torch.nn.functional.softplus(-logit), parameters)[0]  # of -log sigmoid(u)


def test_a_pair_is_diffusion_dpo():
    torch.manual_seed(0)
    reference = torch.tensor([0.31, 0.44])
    for beta in (5.0, 100.0):
        error = torch.tensor([0.30, 0.47]).requires_grad_()
        u = -(beta / 2) * ((error[0] - error[1]) - (reference[0] - reference[1]))
        advantages, group = torch.tensor([1.0, -1.0]), torch.zeros(2, dtype=torch.long)
        weights = group_weights(advantages, error, reference, group, beta=beta)
        assert weights.tolist() == pytest.approx([torch.sigmoid(-u).item()] * 2, rel=1e-5)
        assert not weights.requires_grad
        (found,) = torch.autograd.grad((weights * advantages * error).mean(), error)
        torch.testing.assert_close(beta * found, preference_gradient(u, error))


def test_groups_of_any_size_follow_the_logistic_loss_of_their_mean(exact):
    advantages = torch.tensor([1.2, -0.7, -0.5, 0.9, -0.9])
    group = torch.tensor([0, 0, 0, 1, 1])
    reference, beta = torch.rand(5), 20.0
    error = torch.rand(5).requires_grad_()
    weights = group_weights(advantages, error, reference, group, beta=beta)
    (found,) = torch.autograd.grad((weights * advantages * error).sum(), error)
    for rows in (slice(0, 3), slice(3, 5)):
        margin = -(advantages[rows] * (error[rows] - reference[rows])).mean()
        wanted = preference_gradient(beta * margin, error)[rows]
        torch.testing.assert_close(beta * found[rows] / len(error[rows]), wanted, rtol=0, atol=exact)


def test_ratio_mask_by_hand():
    """Ratios 1.1052, 1.0, 0.9048, at a clip of 0.05: a gain that has moved enough drops out, whatever its sign."""
    old = torch.tensor([0.6, 0.5, 0.4]).repeat(3)
    advantages = torch.tensor([1.0, -1.0, 0.0]).repeat_interleave(3)
    kept = ratio_mask(torch.full((9,), 0.5), old, advantages, 0.05)
    assert kept.tolist() == [False, True, True, True, True, False, True, True, False]
    # at the edges: e^0.1 = 1.10517, e^-0.1 = 0.90484
    edge = ratio_mask(torch.zeros(4), torch.tensor([0.1, 0.1, -0.1, -0.1]), torch.tensor([1.0, 1, -1, -1]), 0.1051)
    assert edge.tolist() == [False, False, True, True]
    edge = ratio_mask(torch.zeros(4), torch.tensor([0.1, 0.1, -0.1, -0.1]), torch.tensor([1.0, 1, -1, -1]), 0.1052)
    assert edge.tolist() == [True] * 4


def test_shapes_must_agree():
    row, other = torch.zeros(3), torch.zeros(3, 1)
    with pytest.raises(ValueError, match="shapes differ"):
        group_weights(row, row, other, torch.zeros(3), beta=1.0)
    with pytest.raises(ValueError, match="shapes differ"):
        ratio_mask(row, torch.zeros(1), row, 0.1)
