"""What the methods on the forward process share: endpoints, draws of (sigma, eps), lagged copies of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from flowrl.config import RolloutSection, Section

from .rewarded import RewardedMethod

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowrl.flow.endpoints import EndpointPlan, NoisedUnits


class UniformTimes(Section):
    """Uniform between two times."""

    kind: Literal["uniform"] = "uniform"
    low: float = Field(0.0, ge=0, le=1)
    """Earliest time, towards clean."""
    high: float = Field(1.0, ge=0, le=1)
    """Latest time, towards noise."""


class PowerTimes(Section):
    """Density proportional to a power of the time."""

    kind: Literal["power"] = "power"
    exponent: float = Field(1.0, gt=-1)
    """The power."""


class LogitNormalTimes(Section):
    """The sigmoid of a normal number (arXiv 2403.03206)."""

    kind: Literal["logit_normal"] = "logit_normal"
    mean: float = 0.0
    """Of the normal number."""
    std: float = Field(1.0, gt=0)
    """Of the normal number."""
    shift: float = Field(1.0, gt=0)
    """As of sigma grids; above 1 moves times towards noise."""


class GridTimes(Section):
    """The sampler's own grid, but for its last entries."""

    kind: Literal["grid"] = "grid"
    fraction: float = Field(0.99, gt=0, le=1)
    """Share of the grid, from noise on."""


Times = Annotated[UniformTimes | PowerTimes | LogitNormalTimes | GridTimes, Field(discriminator="kind")]


class RegressionMethod(RewardedMethod):
    """Regression on the forward process, from clean endpoints and their rewards."""

    lagged_copies: ClassVar[tuple[str, ...]] = ()
    """Copies of the weights that follow the trained ones."""
    data_images: ClassVar[int] = 2
    """Images of a row of a data set (`data.pairs`) that it learns from: winner and loser, or the winner only."""

    solver: Literal["euler", "heun", "dpmpp_2m"] = "euler"
    """Of the rollouts."""
    sampler: Literal["trained", "old"] = "trained"
    """Whose endpoints are used: the trained weights', or those of the lagged copy."""
    num_draws: int = Field(4, ge=1)
    """Times and noises drawn for each endpoint."""
    times: Times = UniformTimes()
    """Distribution of the times."""
    stratified: bool = True
    """The times of an endpoint are spread evenly over their distribution."""
    shared_noise: bool = False
    """The samples of a group get the same times and noises; as advantages sum to 0, much of the noise cancels."""

    def problems(self, rollout: RolloutSection) -> list[str]:
        """An old sampler where no copy is kept."""
        if self.sampler == "old" and "old" not in self.lagged_copies:
            return [f"method.sampler=old: method.name={self.name} keeps no lagged copy"]
        return []

    def plans(self, grid: torch.Tensor, *, iteration: int, rng: np.random.Generator) -> list[EndpointPlan]:
        """One plan of endpoints."""
        from flowrl.flow.endpoints import EndpointPlan

        return [
            EndpointPlan(
                self.num_draws,
                lambda u: self._times(u, grid),
                even=self.stratified,
                solver=self.solver,
                sampler="old" if self.sampler == "old" else None,
                shared=self.shared_noise,
            )
        ]

    def _times(self, u: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        from flowrl.flow import matching

        section = self.times
        if isinstance(section, UniformTimes):
            return matching.uniform_times(u, low=section.low, high=section.high)
        if isinstance(section, PowerTimes):
            return matching.power_times(u, exponent=section.exponent)
        if isinstance(section, LogitNormalTimes):
            return matching.logit_normal_times(u, mean=section.mean, std=section.std, shift=section.shift)
        count = max(1, int((len(grid) - 1) * section.fraction))
        return matching.grid_times(u, grid[:count].tolist())

    def outputs(self, policy: Any, u: NoisedUnits, *frozen: str) -> dict[str, torch.Tensor]:
        """The network's at the draws: "trained" with gradient; "reference" and lagged copies, as named, without."""
        import torch

        x, sigma = u.x.to(policy.device), u.sigma.to(policy.device)
        found = {}
        for name in frozen:
            with torch.no_grad(), policy.reference() if name == "reference" else policy.lagged(name):
                found[name] = policy.predict_at(x, sigma, u.cond)
        return found | {"trained": policy.predict_at(x, sigma, u.cond)}
