"""BranchGRPO (arXiv 2509.06040): a group is a tree of trajectories; edges are credited with the leaves below them.

Defaults: the FLUX.1-dev setting (20 steps, eta 0.3, splits at steps 0, 3, 6, 9, so 16 leaves; clip 1e-3, learning rate
1e-5). The paper gives no SD3.5-M setting.
Deviations from the code: a branch's noise has the std of its log-prob (the code samples with four times that);
advantages are normalised within a tree at each step, and each edge is trained once. Pruning is not built.
NFE per sample, with b(t) splits before step t and L leaves: rollout and update sum over t of 2^b(t) / L; the update
leaves out the last step, and counts the states after splits.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from flowrl.flow.steps import Steps, TreeSteps

from .stepwise import Credit, NoiseLevel, StepwiseMethod, TransitionName


class BranchGRPO(StepwiseMethod):
    """BranchGRPO: rollouts share prefixes in a binary tree; each edge gets the mean reward of its leaves."""

    paper: ClassVar[str] = "arXiv 2509.06040"
    nfe: ClassVar[str] = "sum_t 2^b(t)/L + 0 + sum_t<T 2^b(t)/L"

    name: Literal["branch_grpo"] = "branch_grpo"
    transition: TransitionName = "dance_sde"
    noise_level: NoiseLevel = 0.3
    steps: Steps = TreeSteps()
    credit: Credit = "tree"
    std_floor: float = Field(1e-8, ge=0)
    clip_range: float = Field(1e-3, gt=0)
