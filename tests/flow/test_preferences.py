import math

import pytest
import torch

from flowrl.flow.matching import mean_square
from flowrl.flow.preferences import (
    dpo_logit,
    dpo_loss,
    dspo_loss,
    kto_loss,
    mapo_loss,
    safeguard,
    scale_gradient,
    spo_loss,
)


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def test_dpo_at_the_reference_is_ln_2_and_pulls_each_pair_half():
    target, output = torch.randn(2, 2, 5, 3, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    output.requires_grad_()
    error_w, error_l = (mean_square(a - b) for a, b in zip(output, target, strict=True))
    loss = dpo_loss(dpo_logit(error_w, error_l, error_w.detach(), error_l.detach(), beta=30.0))
    assert (loss - math.log(2)).abs().max() < 1e-6
    (gradient,) = torch.autograd.grad(loss.sum(), output)
    # -(1 - sigmoid(0)) du, du = -15 (de_w - de_l), de = 2 residual / 12
    sign = torch.tensor([1.0, -1.0])[:, None, None, None]
    torch.testing.assert_close(gradient, sign * 0.5 * 15 * 2 / 12 * (output - target).detach())


def test_dpo_by_hand():
    """Winner 0.1 better and loser 0.3 worse than the reference: u = -(10 / 2) (-0.1 - 0.3) = 2."""
    parts = (torch.tensor([value]) for value in (0.4, 0.8, 0.5, 0.5))
    u = dpo_logit(*parts, beta=10.0)
    assert u.item() == pytest.approx(2.0, abs=1e-5)
    assert dpo_loss(u).item() == pytest.approx(math.log(1 + math.exp(-2)), abs=1e-6)
    # no overflow far from the reference: -log sigmoid(-1000) is 1000
    assert dpo_loss(torch.tensor([-1000.0])).item() == pytest.approx(1000)


def test_kto_by_hand():
    """Gains ref - e of 0.3 (desirable), 0.1 (desirable), -0.1 (undesirable): their mean is 0.1.

    Class means are 0.2 and -0.1, whose average is 0.05.
    """
    error, reference = torch.tensor([0.7, 0.9, 1.1]), torch.ones(3)
    desirable = torch.tensor([True, True, False])
    wanted = {  # z = 10 (gain - baseline), turned round for the last
        "batch": [2.0, 0.0, 2.0],
        "signs": [2.5, 0.5, 1.5],
    }
    for baseline, z in wanted.items():
        found = kto_loss(error, reference, desirable, beta=10.0, baseline=baseline, undesirable_weight=3.0)
        weights = (1, 1, 3)
        assert found.tolist() == pytest.approx([w * sigmoid(-v) for w, v in zip(weights, z, strict=True)], abs=1e-5)
    # log sigmoid(2) = -ln(1 + e^-2); -log sigmoid(-2) = ln(1 + e^2)
    averse = kto_loss(error, reference, desirable, beta=10.0, utility="loss_averse", desirable_weight=0.5)
    assert averse[0].item() == pytest.approx(0.5 * (1 + math.log(1 + math.exp(-2))), abs=1e-5)
    seeking = kto_loss(error, reference, desirable, beta=10.0, utility="risk_seeking")
    assert seeking[2].item() == pytest.approx(1 - math.log(1 + math.exp(2)), abs=1e-5)


def test_kto_s_baseline_is_not_negative_has_no_gradient_and_bears_a_missing_class():
    error = torch.tensor([1.2, 1.4], requires_grad=True)
    reference, desirable = torch.ones(2), torch.tensor([True, True])
    loss = kto_loss(error, reference, desirable, beta=1.0)
    assert loss.tolist() == pytest.approx([sigmoid(0.2), sigmoid(0.4)])  # the mean gain, -0.3, counts as 0
    (gradient,) = torch.autograd.grad(loss[0], error)
    assert gradient.tolist() == pytest.approx([sigmoid(0.2) * sigmoid(-0.2), 0.0])
    better = torch.tensor([0.5, 0.9], requires_grad=True)  # gains 0.5 and 0.1, baseline 0.3: z = 0.2 and -0.2
    (gradient,) = torch.autograd.grad(kto_loss(better, reference, desirable, beta=1.0)[0], better)
    assert gradient.tolist() == pytest.approx([sigmoid(0.2) * sigmoid(-0.2), 0.0])
    # no undesirable sample: the baseline is (-0.3 + 0) / 2
    loss = kto_loss(error, reference, desirable, beta=1.0, baseline="signs")
    assert loss.tolist() == pytest.approx([sigmoid(0.05), sigmoid(0.25)])


def test_dspo_pulls_the_winner_past_its_target():
    """One element: residual 2, difference 0.5, u = 0, beta 2: (2 - 2 * 0.5 * 0.5)^2 = 2.25."""
    output = torch.tensor([[2.0]], requires_grad=True)
    logit = (output[:, 0] - 2.0) * 7
    loss = dspo_loss(output, output - 1.5, logit, beta=2.0)
    assert loss.item() == pytest.approx(2.25)
    # the pull's size is a constant, 1, so the output cancels: 2 * 1.5 * (1 - 1) = 0
    assert torch.autograd.grad(loss, output)[0].item() == pytest.approx(0.0, abs=1e-6)
    settled = dspo_loss(torch.full((1, 3), 2.0), torch.ones(1, 3), torch.tensor([100.0]), beta=2.0)
    assert settled.item() == pytest.approx(4.0)  # a pair that is ordered already: plain regression


def test_mapo_by_hand_and_near_zero():
    # s e = ln 2 and ln 3: phi = ln 2 / 1 and ln 3 / 2
    error_w, error_l = torch.tensor([2 * math.log(2)]), torch.tensor([2 * math.log(3)])
    margin = math.log(2) - math.log(3) / 2
    loss = mapo_loss(error_w, error_l, beta=0.1, steps=10)
    assert loss.item() == pytest.approx(2 * math.log(2) + 0.1 * math.log(1 + math.exp(-10 * margin)), rel=1e-5)
    assert mapo_loss(torch.zeros(1), torch.zeros(1), beta=1.0).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("e", [0.0, 1e-6, 1e-3, 0.19, 0.21, 4.0, 1000.0])
def test_mapo_s_slope_is_exact_at_every_size(e):
    """T = 2, beta = 1, equal errors: the gradient for the loser is phi'(e), phi from its closed form in float64."""
    loser = torch.tensor([e], requires_grad=True)
    (slope,) = torch.autograd.grad(mapo_loss(loser.detach(), loser, beta=1.0, steps=2), loser)
    y = 0.5 * e
    if y < 1e-2:
        exact = -1 / 2 + y / 6
    elif y > 100:
        exact = 0.0
    else:
        exact = (math.expm1(y) - y * math.exp(y)) / math.expm1(y) ** 2
    assert slope.item() == pytest.approx(0.5 * exact, abs=2e-6)


def test_spo_by_hand():
    """Log ratios 0.05 and -0.02 lie inside 1 +- 0.1: u = 10 * 0.07. Outside, the clip holds and ends the gradient."""
    loss = spo_loss(torch.tensor([0.05]), torch.tensor([-0.02]), beta=10.0)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.7)), abs=1e-5)
    log_ratio = torch.tensor([[0.5, -0.5], [-0.5, 0.5]], requires_grad=True)
    loss = spo_loss(log_ratio[0], log_ratio[1], beta=10.0)
    u = 10 * math.log(1.1 / 0.9)
    assert loss.tolist() == pytest.approx([math.log(1 + math.exp(-u)), math.log(1 + math.exp(u))], rel=1e-5)
    assert torch.autograd.grad(loss.sum(), log_ratio)[0].count_nonzero() == 0


def test_safeguard_by_hand():
    """|g_w|^2 = 4, mu = 0.9: products -2 and 0 set no limit, 4 sets 0.1 * 4 / 4, and 0.2 sets 2, which is cut to 1."""
    winner = torch.tensor([2.0, 0.0]).repeat(4, 1)
    loser = torch.tensor([[-1.0, 3.0], [2.0, 1.0], [0.1, 0.0], [0.0, 5.0]])
    assert safeguard(winner, loser, mu=0.9).tolist() == pytest.approx([1.0, 0.1, 1.0, 1.0])


def test_a_guarded_step_lowers_the_winner_s_error():
    """d e_w along -(g_w - factor g_l) is at most -mu |g_w|^2 wherever the two gradients agree."""
    winner, loser = torch.randn(2, 200, 3, 2, generator=torch.Generator().manual_seed(0))
    loser = 4 * loser
    factor = safeguard(winner, loser, mu=0.3)
    change = -(winner * (winner - factor[:, None, None] * loser)).sum((1, 2))
    assert (change <= -0.3 * winner.square().sum((1, 2)) + 1e-4).all()
    assert 0.1 < (factor < 1).float().mean() < 0.9


def test_scaled_gradients_leave_the_value():
    value = torch.tensor([[1.3, -2.7], [0.1, 1e-9], [7.0, 3.0]], requires_grad=True)
    found = scale_gradient(value, torch.tensor([0.0, 0.25, 1.0]))
    assert torch.equal(found, value)
    (gradient,) = torch.autograd.grad((found * 2).sum(), value)
    assert gradient.tolist() == [[0.0, 0.0], [0.5, 0.5], [2.0, 2.0]]


def test_nothing_broadcasts():
    a, b = torch.zeros(3), torch.zeros(3, 1)
    for call in (
        lambda: dpo_logit(a, b, a, a, beta=1.0),
        lambda: kto_loss(a, b, a > 0, beta=1.0),
        lambda: dspo_loss(a, b, a, beta=1.0),
        lambda: mapo_loss(a, b, beta=1.0),
        lambda: spo_loss(a, b, beta=1.0),
        lambda: safeguard(a[:, None].expand(3, 2), b, mu=0.9),
    ):
        with pytest.raises(ValueError, match="shapes differ"):
            call()
    with pytest.raises(ValueError, match="unknown utility"):
        kto_loss(a, a, a > 0, beta=1.0, utility="brave")
    with pytest.raises(ValueError, match="unknown baseline"):
        kto_loss(a, a, a > 0, beta=1.0, baseline="none")
