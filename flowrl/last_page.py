"""The last page of a run: curves, export, summary. A fault in one part of it costs that part only."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from flowrl.config import Config
from flowrl.core.evaluation import Evaluation
from flowrl.core.prompts import PromptSet
from flowrl.core.tracking import finite, read_metrics
from flowrl.core.trainer import Trainer
from flowrl.errors import FlowrlError
from flowrl.flow.export import export_policy
from flowrl.flow.policy import FlowPolicy
from flowrl.report.figures import curves
from flowrl.report.summary import comparison_rows, write_summary

logger = logging.getLogger("flowrl")
CHANGES = "changes.jsonl"
"""File of the settings that a resumed run changed."""
_COUNTS = ("nfe/rollout", "nfe/completion", "nfe/search", "nfe/train", "reward_calls")


class LastPage:
    """What a run leaves when it is over, made on the main process.

    Args:
        started: reading of `time.monotonic` at the start of the process.
    """

    def __init__(self, config: Config, policy: FlowPolicy, trainer: Trainer, prompts: PromptSet, started: float):
        self.config, self.policy, self.trainer, self.prompts = config, policy, trainer, prompts
        self.folder, self.accelerator, self.started = trainer.folder, trainer.accelerator, started
        self.title = f"{config.method.name} on {config.model.path}, seed {config.seed}"
        self.failed: list[str] = []

    def curves(self) -> None:
        """Draws `curves.png` from the records so far."""
        curves(read_metrics(self.folder / "metrics.jsonl"), self.folder / "curves.png", title=self.title)

    def write(self, before: Evaluation, after: Evaluation) -> None:
        """Writes and prints all of it.

        Raises:
            FlowrlError: parts could not be made; the others were.
        """
        records = comparison_rows(self.prompts, before, after)
        self._part("curves.png", self.curves)
        export = self._part("the export", self._export)
        self._part(
            "summary.json",
            lambda: (self.folder / "summary.json").write_text(
                json.dumps([finite(record) for record in records], indent=1), encoding="utf-8", newline="\n"
            ),
        )
        self._part(
            "summary.md",
            lambda: write_summary(
                self.folder / "summary.md",
                title=self.title,
                records=records,
                diversity=(before.diversity, after.diversity),
                facts=self._facts(after) | {"export": export or "failed"},
            ),
        )
        print("after:  " + means(after))
        for record in records:
            if record["subset"] == "all":
                change, error = record["difference"], record["standard_error"]
                print(f"{record['reward']}: {change:+.3f} (standard error of the paired difference {error:.3f})")
        print(f"see {self.folder / 'summary.md'}, {self.folder / 'curves.png'} and {self.folder / 'samples'}")
        if self.failed:
            raise FlowrlError("the training is done, but not everything could be written: " + "; ".join(self.failed))

    def _part(self, name: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:  # told by `write`
            logger.debug("%s", name, exc_info=True)
            self.failed.append(f"{name}: {type(error).__name__}: {error}")
            return None

    def _export(self) -> str:
        """Writes what stock diffusers loads, and proves it by loading it."""
        self.policy.model = self.accelerator.unwrap_model(self.policy.model, keep_fp32_wrapper=False)
        with self.trainer.evaluation_weights() as weights:
            error = export_policy(self.policy, self.config.model.path, self.folder / "export")
        return f"{weights} weights; reloaded into the stock pipeline, largest difference of its velocity {error:.1e}"

    def _facts(self, after: Evaluation) -> dict[str, str]:
        c, timing = self.config, read_metrics(self.folder / "timing.jsonl")
        phases = {name: sum(record.get(name, 0.0) for record in timing) for record in timing[:1] for name in record}
        phases.pop("iteration", None)
        records = read_metrics(self.folder / "metrics.jsonl")
        calls = {name: sum(record.get(name, 0) for record in records) for name in _COUNTS}
        trained = sum(parameter.numel() for parameter in self.trainer.updater.parameters.values())
        return {
            "command": f"flowrl train {self.folder / 'config.yaml'} output_dir=ANOTHER_FOLDER",
            "iterations": f"{c.iterations} of {c.rollout.num_prompts} prompts x {c.rollout.group_size} samples",
            **{
                f"{change['key']} since iteration {change['iteration']}": f"{change['to']}, before {change['from']}"
                for change in read_metrics(self.folder / CHANGES)
            },
            "trained": f"{trained:,} parameters, " + (f"LoRA rank {c.model.lora.rank}" if c.model.lora else "full"),
            "network evaluations": ", ".join(
                f"{name[4:]} {int(n):,}" for name, n in calls.items() if n and "/" in name
            ),
            "scored completions": f"{int(calls['reward_calls']):,}",
            "judged": f"{after.weights} weights, {c.eval.num_inference_steps} Euler steps, "
            f"guidance {c.eval.guidance_scale}",
            "seconds": f"{time.monotonic() - self.started:.0f} since the start of this process; "
            + ", ".join(f"{name.removeprefix('seconds/')} {value:.1f}" for name, value in phases.items()),
            "machine": f"{self.accelerator.num_processes} x {self.accelerator.device.type}, "
            f"{torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}, "
            f"diffusers {version('diffusers')}",
        }


def means(result: Evaluation) -> str:
    """Means of an evaluation in one line."""
    return ", ".join(f"{name} {value:.3f}" for name, value in result.means().items())
