"""One training run from start to end: evaluation before and after, the loop, records, pictures, export."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
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
from flowrl.config import Config, load_config
from flowrl.core.evaluation import Evaluation, load_evaluation, save_evaluation
from flowrl.core.fingerprint import of_data
from flowrl.core.interrupt import Interruption
from flowrl.core.manifest import list_checkpoints, made_of
from flowrl.core.policy import Method
from flowrl.core.prompts import PromptSet
from flowrl.core.scoring import Scorer
from flowrl.core.tracking import MetricsFile, TensorBoard, read_metrics
from flowrl.core.trainer import Trainer, check_groups
from flowrl.errors import CheckpointError, ConfigError
from flowrl.flow.policy import FlowPolicy, to_pil
from flowrl.folder import check_new, clear, clear_partial, owned
from flowrl.last_page import CHANGES, LastPage, means
from flowrl.preflight import check_files
from flowrl.report.figures import image_grid, save_atomically
from flowrl.report.progress import RunProgress
from flowrl.report.summary import comparison_rows
from flowrl.resume import Change, resumed_config
from flowrl.rewards.base import build_rewards
from flowrl.yaml_text import dump

logger = logging.getLogger("flowrl")
_BEFORE = "before.pt"
_NUM_GRID_IMAGES = 24


def train(source: Any = None, overrides: Sequence[str] = (), *, resume: str | Path | None = None) -> Path:
    """Runs a config from start to end, or goes on with a run; returns the folder.

    Args:
        source: as for `load_config`.
        resume: folder of a run that was stopped; its own config is used, with `overrides` as far as they leave the
            training what it is.

    Raises:
        ConfigError: the config cannot be run, or there is nothing to resume.
        Interrupted: SIGINT or SIGTERM asked to stop; what was done is saved.
    """
    found: list[Change] | None = None
    if resume is not None:
        config, found = resumed_config(resume, overrides)
    else:
        config = source if isinstance(source, Config) else load_config(source, overrides)
    check_files(config, resume=resume is not None)
    accelerator = build_accelerator(config)
    folder = Path(config.output_dir)
    with owned(folder) if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process:
            if resume is None:
                check_new(folder)  # once more, now that nobody else can write there
                clear(folder)
            clear_partial(folder)
        run = _build(config, accelerator, resuming=resume is not None)
        with run.interruption:
            return run.go(found)


def _build(config: Config, accelerator: Accelerator, *, resuming: bool) -> _Run:
    """All parts of a run; what cannot be built is told before anything is written."""
    started, folder = time.monotonic(), Path(config.output_dir)
    train_prompts, data = training_data(config)
    prompts = eval_prompts(config)
    scorer = Scorer(build_rewards(config.rewards))
    judges = Scorer(judging_rewards(config, scorer.rewards))
    method, settings = cast(Method, config.method), trainer_settings(config)
    check_groups(settings, method, scorer, accelerator.num_processes)
    judged = _judged(config, prompts, judges)
    before = load_evaluation(folder / _BEFORE, judged) if resuming else ""
    policy = build_policy(config, train_prompts, accelerator.device, start=isinstance(before, str))
    policy.data = data
    made_of = {
        "config": config.model_dump(mode="json"),
        "inputs": {
            "model": policy.base_fingerprint,
            "prompts": of_data([train_prompts.prompts, train_prompts.columns]),
        },
    }
    trainer = Trainer(
        settings,
        policy,
        method,
        scorer,
        train_prompts,
        accelerator,
        folder,
        controller=build_controller(config),
        made_of=made_of,
    )
    return _Run(config, policy, trainer, prompts, judges, judged, before, accelerator, started)


def _judged(config: Config, prompts: PromptSet, judges: Scorer) -> dict[str, Any]:
    """What an evaluation of the start depends on, besides the model itself."""
    e, m = config.eval, config.model
    params = {reward.name: reward.params for reward in config.eval_rewards}
    return {
        "seed": config.seed,
        "prompts of data.eval": of_data([prompts.prompts, prompts.columns]),
        "rewards": of_data([(name, params[name]) for name in judges.names]),
        "eval.num_inference_steps": e.num_inference_steps,
        "eval.guidance_scale": e.guidance_scale,
        "model": of_data(m.model_dump(exclude={"lora", "path"})),
    }


class _Run:
    """What happens around the trainer's loop: evaluation before and after, records, pictures, export.

    Args:
        judges: rewards of evaluations. judged: what the evaluation before training depends on.
        before: that evaluation, or why it has to be made.
    """

    def __init__(
        self,
        config: Config,
        policy: FlowPolicy,
        trainer: Trainer,
        prompts: PromptSet,
        judges: Scorer,
        judged: dict[str, Any],
        before: Evaluation | str,
        accelerator: Accelerator,
        started: float,
    ):
        self.config, self.policy, self.trainer, self.accelerator = config, policy, trainer, accelerator
        self.folder, self.main = trainer.folder, accelerator.is_main_process
        self.prompts, self.judges, self.judged, self.before = prompts, judges, judged, before
        self.interruption = Interruption()
        self.metrics: MetricsFile | None = None
        self.timing: MetricsFile | None = None
        self.board: TensorBoard | None = None
        self.ready = False  # there is something to save
        self.page = LastPage(config, policy, trainer, prompts, started)
        trainer.check, trainer.between = self._check, self._between

    def go(self, found: list[Change] | None) -> Path:
        """Runs from the newest checkpoint, with the changes `found`, or if None from the start; returns the folder."""
        try:
            before = self._start() if found is None else self._go_on(found)
            self._say_what_is_done()
            with RunProgress(self.config.iterations, done=self.trainer.iteration) as progress:
                self.trainer.on_iteration = lambda *args: self._after_iteration(progress, *args)
                self.trainer.run()
            after = self._evaluate()
            if self.main:
                self.page.write(before, after)
        except BaseException as error:
            if self.ready or not isinstance(error, ConfigError):
                self._leave()
            raise
        self.accelerator.wait_for_everyone()
        return self.folder

    def _start(self) -> Evaluation:
        """A new run: the config is written, and the model judged as it is."""
        self._write_config()
        self._open_records([])
        self.say(f"evaluating {self.config.model.path} on {len(self.prompts)} held-out prompts")
        before = self._judge_start()
        self.ready = True
        self.trainer.save()
        return before

    def _go_on(self, found: list[Change]) -> Evaluation:
        """A run that was stopped: back to its newest checkpoint, and what it left undone there."""
        trainer, folder = self.trainer, self.folder
        self._check_inputs(list_checkpoints(folder / "checkpoints")[-1])
        before, again = self.before, isinstance(self.before, str)
        if isinstance(before, str):
            self.say(f"the evaluation before training is made again: {before}")
            before = self._judge_start()
        path = trainer.resume()
        self.ready = True
        self.say(f"resuming {folder} after iteration {trainer.iteration} ({path})")
        kept = [record for record in read_metrics(folder / "metrics.jsonl") if self._known(record)]
        if again:  # evaluations of other prompts or settings do not belong beside it
            start = self._evaluation_record(before) | {"iteration": 0}
            kept = [start, *(record for record in kept if "eval_n" not in record)]
        self._open_records(kept)
        self._write_config()
        self._tell_changes(found)
        if trainer.iteration:
            self._between()
        return before

    def _check_inputs(self, checkpoint: Path) -> None:
        """What the run has read must be what its checkpoint was made of.

        Raises:
            ConfigError: something is not; says what.
        """
        old, new = made_of(checkpoint)["inputs"], self.trainer.made_of["inputs"]
        names = {"model": f"model.path={self.config.model.path!r}", "prompts": "the training prompts"}
        for name, text in names.items():
            if old[name] != new[name]:
                raise ConfigError(
                    f"{text}: not what {str(self.folder)!r} was trained on until {checkpoint.name}, its contents "
                    "changed; put them back, or start a new run with another output_dir"
                )

    def _write_config(self) -> None:
        if self.main:
            text = dump(self.config.model_dump(mode="json"))
            (self.folder / "config.yaml").write_text(text, encoding="utf-8", newline="\n")
        self.accelerator.wait_for_everyone()

    def _tell_changes(self, found: list[Change]) -> None:
        """Says and records under which new settings the run goes on."""
        file = MetricsFile(self.folder / CHANGES)
        for key, old, new in found:
            schedule = self.config.optimizer.schedule
            moved = f"; the {schedule} schedule of the learning rate now ends there" if key == "iterations" else ""
            self.say(f"{key}: {old!r} until now, {new!r} from here on" + (moved if schedule != "constant" else ""))
            if self.main:
                file.write(self.trainer.iteration, {"key": key, "from": old, "to": new})

    def _open_records(self, kept: list[dict[str, Any]]) -> None:
        if not self.main:
            return
        self.metrics = MetricsFile(self.folder / "metrics.jsonl", records=kept)
        times = [r for r in read_metrics(self.folder / "timing.jsonl") if r["iteration"] <= self.trainer.iteration]
        self.timing = MetricsFile(self.folder / "timing.jsonl", records=times)
        self.board = TensorBoard(self.folder / "tensorboard") if self.config.log.tensorboard else None

    def _known(self, record: dict[str, Any]) -> bool:
        """Whether a record is older than the checkpoint that is resumed from; the last evaluation is younger."""
        last_evaluation = record["iteration"] == self.config.iterations and "eval_n" in record
        return record["iteration"] <= self.trainer.iteration and not last_evaluation

    def _check(self, together: bool = False) -> None:
        """Stops if a signal asked for it; several processes do so at the start of an iteration only."""
        if self.accelerator.num_processes > 1:
            if not together:
                return
            own = torch.tensor([self.interruption.asked or 0], device=self.accelerator.device)
            self.interruption.asked = int(self.accelerator.gather(own).max()) or None
        self.interruption.check()

    def _leave(self) -> None:
        """Saves what was done, unless that is in the middle of an update, and says how to go on."""
        if not self.main:
            return
        if self.ready and not self.trainer.dirty:
            try:
                self.trainer.save()
            except CheckpointError as error:
                logger.warning("%s", error)
        done = list_checkpoints(self.folder / "checkpoints")
        if done:
            text = f"stopped; iteration {int(done[-1].name)} of {self.config.iterations} is saved: go on with"
            print(f"{text} `flowrl train --resume {self.folder}`", file=sys.stderr)
        else:
            print("stopped before there was anything to save: the same command starts again", file=sys.stderr)

    def say(self, text: str) -> None:
        if self.main:
            print(text, flush=True)

    def _evaluate(self) -> Evaluation:
        with self.trainer.evaluation_weights() as weights:
            result = evaluate_policy(
                self.policy,
                self.config,
                self.prompts,
                self.judges,
                self.accelerator,
                weights=weights,
                check=self._check,
            )
        if self.metrics:
            self.metrics.write(self.trainer.iteration, self._evaluation_record(result))
        return result

    def _evaluation_record(self, result: Evaluation) -> dict[str, Any]:
        record: dict[str, Any] = {f"eval/{name}": value for name, value in result.means().items()}
        record |= {"eval/diversity/pixel_distance": result.diversity}
        return record | {"eval_weights": result.weights, "eval_n": len(self.prompts)}

    def _grid(self) -> None:
        """A picture of the first eval prompts, with the same noise each time."""
        if not self.main:
            return
        rows = range(min(_NUM_GRID_IMAGES, len(self.prompts)))
        with self.trainer.evaluation_weights():
            images = sample_rows(self.policy, self.config, self.prompts, self.accelerator, rows)
        page = image_grid(to_pil(images), self.prompts.prompts[: len(rows)])
        save_atomically(page, self.folder / "samples" / f"{self.trainer.iteration:06d}.png")

    def _judge_start(self) -> Evaluation:
        """The evaluation before training; kept in the folder, so that a resumed run has it."""
        self._grid()
        result = self._evaluate()
        self.say("before: " + means(result))
        comparison_rows(self.prompts, result, result)  # what the last page needs, tried before anything is trained
        if self.main:
            save_evaluation(self.folder / _BEFORE, result, self.judged)
        return result

    def _after_iteration(
        self, progress: RunProgress, iteration: int, metrics: dict[str, float], seconds: dict[str, float]
    ) -> None:
        if self.metrics and self.timing:
            self.metrics.write(iteration, metrics)
            self.timing.write(iteration, {f"seconds/{name}": value for name, value in seconds.items()})
            progress.update(iteration, metrics)
        if self.board:
            self.board.write(iteration, metrics)

    def _between(self) -> None:
        """Pictures and evaluations that are due; a run that was stopped meanwhile makes up for them."""
        log, every, done = self.config.log, self.config.eval.every, self.trainer.iteration
        last = done == self.config.iterations
        if log.grid_every and (done % log.grid_every == 0 or last):
            self._grid()
            if self.main:
                self.page.curves()
        if every and done % every == 0 and not last and done not in self._evaluated():
            self._evaluate()

    def _evaluated(self) -> set[int]:
        return {record["iteration"] for record in read_metrics(self.folder / "metrics.jsonl") if "eval_n" in record}

    def _say_what_is_done(self) -> None:
        c = self.config
        updates = c.optimizer.updates_per_rollout * c.optimizer.epochs_per_rollout
        self.say(
            f"{c.method.name}: {c.iterations} iterations of {c.rollout.num_prompts} prompts x {c.rollout.group_size} "
            f"samples, {c.rollout.num_inference_steps} sampling steps, {updates} optimizer step(s) on each rollout"
            + ("; the ratio is then 1 by construction" if updates == 1 else "")
        )
