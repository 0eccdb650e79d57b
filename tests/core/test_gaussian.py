import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowrl.core.gaussian import gaussian_kl, gaussian_log_prob


def test_log_prob_and_kl_equal_torch_distributions():
    x, mean, other = torch.randn(3, 4, 2, 2, 2).unbind(0)
    std = torch.tensor([0.1, 0.5, 1.0, 3.0])
    scale = std.reshape(-1, 1, 1, 1)
    expected = Normal(mean, scale).log_prob(x)
    divergence = kl_divergence(Normal(mean, scale), Normal(other, scale))
    for reduction in ("mean", "sum"):
        reduce = getattr(torch, reduction)
        torch.testing.assert_close(
            gaussian_log_prob(x, mean, std, reduction=reduction), reduce(expected.flatten(1), dim=1)
        )
        torch.testing.assert_close(
            gaussian_kl(mean, other, std, reduction=reduction), reduce(divergence.flatten(1), dim=1)
        )


def test_low_precision_input_is_scored_in_float32():
    x = torch.randn(2, 8).bfloat16()
    assert gaussian_log_prob(x, x.float() + 0.1, torch.ones(2)).dtype == torch.float32


def test_nothing_broadcasts():
    with pytest.raises(ValueError, match="shapes differ"):
        gaussian_log_prob(torch.zeros(2, 3), torch.zeros(1, 3), torch.ones(2))
    with pytest.raises(ValueError, match="one value for each of 2 rows"):
        gaussian_kl(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(1))
    with pytest.raises(ValueError, match="unknown reduction"):
        gaussian_log_prob(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2), reduction="median")
