"""Builds the parts of a run from its config, and runs it. The only place that knows all rooms of the house."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from accelerate import Accelerator
from PIL import Image

from flowrl.catalog import PIPELINES, find_prompts
from flowrl.config import Config, RewardSection, check_files, load_config
from flowrl.core.checkpoint import list_checkpoints, load_checkpoint
from flowrl.core.evaluation import Evaluation
from flowrl.core.evaluation import evaluate as evaluate_prompts
from flowrl.core.policy import Method
from flowrl.core.prompts import PromptSet, read_prompts
from flowrl.core.random import torch_generator
from flowrl.core.scoring import Scorer
from flowrl.core.tracking import MetricsFile, TensorBoard, read_metrics
from flowrl.core.trainer import Settings, Trainer
from flowrl.errors import ConfigError
from flowrl.flow.policy import FlowPolicy, to_pil
from flowrl.report.figures import curves, image_grid, save_atomically
from flowrl.report.progress import RunProgress
from flowrl.report.summary import comparison_rows, write_summary
from flowrl.rewards.base import build_rewards

_NUM_GRID_IMAGES = 24
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _accelerator(config: Config) -> Accelerator:
    device = config.device
    use_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU here; use device=auto or device=cpu")
    if use_cpu and config.model.dtype == "float16":
        raise ConfigError("model.dtype=float16 needs a GPU; on a CPU use float32")
    precision = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[config.model.dtype]
    return Accelerator(mixed_precision=precision, cpu=use_cpu)


def build_policy(config: Config, prompts: PromptSet, device: torch.device | str = "cpu") -> FlowPolicy:
    """The policy of a config, with its trainable weights as they are before training."""
    model, method = config.model, config.method
    adapter = PIPELINES.load(model.family).load(
        model.path,
        dtype=_DTYPES[model.dtype],
        height=model.height,
        width=model.width,
        max_sequence_length=model.max_sequence_length,
    )
    policy = FlowPolicy(
        adapter,
        prompts.prompts,
        transition=getattr(method, "transition", "flow_sde"),
        num_inference_steps=config.rollout.num_inference_steps,
        guidance_scale=config.rollout.guidance_scale,
        storage_dtype=_DTYPES[config.rollout.storage_dtype],
        reduction=getattr(method, "log_prob_reduction", "mean"),
        device=device,
    )
    if model.lora:
        policy.add_lora(model.lora.rank, model.lora.alpha, model.lora.targets, seed=config.seed)
    else:
        policy.train_all(keep_reference=method.needs_reference)
    return policy


def load_policy(run: str | Path, *, weights: str = "auto") -> tuple[FlowPolicy, Config]:
    """The policy of a run's newest checkpoint, on the CPU.

    Args:
        weights: "raw", "ema", "base" (before training), or "auto": the average where the run keeps one.

    Raises:
        ConfigError: `run` is not the folder of a run.
        FileNotFoundError: it has no complete checkpoint.
    """
    config = load_run_config(run)
    policy = build_policy(config, PromptSet([""], {}))
    if weights != "base":
        checkpoints = list_checkpoints(Path(run) / "checkpoints")
        if not checkpoints:
            raise FileNotFoundError(f"{run} has no complete checkpoint yet")
        stored, _ = load_checkpoint(checkpoints[-1])
        name = {"auto": "ema" if "ema" in stored else "policy", "raw": "policy", "ema": "ema"}[weights]
        with torch.no_grad():
            for key, parameter in policy.trainable_parameters():
                parameter.copy_(stored[name][key])
    return policy, config


def load_run_config(run: str | Path) -> Config:
    """The resolved config in the folder of a run.

    Raises:
        ConfigError: there is none.
    """
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{str(run)!r} is not the folder of a run (no config.yaml in it)")
    return load_config(yaml.safe_load(path.read_text()))


def eval_prompts(config: Config) -> PromptSet:
    """The prompts that a config is judged on."""
    prompts = read_prompts(find_prompts(config.data.eval))
    return prompts.rows(list(range(min(len(prompts), config.eval.num_prompts or len(prompts)))))


def evaluate_policy(
    policy: FlowPolicy,
    config: Config,
    prompts: PromptSet,
    accelerator: Accelerator,
    *,
    weights: str,
    rewards: Sequence[RewardSection] | None = None,
) -> Evaluation:
    """Judges a policy: the stock sampler, the noise of each prompt fixed by (seed, row)."""

    def sample(rows: Sequence[int]) -> tuple[list[Image.Image], torch.Tensor]:
        noise = policy.noise([torch_generator(config.seed, "eval", row) for row in rows])
        with accelerator.autocast():
            images = policy.sample(
                [prompts.prompts[row] for row in rows],
                noise,
                num_inference_steps=config.eval.num_inference_steps,
                guidance_scale=config.eval.guidance_scale,
            )
        return to_pil(images), images

    scorer = Scorer(build_rewards(config.eval_rewards if rewards is None else rewards))
    return evaluate_prompts(sample, prompts, scorer, accelerator, batch_size=config.eval.batch_size, weights=weights)


def evaluate(run: str | Path, *, weights: str = "auto", **overrides: Any) -> tuple[PromptSet, Evaluation]:
    """Judges a finished run again. `overrides` replace fields of its `eval` section.

    Returns:
        the prompts and what was measured on them.
    """
    policy, config = load_policy(run, weights=weights)
    if overrides:
        config = load_config(config.model_dump() | {"eval": config.eval.model_dump() | overrides})
    prompts = eval_prompts(config)
    return prompts, evaluate_policy(policy, config, prompts, _accelerator(config), weights=weights)


@dataclass
class _Judge:
    """Evaluations, grids and records of one run."""

    config: Config
    policy: FlowPolicy
    prompts: PromptSet
    accelerator: Accelerator
    folder: Path
    metrics: MetricsFile | None

    def evaluate(self, trainer: Trainer) -> Evaluation:
        with trainer.evaluation_weights() as weights:
            result = evaluate_policy(self.policy, self.config, self.prompts, self.accelerator, weights=weights)
        if self.metrics:
            record = {f"eval/{name}": value for name, value in result.means().items()}
            record |= {"eval/diversity/pixel_distance": result.diversity}
            self.metrics.write(trainer.iteration, record | {"eval_weights": weights, "eval_n": len(self.prompts)})
        return result

    def grid(self, trainer: Trainer) -> None:
        """A picture of the first eval prompts, with the same noise each time."""
        if not self.accelerator.is_main_process:
            return
        rows = list(range(min(_NUM_GRID_IMAGES, len(self.prompts))))
        with trainer.evaluation_weights(), self.accelerator.autocast():
            noise = self.policy.noise([torch_generator(self.config.seed, "eval", row) for row in rows])
            captions = [self.prompts.prompts[row] for row in rows]
            images = self.policy.sample(
                captions,
                noise,
                num_inference_steps=self.config.eval.num_inference_steps,
                guidance_scale=self.config.eval.guidance_scale,
            )
        page = image_grid(to_pil(images), captions)
        save_atomically(page, self.folder / "samples" / f"{trainer.iteration:06d}.png")


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
    accelerator = _accelerator(config)
    torch.set_float32_matmul_precision("high")
    started = time.monotonic()
    train_prompts = read_prompts(find_prompts(config.data.train))
    judge_prompts = eval_prompts(config)
    scorer = Scorer(build_rewards(config.rewards))
    policy = build_policy(config, train_prompts, accelerator.device)

    folder = Path(config.output_dir)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    accelerator.wait_for_everyone()
    method = cast(Method, config.method)
    trainer = Trainer(trainer_settings(config), policy, method, scorer, train_prompts, accelerator, folder)
    return _Run(config, policy, trainer, judge_prompts, accelerator, folder, started).go(resume is not None)


def trainer_settings(config: Config) -> Settings:
    """The part of a config that the loop itself has to know."""
    o, r = config.optimizer, config.rollout
    return Settings(
        seed=config.seed,
        iterations=config.iterations,
        num_inference_steps=r.num_inference_steps,
        num_prompts=r.num_prompts,
        group_size=r.group_size,
        rollout_batch_size=r.batch_size,
        update_batch_size=o.batch_size,
        checkpoint_every=config.log.checkpoint_every,
        keep_checkpoints=config.log.keep_checkpoints,
        **o.model_dump(exclude={"batch_size"}),
    )


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
        trainer, folder = self.trainer, self.folder
        if resuming:
            trainer.resume()
            self.say(f"resuming {folder} after iteration {trainer.iteration}")
        keep = self._known_at_checkpoint if resuming else None
        self.metrics = MetricsFile(folder / "metrics.jsonl", keep=keep) if self.main else None
        self.timing = MetricsFile(folder / "timing.jsonl", keep=keep) if self.main else None
        self.board = TensorBoard(folder / "tensorboard") if self.main and self.config.log.tensorboard else None
        self.judge = _Judge(self.config, self.policy, self.prompts, self.accelerator, folder, self.metrics)
        before = self._before()
        with RunProgress(self.config.iterations, done=trainer.iteration) as progress:
            trainer.on_iteration = lambda *args: self._after_iteration(progress, *args)
            trainer.run()
        after = self.judge.evaluate(trainer)
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

    def _before(self) -> Evaluation:
        """The evaluation before training; kept in the folder, so that a resumed run has it."""
        path = self.folder / "before.pt"
        if path.exists():
            return Evaluation(completions=[], **torch.load(path, weights_only=True))
        self.say(f"evaluating {self.config.model.path} on {len(self.prompts)} held-out prompts")
        self.judge.grid(self.trainer)
        result = self.judge.evaluate(self.trainer)
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
            self.judge.grid(self.trainer)
            self._curves()
        if self.config.eval.every and iteration % self.config.eval.every == 0 and not last:
            self.judge.evaluate(self.trainer)

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
        (self.folder / "summary.json").write_text(json.dumps(records, indent=1))
        self.say("after:  " + _means(after))
        for record in records:
            if record["subset"] == "all":
                change, error = record["difference"], record["standard_error"]
                self.say(f"{record['reward']}: {change:+.3f} (standard error of the paired difference {error:.3f})")
        self.say(f"see {self.folder / 'summary.md'}, {self.folder / 'curves.png'} and {self.folder / 'samples'}")

    def _export(self) -> str:
        """Writes what stock diffusers loads, and proves it by loading it."""
        from flowrl.flow.export import export_policy

        with self.trainer.evaluation_weights() as weights:
            error = export_policy(self.policy, self.config.model.path, self.folder / "export")
        return f"{weights} weights; reloaded into the stock pipeline, largest difference of its velocity {error:.1e}"

    def _facts(self, after: Evaluation) -> dict[str, str]:
        c, timing = self.config, read_metrics(self.folder / "timing.jsonl")
        phases = {name: sum(record.get(name, 0.0) for record in timing) for record in timing[:1] for name in record}
        phases.pop("iteration", None)
        trained = sum(parameter.numel() for parameter in self.trainer.parameters.values())
        return {
            "command": f"flowrl train {self.folder / 'config.yaml'}",
            "iterations": f"{c.iterations} of {c.rollout.num_prompts} prompts x {c.rollout.group_size} samples",
            "trained": f"{trained:,} parameters, " + (f"LoRA rank {c.model.lora.rank}" if c.model.lora else "full"),
            "judged": f"{after.weights} weights, {c.eval.num_inference_steps} Euler steps, "
            f"guidance {c.eval.guidance_scale}",
            "seconds": f"{time.monotonic() - self.started:.0f} since the start of this process; "
            + ", ".join(f"{name.removeprefix('seconds/')} {value:.0f}" for name, value in phases.items()),
            "machine": f"{self.accelerator.num_processes} x {self.accelerator.device.type}, "
            f"{torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}, "
            f"diffusers {version('diffusers')}",
        }


def _means(result: Evaluation) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in result.means().items())
