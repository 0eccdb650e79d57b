"""Builds rewards from their names."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from flowrl.catalog import REWARDS
from flowrl.core.scoring import Reward
from flowrl.errors import ConfigError
from flowrl.registry import import_string


class _Section(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def params(self) -> dict[str, Any]: ...


def build_reward(section: _Section) -> Reward:
    """The reward that a config section names, with its parameters.

    A class is built with `params`; a function must have none.

    Raises:
        ConfigError: the name is unknown, or `params` do not fit.
        ImportError: what the reward needs is not installed.
    """
    target = import_string(section.name) if ":" in section.name else REWARDS.load(section.name)
    if inspect.isclass(target):
        try:
            target = target(**section.params)
        except TypeError as error:
            raise ConfigError(f"reward {section.name!r} cannot be built with {section.params}: {error}") from None
    elif section.params:
        raise ConfigError(f"reward {section.name!r} is a function and takes no params, got {section.params}")
    return Reward(section.name, target, section.weight)


def build_rewards(sections: Sequence[_Section]) -> list[Reward]:
    """Rewards in the order of their sections."""
    return [build_reward(section) for section in sections]


def reward_status(name: str) -> str:
    """ "ok", or why a registered reward cannot be used here."""
    try:
        REWARDS.load(name)
    except ImportError as error:
        return str(error)
    return "ok"
