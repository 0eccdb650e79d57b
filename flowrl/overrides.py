"""Dotted overrides of a config tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import ConfigError
from .yaml_text import load_yaml


def apply_override(tree: dict[str, Any], override: str, kind: Callable[[str], str] = lambda key: "yaml") -> None:
    """Sets `dotted.key=value` in a tree of sections.

    Args:
        kind: of the value that a dotted key takes: "yaml"; "text", taken as typed; or "text or null". A text that is
            quoted as a whole loses its quotes.

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
    node[last] = _value(text, kind(key), override)


def _value(text: str, kind: str, override: str) -> Any:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if kind == "yaml" or quoted or (kind == "text or null" and text in ("null", "~", "")):
        return load_yaml(text, repr(override))
    return text


def _by_name(key: str, items: list[Any]) -> dict[str, Any]:
    """Rewards in their long form as a mapping from name to weight, so that one of them can be overridden."""
    if not all(isinstance(item, dict) and not item.get("params") for item in items):
        raise ConfigError(f"{key}: cannot override an item of a list with params; override the whole list")
    return {item["name"]: item.get("weight", 1.0) for item in items}
