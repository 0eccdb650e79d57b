import pytest
import torch

from flowrl.core.surrogates import clipped_surrogate


def test_hand_worked_losses_and_gradients():
    # ratios 1.5, 0.5, 1.5, 0.5 with clip 0.2:
    #   A = 1:  min(1.5, 1.2) = 1.2 (clipped), min(0.5, 0.8) = 0.5
    #   A = -1: min(-1.5, -1.2) = -1.5,        min(-0.5, -0.8) = -0.8 (clipped)
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    log_prob = ratio.log().requires_grad_()
    loss, metrics = clipped_surrogate(log_prob, torch.zeros(4), advantages, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.2, -0.5, 1.5, 0.8]))
    assert metrics["clipped"].tolist() == [True, False, False, True]
    loss.sum().backward()
    # d(-r A) / d log_prob = -r A where not clipped
    torch.testing.assert_close(log_prob.grad, torch.tensor([0.0, -0.5, 1.5, 0.0]))


def test_separate_bounds():
    log_prob = torch.tensor([1.4, 1.4]).log()
    loss, _ = clipped_surrogate(log_prob, torch.zeros(2), torch.ones(2), clip_low=0.1, clip_high=0.3)
    torch.testing.assert_close(loss, torch.full((2,), -1.3))


def test_on_policy_gradient_is_reinforce():
    log_prob = torch.randn(5, requires_grad=True)
    advantages = torch.randn(5)
    loss, metrics = clipped_surrogate(log_prob, log_prob.detach(), advantages, clip_low=1e-4, clip_high=1e-4)
    loss.sum().backward()
    torch.testing.assert_close(log_prob.grad, -advantages)
    assert (metrics["ratio"] == 1).all()
    assert not metrics["clipped"].any()


def test_nothing_broadcasts():
    with pytest.raises(ValueError, match="shapes differ"):
        clipped_surrogate(torch.zeros(2), torch.zeros(2), torch.zeros(1), clip_low=0.1, clip_high=0.1)
