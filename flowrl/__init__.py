"""flowrl aligns diffusion and flow-matching models, and language models, with rewards."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__distribution__ = "flowrl-align"
"""Name in the package index, where `flowrl` is another project's."""

# A wheel carries rewards/, pipelines/, configs/ and assets/ inside this package; a source checkout has them beside it.
_here = Path(__file__).resolve().parent
if not (_here / "rewards").is_dir():
    __path__.append(str(_here.parent))

_PUBLIC = {
    "Config": "flowrl.config",
    "load_config": "flowrl.config",
    "Trainer": "flowrl.core.trainer",
    "train": "flowrl.run",
    "evaluate": "flowrl.build",
    "load_policy": "flowrl.build",
    "check_reward": "flowrl.core.scoring",
    "check_pipeline": "flowrl.pipelines.base",
}
__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from flowrl.build import evaluate, load_policy
    from flowrl.config import Config, load_config
    from flowrl.core.scoring import check_reward
    from flowrl.core.trainer import Trainer
    from flowrl.pipelines.base import check_pipeline
    from flowrl.run import train


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flowrl' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
