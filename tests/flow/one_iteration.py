"""Small runs of the real trainer."""

from accelerate import Accelerator
from flowrl.rewards.base import build_rewards
from merged import merged

from flowrl.build import build_controller, build_policy, trainer_settings, training_data
from flowrl.config import load_config
from flowrl.core.prompts import PromptSet
from flowrl.core.scoring import Scorer
from flowrl.core.trainer import Trainer

T, G, P = 8, 4, 2
PROMPTS = PromptSet(["a red circle", "three squares", "a triangle"], {})
SMALL = [
    f"rollout.num_inference_steps={T}",
    f"rollout.group_size={G}",
    f"rollout.num_prompts={P}",
    "rollout.batch_size=64",
    "optimizer={learning_rate: 1.0e-4, batch_size: 128}",
    "rewards={'fake_rewards:dark': 1}",
    "iterations=1",
]


def trainer_of(folder, *overrides, seen=None):
    """The trainer of a small run; `seen` collects the metrics of its iterations."""
    config = load_config(None, merged(SMALL, *overrides))
    prompts, data = training_data(config) if config.data.pairs else (PROMPTS, None)
    policy = build_policy(config, prompts)
    policy.data = data
    return Trainer(
        trainer_settings(config),
        policy,
        config.method,
        Scorer(build_rewards(config.rewards)),
        prompts,
        Accelerator(cpu=True),
        folder,
        lambda iteration, metrics, seconds: None if seen is None else seen.append(metrics),
        controller=build_controller(config),
    )


def run(folder, *overrides):
    """Metrics of the last iteration, and the trained weights."""
    seen = []
    trainer = trainer_of(folder, *overrides, seen=seen)
    trainer.run()
    return seen[-1], {name: value.detach().clone() for name, value in trainer.updater.parameters.items()}
