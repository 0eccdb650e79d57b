"""The config tree: small frozen models, strict at every level. Importing this imports no torch.

A field's default is its vetted setting; its docstring stands below it. `load_config` reads YAML and dotted overrides
and refuses what it does not know, with the nearest name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from .catalog import METHODS, PIPELINES, REWARDS, find_config, find_model, find_prompts
from .core.pairs import read_pairs
from .core.prompts import check_categories, read_prompts
from .errors import ConfigError
from .explain import explain
from .folder import check_new
from .overrides import apply_override
from .registry import import_string, suggest


class Section(BaseModel):
    """Base of all config sections."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class MethodConfig(Section):
    """Base of all methods: their fields and, as methods, their hooks (see `flowrl.core.policy.Method`)."""

    name: str

    @property
    def needs_reference(self) -> bool:
        """Whether the loss asks for the model as it was before training."""
        return False

    def problems(self, rollout: RolloutSection) -> list[str]:
        """Why this method cannot run on such rollouts; empty if it can."""
        return []


def _build_method(value: Any) -> Any:
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict) or "name" not in value:
        return value
    method = METHODS.load(str(value["name"]))
    try:
        return method.model_validate(value)
    except ValidationError as error:
        raise ValueError("\n".join(explain(item, method, prefix=("method",)) for item in error.errors())) from None


class LoraSection(Section):
    """A low-rank adapter (peft)."""

    rank: int = Field(32, ge=1)
    """Rank of each update."""
    alpha: int = Field(64, ge=1)
    """The update is scaled by alpha / rank."""
    targets: list[str] | None = None
    """Module name endings; default: the attention projections of the model family."""


class ModelSection(Section):
    """The model and what of it is trained."""

    path: str = "shapes-sd3"
    """A pipeline folder, a hub id, or a model that comes with flowrl."""
    family: str = "sd3"
    """Which pipeline adapter to use."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of frozen weights and of computation; trained weights are float32."""
    height: int | None = Field(None, ge=8)
    """Image height in pixels; default: the model's own."""
    width: int | None = Field(None, ge=8)
    """Image width in pixels; default: the model's own."""
    max_sequence_length: int = Field(256, ge=0)
    """Length of the T5 part of the prompt."""
    lora: LoraSection | None = None
    """Train a LoRA; null trains all weights of the denoiser."""
    start_from: str | None = None
    """Folder of a run of the same model and kind of weights, whose newest ones (their average, if it keeps one) are the
    start; the reference stays the model itself."""


class DataSection(Section):
    """Prompt files: one prompt a line (.txt), or rows with `prompt` and any further columns: JSON lines or one array
    (.jsonl, .ndjson, .json), a table with a header (.csv, .tsv), or parquet (.parquet, needs the extra `parquet`)."""

    train: str = "prompts/shapes_train.jsonl"
    """Prompts to learn on; a path, or a file that comes with flowrl."""
    eval: str = "prompts/shapes_eval.jsonl"
    """Prompts to judge by, before and after."""
    pairs: str | None = None
    """Learn from the images of a data set instead of from samples: a folder, file or pattern, see docs/pairs.md. Its
    prompts replace `train`, its images the rollout, its labels the rewards if none are named."""


class RewardSection(Section):
    """One reward column."""

    name: str
    """A registered reward (`flowrl rewards`), or `package.module:attribute` of your own."""
    weight: float = 1.0
    """Weight in the sum; 0 only monitors."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments for building it."""


def _reward_list(value: Any) -> Any:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        return [{"name": item} if isinstance(item, str) else item for item in value]
    if isinstance(value, dict) and "name" not in value:
        return [{"name": name, "weight": weight} for name, weight in value.items()]
    return value


Rewards = Annotated[list[RewardSection], BeforeValidator(_reward_list)]


class RolloutSection(Section):
    """How an iteration samples."""

    num_inference_steps: int = Field(10, ge=1)
    """Steps of the sampler during training."""
    guidance_scale: float = Field(1.0, ge=0)
    """Classifier-free guidance in rollout and update alike; 1 is none."""
    num_prompts: int = Field(8, ge=1)
    """Groups of an iteration."""
    group_size: int = Field(16, ge=1)
    """Samples of one prompt that are compared with each other."""
    share_initial_noise: bool | None = None
    """The samples of a group start from the same noise, and are one until the first stochastic step; default: as the
    method's paper does."""
    batch_size: int = Field(64, ge=1)
    """Samples in one forward pass of the rollout, on each rank."""
    storage_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of stored latents."""


class ScheduleSection(Section):
    """Moves the rewards' weights in the course of training; see `flowrl.core.controllers.SelfPaced`."""

    name: Literal["self_paced"] = "self_paced"
    """Self-paced: from easy rewards to hard ones as the model becomes competent (arXiv 2511.19356)."""
    order: list[str] = Field(min_length=2)
    """Rewards from easy to hard, with values in [0, 1]. Their weights are multiplied by factors that sum to 1; the
    other rewards keep theirs."""
    sharpness: float = Field(8.0, gt=0)
    """How suddenly a reward hands over."""
    threshold: float = 0.75
    """Competence, the running mean of a reward, at which half of its weight has gone."""
    decay: float = Field(0.9, ge=0, lt=1)
    """Of the running means, for each iteration."""
    floor: float = Field(0.05, ge=0)
    """No weight falls below this."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleSection:
        if len(set(self.order)) < len(self.order):
            raise ValueError(f"reward_schedule.order={self.order}: a reward is named twice")
        if self.floor * len(self.order) > 1:
            raise ValueError(f"reward_schedule.floor={self.floor:g}: {len(self.order)} weights sum to 1")
        return self


class OptimizerSection(Section):
    """AdamW and how often it steps."""

    learning_rate: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decays of AdamW's moments."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon; gradients of mean log-densities are small, a warning says when they fall below it."""
    weight_decay: float = Field(1e-4, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after warm-up; linear and cosine end at 0."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimizer steps taken on each rollout, each on an equal share of its samples."""
    epochs_per_rollout: int = Field(1, ge=1)
    """Passes over each rollout."""
    batch_size: int = Field(64, ge=1)
    """(sample, step) pairs in one forward and backward pass, on each rank."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the trained weights; evaluation and export then use it."""


class EvalSection(Section):
    """Evaluation: fixed prompts and noise, the deterministic sampler of the stock pipeline."""

    every: int = Field(0, ge=0)
    """Also evaluate every so many iterations; 0: only before and after."""
    num_prompts: int | None = Field(None, ge=1)
    """Rows of the eval file to use; default: all."""
    num_images: int = Field(1, ge=1)
    """Images of each row, from different noise."""
    num_inference_steps: int = Field(20, ge=1)
    """Steps of the sampler."""
    guidance_scale: float = Field(1.0, ge=0)
    """Classifier-free guidance; 1 is none."""
    batch_size: int = Field(96, ge=1)
    """Images in one forward pass, on each rank."""
    rewards: Rewards = []
    """Further rewards that are only evaluated."""


class LogSection(Section):
    """What a run writes while it goes."""

    grid_every: int = Field(10, ge=0)
    """Iterations between image grids of fixed eval prompts; 0: none."""
    checkpoint_every: int = Field(20, ge=0)
    """Iterations between checkpoints; 0: only at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older checkpoints are deleted."""
    tensorboard: bool = False
    """Also write TensorBoard files (extra `tensorboard`)."""


class Config(Section):
    """A whole run."""

    output_dir: str = "runs/shapes"
    """Folder of the run; must not exist, unless resuming."""
    seed: int = Field(0, ge=0)
    """Every random number of the run follows from it."""
    iterations: int = Field(100, ge=1)
    """Rollouts, each followed by its updates."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rewards: Rewards
    reward_schedule: ScheduleSection | None = None
    """Moves the weights of the rewards in the course of training."""
    method: Annotated[SerializeAsAny[MethodConfig], BeforeValidator(_build_method)]
    rollout: RolloutSection = RolloutSection()
    optimizer: OptimizerSection = OptimizerSection()
    eval: EvalSection = EvalSection()
    log: LogSection = LogSection()

    @model_validator(mode="before")
    @classmethod
    def _labels_are_rewards(cls, tree: Any) -> Any:
        data = tree.get("data") if isinstance(tree, dict) else None
        if isinstance(data, dict) and data.get("pairs") and not tree.get("rewards"):
            return {**tree, "rewards": {"preferred": 1.0}}
        return tree

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Config:
        found = self.method.problems(self.rollout)
        found += self._check_groups() + self._check_names() + self._check_data()
        if (info.context or {}).get("check_rewards", True):
            found += [line for reward in [*self.rewards, *self.eval.rewards] for line in _reward_problem(reward.name)]
        if found:
            raise ValueError("\n".join(found))
        return self

    def _check_groups(self) -> list[str]:
        found = []
        if self.rollout.group_size < 2 and not self.data.pairs:
            found.append(
                f"rollout.group_size={self.rollout.group_size}: advantages compare samples of one prompt, so a group "
                "needs at least 2 samples"
            )
        num = self.rollout.num_prompts * self.group_size
        if num % self.optimizer.updates_per_rollout:
            found.append(
                f"optimizer.updates_per_rollout={self.optimizer.updates_per_rollout} does not divide the "
                f"{num} samples of an iteration (rollout.num_prompts x rollout.group_size)"
            )
        return found

    def _check_data(self) -> list[str]:
        name, images = self.method.name, getattr(self.method, "data_images", 0)
        if self.data.pairs and not images:
            return [f"data.pairs: method.name={name} learns from its own rollouts only"]
        if not self.data.pairs and getattr(self.method, "needs_data", False):
            return [f"method.name={name} learns from a data set: set data.pairs"]
        if not self.data.pairs and any(reward.name == "preferred" for reward in self.eval_rewards):
            return ["reward 'preferred' reads the labels of a data set: set data.pairs, or use another reward"]
        return []

    def _check_names(self) -> list[str]:
        found = []
        if self.model.family not in PIPELINES:
            found.append(f"model.family={self.model.family!r}: {suggest(self.model.family, list(PIPELINES))}")
        names = [reward.name for reward in self.rewards]
        if not self.rewards:
            found.append(f"rewards: at least one is needed; known: {', '.join(REWARDS)}")
        elif not any(reward.weight for reward in self.rewards):
            found.append("rewards: all weights are 0, so there is nothing to learn")
        found += [f"rewards: {name!r} is named twice" for name in sorted({n for n in names if names.count(n) > 1})]
        trained = {reward.name: reward.params for reward in self.rewards}
        found += [
            f"eval.rewards: {reward.name!r} is a training reward with params {trained[reward.name]}, and is evaluated "
            f"with these, not with {reward.params}"
            for reward in self.eval.rewards
            if trained.get(reward.name, reward.params) != reward.params
        ]
        if self.reward_schedule:
            found += [
                f"reward_schedule.order: {name!r} is not among the rewards; {suggest(name, names)}"
                for name in self.reward_schedule.order
                if name not in names
            ]
        return found

    @property
    def group_size(self) -> int:
        """Samples of a group: those of a rollout, or the images of a row of a data set."""
        return getattr(self.method, "data_images", 0) if self.data.pairs else self.rollout.group_size

    @property
    def eval_rewards(self) -> list[RewardSection]:
        """Rewards of training, and those that are only evaluated."""
        names = {reward.name for reward in self.rewards}
        return [*self.rewards, *(reward for reward in self.eval.rewards if reward.name not in names)]


def _reward_problem(name: str) -> list[str]:
    if ":" in name:
        try:
            target = import_string(name)
        except (Exception, SystemExit) as error:  # whatever the user's module does
            return [f"reward {name!r} cannot be loaded: {type(error).__name__}: {error}"]
        return [] if callable(target) else [f"reward {name!r} is a {type(target).__name__}, not a function or class"]
    if name in REWARDS:
        return []
    return [f"unknown reward {name!r}; {suggest(name, list(REWARDS))}; your own is named 'package.module:attribute'"]


def load_config(
    source: str | Path | dict[str, Any] | None = None, overrides: Sequence[str] = (), *, check_rewards: bool = True
) -> Config:
    """Reads a config.

    Args:
        source: YAML file, name of a config that comes with flowrl, or a dict; default: the shapes run.
        overrides: `dotted.key=value`, values in YAML.
        check_rewards: import what the rewards name; not needed where nothing is scored.

    Raises:
        ConfigError: anything unknown, of the wrong type or impossible, all of it in one message.
    """
    if isinstance(source, dict):
        tree = dict(source)
    else:
        path = find_config(str(source or "default"))
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not YAML: {error}") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: expected a mapping of sections, got {type(tree).__name__}")
    for override in overrides:
        apply_override(tree, override)
    try:
        return Config.model_validate(tree, context={"check_rewards": check_rewards})
    except ValidationError as error:
        raise ConfigError("\n".join(explain(item, Config) for item in error.errors())) from None


def load_run_config(run: str | Path, overrides: Sequence[str] = (), *, check_rewards: bool = True) -> Config:
    """The resolved config in the folder of a run; the other arguments are those of `load_config`.

    Raises:
        ConfigError: there is none.
    """
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{str(run)!r} is not the folder of a run (no config.yaml in it)")
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no config; was it cut off?")
    return load_config(tree, overrides, check_rewards=check_rewards)


def check_files(config: Config, *, resume: bool = False) -> None:
    """Checks all that a run touches on disk, before any model is loaded; creates nothing.

    Raises:
        ConfigError: a file is missing or malformed, or the output folder cannot be used.
    """
    if not config.data.pairs:
        read_prompts(find_prompts(config.data.train))
    judged = find_prompts(config.data.eval)
    check_categories(read_prompts(judged), judged)
    pairs = read_pairs(config.data.pairs) if config.data.pairs else None
    if pairs and config.group_size == 2 and not pairs.has_losers:
        raise ConfigError(
            f"data.pairs={config.data.pairs!r} has no losers, which method.name={config.method.name} needs"
        )
    find_model(config.model.path)
    if not resume:
        check_new(Path(config.output_dir))
    if config.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("log.tensorboard=true needs the extra: pip install 'flowrl[tensorboard]'")
