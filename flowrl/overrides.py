"""Dotted overrides of a config tree."""

from __future__ import annotations

from typing import Any

import yaml

from .errors import ConfigError


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets `dotted.key=value` in a tree of sections; the value is YAML.

    Raises:
        ConfigError: not of that form.
    """
    key, separator, text = override.removeprefix("--").partition("=")
    if not separator or not key:
        raise ConfigError(f"{override!r} is not of the form key=value, for instance optimizer.learning_rate=1e-4")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if isinstance(child, list):
            child = _by_name(key, child)
        if isinstance(child, str) and parent == "method":
            child = {"name": child}
        node[parent] = dict(child) if isinstance(child, dict) else {}
        node = node[parent]
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{override!r}: the value is not YAML") from None
    node[last] = _number(value)


def _by_name(key: str, items: list[Any]) -> dict[str, Any]:
    """Rewards in their long form as a mapping from name to weight, so that one of them can be overridden."""
    if not all(isinstance(item, dict) and not item.get("params") for item in items):
        raise ConfigError(f"{key}: cannot override an item of a list with params; override the whole list")
    return {item["name"]: item.get("weight", 1.0) for item in items}


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
