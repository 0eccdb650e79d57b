"""The engine's environment variables: what a config decides, they do not."""

from __future__ import annotations

import logging
import os
import re

_NO = "0|n|no|f|false|off"


def overrule(*, use_cpu: bool, precision: str) -> None:
    """Removes accelerate's variables that ask for something else than the config, and names them in one warning.

    They would win over arguments (the device), or fill in for arguments that are not given (the rest). How a run is
    launched (processes, FSDP, DeepSpeed) is not the config's; those variables stay.
    """
    wanted = {
        "ACCELERATE_USE_CPU": f"1|y|yes|t|true|on|{_NO}" if use_cpu else _NO,
        "ACCELERATE_TORCH_DEVICE": "cpu(:.*)?" if use_cpu else "(?!cpu).*",
        "ACCELERATE_MIXED_PRECISION": precision,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_DYNAMO_BACKEND": "no",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": _NO,
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": _NO,
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": _NO,
    }
    asked = {name: os.environ[name] for name in wanted if name in os.environ}
    others = [name for name, value in asked.items() if not re.fullmatch(wanted[name], value, flags=re.IGNORECASE)]
    for name in others:
        del os.environ[name]
    if others:
        logging.getLogger("flowrl").warning(
            "%s: ignored, the config decides (device, model.dtype, optimizer)",
            ", ".join(f"{name}={asked[name]}" for name in others),
        )
