"""What can be named in a config, and where it lives. Import strings only: naming a thing imports nothing."""

from __future__ import annotations

from .registry import Registry

METHODS = Registry(
    "method",
    {
        "flow_grpo": "flowrl.flow.methods.flow_grpo:FlowGRPO",
        "flow_grpo_fast": "flowrl.flow.methods.flow_grpo_fast:FlowGRPOFast",
    },
)

PIPELINES = Registry("pipeline", {"sd3": "flowrl.pipelines.sd3:SD3Adapter"})

REWARDS = Registry(
    "reward",
    {
        "shapes_strict": "flowrl.rewards.shapes:ShapesStrict",
        "shapes_partial": "flowrl.rewards.shapes:ShapesPartial",
    },
)
