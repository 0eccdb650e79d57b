"""One training run from start to end: evaluation before and after, the loop, records, pictures, export."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from accelerate import Accelerator

from flowrl.build import (
    build_accelerator,
    build_controller,
    build_policy,
    eval_prompts,
    evaluate_policy,
    judging_rewards,
    sample_rows,
    trainer_settings,
    training_data,
)
from flowrl.config import Config, check_files, load_config, load_run_config
from flowrl.core.checkpoint import list_checkpoints
from flowrl.core.evaluation import Evaluation
from flowrl.core.policy import Method
from flowrl.core.prompts import PromptSet
from flowrl.core.scoring import Scorer
from flowrl.core.tracking import MetricsFile, TensorBoard, finite, read_metrics
from flowrl.core.trainer import Trainer, check_groups
from flowrl.errors import ConfigError
from flowrl.flow.export import export_policy
from flowrl.flow.policy import FlowPolicy, to_pil
from flowrl.report.figures import curves, image_grid, save_atomically
from flowrl.report.progress import RunProgress
from flowrl.report.summary import comparison_rows, write_summary
from flowrl.rewards.base import build_rewards

_NUM_GRID_IMAGES = 24
_COUNTS = ("nfe/rollout", "nfe/completion", "nfe/search", "nfe/train", "reward_calls")


def train(source: Any = None, overrides: Sequence[str] = (), *, resume: str | Path | None = None) -> Path:
    """Runs a config from start to end, or goes on with a run; returns the folder.

    Args:
        source: as for `load_config`.
        resume: folder of a run that was stopped; its own config is used.

    Raises:
        ConfigError: the config cannot be run, or there is nothing to resume.
    """
    if resume is not None:
        config = load_run_config(resume)
        if not list_checkpoints(Path(resume) / "checkpoints"):
            raise ConfigError(f"{str(resume)!r} holds no complete checkpoint to resume from; start it anew")
        config = config.model_copy(update={"output_dir": str(resume)})
    else:
        config = source if isinstance(source, Config) else load_config(source, overrides)
    check_files(config, resume=resume is not None)
    accelerator = build_accelerator(config)
    started = time.monotonic()
    train_prompts, data = training_data(config)
    judge_prompts = eval_prompts(config)
    scorer = Scorer(build_rewards(config.rewards))
    judging_rewards(config)  # what cannot be built is told before there is a folder
    method, settings = cast(Method, config.method), trainer_settings(config)
    check_groups(settings, method, scorer, accelerator.num_processes)
    policy = build_policy(config, train_prompts, accelerator.device)
    policy.data = data

    folder = Path(config.output_dir)
    controller = build_controller(config)
    trainer = Trainer(settings, policy, method, scorer, train_prompts, accelerator, folder, controller=controller)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(
            yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8", newline="\n"
        )
    accelerator.wait_for_everyone()
    return _Run(config, policy, trainer, judge_prompts, accelerator, folder, started).go(resume is not None)


class _Run:
    """What happens around the trainer's loop: evaluation before and after, records, pictures, export."""

    def __init__(
        self,
        config: Config,
        policy: FlowPolicy,
        trainer: Trainer,
        prompts: PromptSet,
        accelerator: Accelerator,
        folder: Path,
        started: float,
    ):
        self.config, self.policy, self.trainer, self.accelerator = config, policy, trainer, accelerator
        self.folder, self.started, self.main = folder, started, accelerator.is_main_process
        self.prompts = prompts
        self.phases: dict[str, float] = {}

    def go(self, resuming: bool) -> Path:
        """Runs from the newest checkpoint, or from the start; returns the folder."""
        trainer, folder = self.trainer, self.folder
        if resuming:
            trainer.resume()
            self.say(f"resuming {folder} after iteration {trainer.iteration}")
        keep = self._known_at_checkpoint if resuming else None
        self.metrics = MetricsFile(folder / "metrics.jsonl", keep=keep) if self.main else None
        self.timing = MetricsFile(folder / "timing.jsonl", keep=keep) if self.main else None
        self.board = TensorBoard(folder / "tensorboard") if self.main and self.config.log.tensorboard else None
        before = self._before()
        self._say_what_is_done()
        with RunProgress(self.config.iterations, done=trainer.iteration) as progress:
            trainer.on_iteration = lambda *args: self._after_iteration(progress, *args)
            trainer.run()
        after = self._evaluate()
        if self.main:
            self._finish(before, after)
        self.accelerator.wait_for_everyone()
        return folder

    def _known_at_checkpoint(self, record: dict[str, Any]) -> bool:
        """Whether a record is older than the checkpoint that is resumed from; the last evaluation is younger."""
        last_evaluation = record["iteration"] == self.config.iterations and "eval_n" in record
        return record["iteration"] <= self.trainer.iteration and not last_evaluation

    def say(self, text: str) -> None:
        if self.main:
            print(text, flush=True)

    def _evaluate(self) -> Evaluation:
        with self.trainer.evaluation_weights() as weights:
            result = evaluate_policy(self.policy, self.config, self.prompts, self.accelerator, weights=weights)
        if self.metrics:
            record: dict[str, Any] = {f"eval/{name}": value for name, value in result.means().items()}
            record |= {"eval/diversity/pixel_distance": result.diversity}
            self.metrics.write(self.trainer.iteration, record | {"eval_weights": weights, "eval_n": len(self.prompts)})
        return result

    def _grid(self) -> None:
        """A picture of the first eval prompts, with the same noise each time."""
        if not self.main:
            return
        rows = range(min(_NUM_GRID_IMAGES, len(self.prompts)))
        with self.trainer.evaluation_weights():
            images = sample_rows(self.policy, self.config, self.prompts, self.accelerator, rows)
        page = image_grid(to_pil(images), self.prompts.prompts[: len(rows)])
        save_atomically(page, self.folder / "samples" / f"{self.trainer.iteration:06d}.png")

    def _before(self) -> Evaluation:
        """The evaluation before training; kept in the folder, so that a resumed run has it."""
        path = self.folder / "before.pt"
        if path.exists():
            return Evaluation(completions=[], **torch.load(path, weights_only=True))
        self.say(f"evaluating {self.config.model.path} on {len(self.prompts)} held-out prompts")
        self._grid()
        result = self._evaluate()
        self.say("before: " + _means(result))
        if self.main:
            kept = {name: getattr(result, name) for name in ("names", "table", "weights", "diversity")}
            torch.save(kept, path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)
        self.trainer.save()
        return result

    def _after_iteration(
        self, progress: RunProgress, iteration: int, metrics: dict[str, float], seconds: dict[str, float]
    ) -> None:
        log, last = self.config.log, iteration == self.config.iterations
        if self.metrics and self.timing:
            self.metrics.write(iteration, metrics)
            self.timing.write(iteration, {f"seconds/{name}": value for name, value in seconds.items()})
            progress.update(iteration, metrics)
        if self.board:
            self.board.write(iteration, metrics)
        if log.grid_every and (iteration % log.grid_every == 0 or last):
            self._grid()
            self._curves()
        if self.config.eval.every and iteration % self.config.eval.every == 0 and not last:
            self._evaluate()

    def _say_what_is_done(self) -> None:
        c = self.config
        updates = c.optimizer.updates_per_rollout * c.optimizer.epochs_per_rollout
        self.say(
            f"{c.method.name}: {c.iterations} iterations of {c.rollout.num_prompts} prompts x {c.rollout.group_size} "
            f"samples, {c.rollout.num_inference_steps} sampling steps, {updates} optimizer step(s) on each rollout"
            + ("; the ratio is then 1 by construction" if updates == 1 else "")
        )

    def _curves(self) -> None:
        if self.main:
            title = f"{self.config.method.name} on {self.config.model.path}, seed {self.config.seed}"
            curves(read_metrics(self.folder / "metrics.jsonl"), self.folder / "curves.png", title=title)

    def _finish(self, before: Evaluation, after: Evaluation) -> None:
        self._curves()
        export = self._export()
        records = comparison_rows(self.prompts, before, after)
        write_summary(
            self.folder / "summary.md",
            title=f"{self.config.method.name} on {self.config.model.path}, seed {self.config.seed}",
            records=records,
            diversity=(before.diversity, after.diversity),
            facts=self._facts(after) | {"export": export},
        )
        (self.folder / "summary.json").write_text(
            json.dumps([finite(record) for record in records], indent=1), encoding="utf-8", newline="\n"
        )
        self.say("after:  " + _means(after))
        for record in records:
            if record["subset"] == "all":
                change, error = record["difference"], record["standard_error"]
                self.say(f"{record['reward']}: {change:+.3f} (standard error of the paired difference {error:.3f})")
        self.say(f"see {self.folder / 'summary.md'}, {self.folder / 'curves.png'} and {self.folder / 'samples'}")

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


def _means(result: Evaluation) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in result.means().items())
