"""DiffusionNFT (arXiv 2509.16117): a positive and a negative policy, both implied by the trained one, fit endpoints.

Defaults: the SD3.5-M setting (10 steps of a second-order solver, no guidance, groups of 24, LoRA 32/64, AdamW 3e-4,
reference weight 1e-4; beta 0.1 and 25 steps for several rewards; `decay: slow` for OCR). The paper gives no FLUX.1-dev
setting.
Deviations from the code: times are drawn from the grid with replacement, evenly spread; the solver is DPM-Solver++(2M)
throughout; arithmetic is float32; without the reference's term, samples of advantage 0 are left out.
NFE per sample, k draws: rollout T; update 3 k, or 2 k with beta_reference 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from .regression import GridTimes, RegressionMethod, Times
from .rewarded import Scale

if TYPE_CHECKING:
    import torch

    from flowrl.core.policy import Policy
    from flowrl.core.types import UnitBatch


class DiffusionNFT(RegressionMethod):
    """DiffusionNFT: the reward decides how much an endpoint counts for a positive and a negative implied policy."""

    paper: ClassVar[str] = "arXiv 2509.16117"
    nfe: ClassVar[str] = "T + 0 + 3k"
    lagged_copies: ClassVar[tuple[str, ...]] = ("old",)

    name: Literal["diffusion_nft"] = "diffusion_nft"
    solver: Literal["euler", "heun", "dpmpp_2m"] = "dpmpp_2m"
    sampler: Literal["trained", "old"] = "old"
    num_draws: int = Field(9, ge=1)
    times: Times = GridTimes()
    advantage_scale: Scale = "batch"
    beta: float = Field(1.0, gt=0)
    """How far the implied policies are from the old one."""
    advantage_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """Which advantages count: all; those above or below 0; all above 0 as 1; or their signs."""
    adaptive_weight: bool = True
    """Divide each error by its detached mean absolute value."""
    beta_reference: float = Field(1e-4, ge=0)
    """Weight of the square distance to the reference velocity."""
    decay: Literal["none", "fast", "slow"] = "fast"
    """Of the lagged copy after iteration n: 0; min(0.001 n, 0.5); or 0 up to 75, then min(0.0075 (n - 75), 0.999)."""

    @property
    def needs_reference(self) -> bool:
        """Only its own term asks for the reference."""
        return self.beta_reference > 0

    @property
    def skips_zero_advantages(self) -> bool:
        """They only hold on to the old policy; the reference's term needs all units."""
        return self.beta_reference == 0

    def shares(self, advantages: torch.Tensor) -> torch.Tensor:
        """r = clip(A / (2 clip) + 1/2, 0, 1) after the mode has been applied, `(B,)`."""
        import torch

        a = advantages.clamp(-self.advantage_clip, self.advantage_clip)
        if self.advantage_mode == "positive_only":
            a = a.clamp(min=0)
        elif self.advantage_mode == "negative_only":
            a = a.clamp(max=0)
        elif self.advantage_mode == "one_only":
            a = torch.where(a > 0, 1.0, 0.0)
        elif self.advantage_mode == "binary":
            a = a.sign()
        return (a / (2 * self.advantage_clip) + 0.5).clamp(0, 1)

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """clip times the loss of the implied policies, plus the pull to the reference, `(B,)`."""
        from flowrl.flow.matching import mean_square, nft_loss

        v = self.outputs(policy, batch.inputs, "old", *(["reference"] if self.needs_reference else []))
        u, device = batch.inputs, v["trained"].device
        fit = self.advantage_clip * nft_loss(
            v["trained"],
            v["old"],
            u.x.to(device),
            u.clean.to(device),
            u.sigma.to(device),
            self.shares(batch.advantages.to(device)),
            beta=self.beta,
            adaptive=self.adaptive_weight,
        )
        metrics = {"policy_loss": fit.detach()}
        if not self.needs_reference:
            return fit, metrics
        drift = mean_square(v["trained"] - v["reference"])
        return fit + self.beta_reference * drift, metrics | {"velocity_drift": drift.detach()}

    def finish(self, policy: Any, iteration: int) -> None:
        """The lagged copy follows."""
        n = iteration + 1
        decays = {"none": 0.0, "fast": min(0.001 * n, 0.5), "slow": min(max(0.0, 0.0075 * (n - 75)), 0.999)}
        policy.move_lagged("old", decays[self.decay])
