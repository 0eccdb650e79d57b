"""Going on with a run: what may be changed on the way, and what would make another training of it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import Config, load_config, load_run_config
from .core.manifest import broken_checkpoints, list_checkpoints, made_of
from .errors import ConfigError

FREE = ("output_dir", "iterations", "device", "log", "eval", "data.eval", "optimizer.batch_size", "rollout.batch_size")
"""What can change within a run, and in what the run is stored under other names."""
BY_CONTENT = ("model.path", "model.start_from", "data.train", "data.pairs")
"""Places whose contents must stay as they were; those are compared when they have been read."""

Change = tuple[str, Any, Any]
"""(key, old value, new value)"""


def resumed_config(run: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[Change]]:
    """The config under which a run goes on, and where it differs from that of the newest checkpoint.

    Raises:
        ConfigError: nothing to go on from, or a change would make another training of the run.
    """
    config = load_run_config(run, overrides)
    config = config.model_copy(update={"output_dir": str(run)})
    folder = Path(run) / "checkpoints"
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        reasons = "".join(f"; {path.name}: {what}" for path, what in broken_checkpoints(folder).items())
        raise ConfigError(f"{str(run)!r} holds no whole checkpoint to resume from{reasons}; start it anew")
    found = changes(checkpoints[-1], config)
    refuse(found, run, FREE + BY_CONTENT)
    done = int(checkpoints[-1].name)
    if config.iterations < done:
        raise ConfigError(f"iterations={config.iterations}, but {str(run)!r} has done {done} already")
    return config, [change for change in found if change[0] != "output_dir"]


def changes(checkpoint: Path, config: Config) -> list[Change]:
    """Where a config differs from the one that a checkpoint was made under."""
    stored = load_config(made_of(checkpoint)["config"], check_rewards=False)
    old, new = dict(flatten(stored.model_dump(mode="json"))), dict(flatten(config.model_dump(mode="json")))
    return [(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]


def refuse(found: Sequence[Change], run: str | Path, allowed: Sequence[str]) -> None:
    """Refuses changes of other keys, or keys below them, than those allowed.

    Raises:
        ConfigError: there are some.
    """
    for key, old, new in found:
        if not any(key == name or key.startswith(name + ".") for name in allowed):
            raise ConfigError(
                f"{key}={new!r}, but {str(run)!r} was trained with {old!r}: another training. Only {', '.join(FREE)} "
                f"can change within a run; set {key}={old!r} to go on, or start a new run from these weights with "
                f"model.start_from={run} and another output_dir"
            )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of the leaves of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
