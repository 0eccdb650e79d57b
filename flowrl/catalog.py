"""What can be named in a config, and where it lives. Import strings only: naming a thing imports nothing."""

from __future__ import annotations

import os
import re
import sys
from importlib.resources import files
from pathlib import Path

from .errors import ConfigError
from .registry import Registry, import_string, suggest

METHODS = Registry(
    "method",
    {
        "flow_grpo": "flowrl.flow.methods.flow_grpo:FlowGRPO",
        "flow_grpo_fast": "flowrl.flow.methods.flow_grpo_fast:FlowGRPOFast",
        "grpo_guard": "flowrl.flow.methods.grpo_guard:GRPOGuard",
        "flow_dppo": "flowrl.flow.methods.flow_dppo:FlowDPPO",
        "dance_grpo": "flowrl.flow.methods.dance_grpo:DanceGRPO",
        "mix_grpo": "flowrl.flow.methods.mix_grpo:MixGRPO",
        "dense_grpo": "flowrl.flow.methods.dense_grpo:DenseGRPO",
        "turning_point_grpo": "flowrl.flow.methods.turning_point_grpo:TurningPointGRPO",
        "granular_grpo": "flowrl.flow.methods.granular_grpo:GranularGRPO",
        "entropy_grpo": "flowrl.flow.methods.entropy_grpo:EntropyGRPO",
        "smart_grpo": "flowrl.flow.methods.smart_grpo:SmartGRPO",
        "pref_grpo": "flowrl.flow.methods.pref_grpo:PrefGRPO",
        "branch_grpo": "flowrl.flow.methods.branch_grpo:BranchGRPO",
        "ram": "flowrl.flow.methods.ram:RAM",
        "diffusion_nft": "flowrl.flow.methods.diffusion_nft:DiffusionNFT",
        "awm": "flowrl.flow.methods.awm:AWM",
        "dgpo": "flowrl.flow.methods.dgpo:DGPO",
        "rft": "flowrl.flow.methods.rft:RFT",
        "sft": "flowrl.flow.methods.sft:SFT",
        "diffusion_dpo": "flowrl.flow.methods.diffusion_dpo:DiffusionDPO",
        "apo": "flowrl.flow.methods.apo:APO",
        "diffusion_kto": "flowrl.flow.methods.diffusion_kto:DiffusionKTO",
        "dspo": "flowrl.flow.methods.dspo:DSPO",
        "mapo": "flowrl.flow.methods.mapo:MaPO",
        "inpo": "flowrl.flow.methods.inpo:InPO",
        "spo": "flowrl.flow.methods.spo:SPO",
    },
)

PIPELINES = Registry("pipeline", {"sd3": "flowrl.pipelines.sd3:SD3Adapter"})

PIPELINE_CLASSES = {"sd3": ("StableDiffusion3Pipeline",)}
"""Stock pipelines that an adapter loads, by the name that `model_index.json` has for them."""

REWARDS = Registry(
    "reward",
    {
        "shapes_strict": "flowrl.rewards.shapes:ShapesStrict",
        "shapes_partial": "flowrl.rewards.shapes:ShapesPartial",
        "preferred": "flowrl.rewards.preferred:Preferred",
    },
)


def method_row(name: str) -> dict[str, str]:
    """What there is to say of a method in one row of a table."""
    method = METHODS.load(name)
    doc = (method.__doc__ or "").strip().splitlines()[0]
    config = f"{name}_shapes"
    shipped = Path(str(files("flowrl.configs"))) / f"{config}.yaml"
    return {
        "method": name,
        "paper": getattr(method, "paper", ""),
        "what it changes": doc.partition(": ")[2].removesuffix(".") or doc,
        "parts": method.parts() if hasattr(method, "parts") else "",
        "NFE": getattr(method, "nfe", ""),
        "config": config if shipped.is_file() else "",
    }


def method_notes(name: str) -> str:
    """What the file of a method says at its top: defaults, deviations from paper and code, cost."""
    return (sys.modules[METHODS.load(name).__module__].__doc__ or "").strip()


def method_deviations(name: str) -> str:
    """The deviations among the notes of a method, as one line."""
    lines = " ".join(method_notes(name).split())
    found = re.search(r"Deviations?[^:]*: (.*?)(?: NFE per sample|$)", lines)
    return found[1] if found else ""


def reward_problem(name: str) -> list[str]:
    """Why a config cannot name this reward; empty if it can."""
    if ":" in name:
        try:
            target = import_string(name)
        except (Exception, SystemExit) as error:  # whatever the user's module does
            return [f"reward {name!r} cannot be loaded: {type(error).__name__}: {error}"]
        return [] if callable(target) else [f"reward {name!r} is a {type(target).__name__}, not a function or class"]
    if name in REWARDS:
        return []
    return [f"unknown reward {name!r}; {suggest(name, list(REWARDS))}; your own is named 'package.module:attribute'"]


def find_config(name: str) -> Path:
    """Path of a config file, or of a config that comes with flowrl.

    Raises:
        ConfigError: there is none.
    """
    own = Path(str(files("flowrl.configs")))
    for path in (Path(name), own / f"{name}.yaml", own / name):
        if os.path.isfile(path):  # False for what cannot be a file name
            return path
    raise ConfigError(f"no config {name!r}: not a file; {suggest(name, [path.stem for path in own.glob('*.yaml')])}")


def find_prompts(name: str) -> Path:
    """Path of a prompt file, or of one that comes with flowrl.

    Raises:
        ConfigError: there is none.
    """
    own = Path(str(files("flowrl.assets")))
    for path in (Path(name), own / name):
        if os.path.isfile(path):  # False for what cannot be a file name
            return path
    raise ConfigError(f"no prompt file {name!r}; {suggest(name, [f'prompts/{p.name}' for p in own.glob('prompts/*')])}")


def find_model(name: str) -> str:
    """A pipeline folder, the folder of a model that comes with flowrl, or else `name` itself (a hub id).

    Raises:
        ConfigError: `name` looks like a folder, and there is none.
    """
    own = Path(str(files("flowrl.assets")))
    for path in (Path(name), own / name):
        if os.path.isfile(path / "model_index.json"):
            return str(path)
    if os.path.isdir(name):
        raise ConfigError(f"{name!r} is not a pipeline folder (no model_index.json in it)")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        known = [path.parent.name for path in own.glob("*/model_index.json")]
        raise ConfigError(f"no model {name!r}: neither a folder nor a hub id; {suggest(name, known)}")
    return name
