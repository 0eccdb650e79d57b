"""Builds the parts of a run from its config, and judges policies. Knows all rooms of the house."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin
from PIL import Image

from flowrl.catalog import PIPELINES, find_prompts
from flowrl.config import Config, load_config, load_run_config
from flowrl.core.checkpoint import load_newest
from flowrl.core.combine import weighted_sum
from flowrl.core.controllers import SelfPaced
from flowrl.core.evaluation import Evaluation
from flowrl.core.evaluation import evaluate as evaluate_prompts
from flowrl.core.fingerprint import of_tensors
from flowrl.core.groups import iteration_ids
from flowrl.core.manifest import made_of
from flowrl.core.pairs import read_pairs
from flowrl.core.policy import Rollout
from flowrl.core.prompts import PromptSet, read_prompts
from flowrl.core.random import numpy_generator, torch_generator
from flowrl.core.scoring import Reward, Scorer
from flowrl.core.trainer import Settings, check_groups
from flowrl.core.types import SampleIds
from flowrl.core.update import copy_into
from flowrl.environment import overrule
from flowrl.errors import ConfigError
from flowrl.flow.calibrate import CalibrationRound
from flowrl.flow.calibrate import calibrate as run_calibration
from flowrl.flow.credit import increments
from flowrl.flow.data import PairData
from flowrl.flow.methods.stepwise import StepwiseMethod
from flowrl.flow.policy import FlowPolicy, to_pil
from flowrl.flow.steps import AllSteps
from flowrl.resume import BY_CONTENT, changes, refuse
from flowrl.rewards.base import build_reward, build_rewards

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_accelerator(config: Config) -> Accelerator:
    """The engine, on the device and in the precision of a config, whatever the environment asks for.

    Raises:
        ConfigError: this machine cannot do that.
    """
    device = config.device
    use_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU here; use device=auto or device=cpu")
    if use_cpu and config.model.dtype == "float16":
        raise ConfigError("model.dtype=float16 needs a GPU; on a CPU use float32")
    precision = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[config.model.dtype]
    overrule(use_cpu=use_cpu, precision=precision)
    # an earlier run in this process may have had another precision or device
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(
        mixed_precision=precision,
        cpu=use_cpu,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="no",
    )


def build_policy(
    config: Config, prompts: PromptSet, device: torch.device | str = "cpu", *, start: bool = True
) -> FlowPolicy:
    """The policy of a config, with its trainable weights as they are before training.

    Args:
        start: load `model.start_from`; not needed where the weights come from a checkpoint anyway.
    """
    model, method, share = config.model, config.method, config.rollout.share_initial_noise
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
        share_initial_noise=getattr(method, "shares_noise", False) if share is None else share,
        group_size=config.group_size,
        storage_dtype=_DTYPES[config.rollout.storage_dtype],
        reduction=getattr(method, "log_prob_reduction", "mean"),
        keep_means=getattr(method, "needs_means", False),
        batch_size=config.rollout.batch_size,
        device=device,
    )
    policy.base_fingerprint = of_tensors(_all_tensors(adapter.pipe))
    if model.lora:
        policy.add_lora(model.lora.rank, model.lora.alpha, model.lora.targets, seed=config.seed)
    else:
        policy.train_all(keep_reference=method.needs_reference)
    if model.start_from and start:
        _start_from(policy, config)
    policy.keep_lagged(getattr(method, "lagged_copies", ()))
    return policy


def _all_tensors(pipe: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, part in sorted(pipe.components.items()):
        if isinstance(part, torch.nn.Module):
            yield from ((f"{name}.{key}", value) for key, value in part.state_dict().items())


def _start_from(policy: FlowPolicy, config: Config) -> None:
    """Copies the weights of the run `model.start_from` into the policy.

    Raises:
        ConfigError: it trained another model, or other weights of it.
    """
    model, run = config.model, Path(str(config.model.start_from))
    checkpoint, _, stored = _stored_weights(run, "auto")
    made = made_of(checkpoint)
    if made["inputs"]["model"] != policy.base_fingerprint:
        raise ConfigError(f"model.start_from={str(run)!r} trained another model than model.path={model.path!r}")
    lora = load_config(made["config"], check_rewards=False).model.lora
    if lora != model.lora:
        raise ConfigError(
            f"model.start_from={str(run)!r} trained {_weights_text(lora)}, but this run trains "
            f"{_weights_text(model.lora)}: they must be the same"
        )
    copy_into(dict(policy.trainable_parameters()), stored, str(checkpoint))


def _weights_text(lora: Any) -> str:
    return f"a LoRA ({lora.model_dump()})" if lora else "all weights"


def load_policy(
    run: str | Path, *, weights: str = "auto", device: torch.device | str = "cpu"
) -> tuple[FlowPolicy, Config]:
    """The policy of a run's newest checkpoint, ready to sample in the dtype of its config.

    Args:
        weights: "raw", "ema", "base" (before training), or "auto": the average where the run keeps one.

    Raises:
        ConfigError: `run` is not the folder of a run, or does not have these weights.
    """
    config = load_run_config(run, check_rewards=False)
    return load_weights(Path(run), config, weights, device)[0], config


def load_weights(
    run: Path, config: Config, weights: str, device: torch.device | str, prompts: PromptSet | None = None
) -> tuple[FlowPolicy, str]:
    """The policy, and what `weights` means in this run: "raw", "ema" or "base".

    Raises:
        ConfigError: the run does not have these weights, or they belong to another model than its config says.
    """
    name, stored = "base", dict[str, torch.Tensor]()
    if weights != "base":
        _, name, stored = _stored_weights(run, weights, config)
    policy = build_policy(config, prompts or PromptSet([""], {}), device, start=weights == "base")
    if weights != "base":
        copy_into(dict(policy.trainable_parameters()), stored, str(run))
    if config.model.dtype != "float32":
        policy.model.to(_DTYPES[config.model.dtype])
    return policy, name


def _stored_weights(run: Path, weights: str, config: Config | None = None) -> tuple[Path, str, dict[str, torch.Tensor]]:
    """The newest checkpoint, what `weights` means in this run, and those tensors."""
    if not run.is_dir():
        raise ConfigError(f"{str(run)!r} is not the folder of a run")
    checkpoint, stored, _ = load_newest(run / "checkpoints")
    if config is not None:
        found = [change for change in changes(checkpoint, config) if change[0].startswith(("model.", "method.name"))]
        refuse(found, run, BY_CONTENT)
    name = ("ema" if "ema" in stored else "raw") if weights == "auto" else weights
    file = "policy" if name == "raw" else name
    if file not in stored:
        raise ConfigError(f"{str(run)!r} keeps no {name} weights; it keeps {', '.join(sorted(stored))}")
    return checkpoint, name, stored[file]


def training_data(config: Config) -> tuple[PromptSet, PairData | None]:
    """The prompts to learn on, and the images if they come from a data set."""
    if not config.data.pairs:
        return read_prompts(find_prompts(config.data.train)), None
    pairs = read_pairs(config.data.pairs)
    return pairs.prompt_set(), PairData(pairs, config.group_size)


def eval_prompts(config: Config) -> PromptSet:
    """The prompts that a config is judged on, each as often as it is drawn."""
    prompts = read_prompts(find_prompts(config.data.eval))
    rows = range(min(len(prompts), config.eval.num_prompts or len(prompts)))
    return prompts.rows([row for row in rows for _ in range(config.eval.num_images)])


def judging_rewards(config: Config, trained: Sequence[Reward] = ()) -> list[Reward]:
    """The rewards that judge samples one by one; those that compare pairs or read labels only train.

    Args:
        trained: rewards of the `rewards` section that are built already, and are not built again.

    Raises:
        ConfigError: there are none.
    """
    known = {reward.name: reward for reward in trained}
    built = [known.get(section.name) or build_reward(section) for section in config.eval_rewards]
    found = [reward for reward in built if reward.judges_samples]
    if not found:
        raise ConfigError(
            "all rewards compare pairs or read labels, so nothing judges a single sample; name one that does, for "
            "instance eval.rewards={shapes_strict: 1}"
        )
    return found


def evaluate_policy(
    policy: FlowPolicy,
    config: Config,
    prompts: PromptSet,
    scorer: Scorer,
    accelerator: Accelerator,
    *,
    weights: str,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Judges a policy: the stock sampler, the noise of each prompt fixed by (seed, row).

    Args:
        check: called before each batch; it may end the evaluation by an exception.
    """

    def sample(rows: Sequence[int]) -> tuple[list[Image.Image], torch.Tensor]:
        check()
        images = sample_rows(policy, config, prompts, accelerator, rows)
        return to_pil(images), images

    return evaluate_prompts(sample, prompts, scorer, accelerator, batch_size=config.eval.batch_size, weights=weights)


def sample_rows(
    policy: FlowPolicy, config: Config, prompts: PromptSet, accelerator: Accelerator, rows: Sequence[int]
) -> torch.Tensor:
    """Images `(n, 3, H, W)` of rows of the eval prompts; a row has the same noise every time."""
    noise = policy.noise([torch_generator(config.seed, "eval", row) for row in rows])
    with accelerator.autocast():
        return policy.sample(
            [prompts.prompts[row] for row in rows],
            noise,
            num_inference_steps=config.eval.num_inference_steps,
            guidance_scale=config.eval.guidance_scale,
        )


def evaluate(run: str | Path, *, weights: str = "auto", **overrides: Any) -> tuple[PromptSet, Evaluation]:
    """Judges a finished run again. `overrides` replace fields of its `eval` section.

    Returns:
        the prompts and what was measured on them.
    """
    config = load_run_config(run)
    if overrides:
        config = load_config(config.model_dump() | {"eval": config.eval.model_dump() | overrides})
    accelerator, prompts, scorer = build_accelerator(config), eval_prompts(config), Scorer(judging_rewards(config))
    policy, name = load_weights(Path(run), config, weights, accelerator.device)
    return prompts, evaluate_policy(policy, config, prompts, scorer, accelerator, weights=name)


def build_controller(config: Config) -> SelfPaced | None:
    """What moves the rewards' weights, if anything does."""
    if config.reward_schedule is None:
        return None
    fields = config.reward_schedule.model_dump(exclude={"name", "order"})
    names = config.reward_schedule.order
    return SelfPaced(names, [reward.name for reward in config.rewards if reward.name not in names], **fields)


def calibrate(
    config: Config, *, rounds: int, step: float, tolerance: int, num_samples: int | None = None
) -> Iterator[CalibrationRound]:
    """Calibrates the noise levels of a config's method on its model, prompts and rewards; see `flowrl.flow.calibrate`.

    All steps are stochastic meanwhile, whatever `method.steps` says, but for the `stop` of its kind "all".

    Args:
        num_samples: in each round, in whole groups; default: those of an iteration.

    Raises:
        ConfigError: the method has no noise levels, or a reward judges no single images.
    """
    method, r = config.method, config.rollout
    if not isinstance(method, StepwiseMethod):
        raise ConfigError(f"method.name={method.name} has no noise levels to calibrate")
    steps = method.steps if method.steps.kind == "all" else AllSteps()
    method = method.model_copy(update={"credit": "increments", "steps": steps})
    prompts = read_prompts(find_prompts(config.data.train))
    scorer, weights = Scorer(build_rewards(config.rewards)), torch.tensor([c.weight for c in config.rewards])
    check_groups(trainer_settings(config), method, scorer, 1)
    accelerator = build_accelerator(config)
    policy = build_policy(config, prompts, accelerator.device)
    num_steps, levels = method.steps.num_trained(r.num_inference_steps), method.levels(r.num_inference_steps)
    first, others = levels[:num_steps], levels[num_steps:]  # the others belong to deterministic steps
    num_prompts = max(1, (num_samples or r.num_prompts * r.group_size) // r.group_size)

    def measure(levels: tuple[float, ...], number: int) -> torch.Tensor:
        sizes = {"num_rows": len(prompts), "num_prompts": num_prompts, "group_size": r.group_size}
        ids = iteration_ids(config.seed, number, **sizes)
        chosen = method.model_copy(update={"noise_level": (*levels, *others)})
        plan = chosen.plans(policy.grid, iteration=number, rng=numpy_generator(config.seed, "plan", number))[0]
        scored = sample_and_score(policy, config, prompts, scorer, accelerator, ids, plan, iteration=number)
        return torch.cat([increments(weighted_sum(table, weights)) for _, table in scored])

    highest = 1.0 if method.transition == "cps" else 2.0
    return run_calibration(measure, first, rounds=rounds, step=step, tolerance=tolerance, highest=highest)


def sample_and_score(
    policy: FlowPolicy,
    config: Config,
    prompts: PromptSet,
    scorer: Scorer,
    accelerator: Accelerator,
    ids: SampleIds,
    plan: Any,
    *,
    iteration: int,
) -> Iterator[tuple[Rollout, torch.Tensor]]:
    """Rollouts of `ids` in batches, with the scores `(n, V, R)` of each."""
    size = config.rollout.batch_size
    for start in range(0, len(ids), size):
        with accelerator.autocast():
            rollout = policy.rollout(ids[start : start + size], plan, seed=config.seed, iteration=iteration)
        rollout = policy.decode(rollout)
        rows = prompts.rows(rollout.ids.prompt[rollout.owners].tolist())
        yield rollout, scorer.submit(rows.prompts, rollout.completions, rows.columns).result()[rollout.views]


def trainer_settings(config: Config) -> Settings:
    """The part of a config that the loop itself has to know."""
    o, r = config.optimizer, config.rollout
    return Settings(
        seed=config.seed,
        iterations=config.iterations,
        num_prompts=r.num_prompts,
        group_size=config.group_size,
        rollout_batch_size=r.batch_size,
        update_batch_size=o.batch_size,
        checkpoint_every=config.log.checkpoint_every,
        keep_checkpoints=config.log.keep_checkpoints,
        **o.model_dump(exclude={"batch_size"}),
    )
