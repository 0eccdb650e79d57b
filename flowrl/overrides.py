"""Dotted overrides of a config tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

from .catalog import METHODS
from .errors import ConfigError
from .yaml_text import load


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str], root: type[BaseModel]) -> None:
    """Sets each `dotted.key=value` in a tree of the sections of `root`.

    A value is YAML. A field that is text takes it as it is typed, or what stands in it if all of it is one quoted text;
    a field that may be null is null for `null` or nothing. Of two for the same key the last one holds.

    Raises:
        ConfigError: one is not of that form.
    """
    for override in overrides:
        key, separator, text = override.removeprefix("--").partition("=")
        if not separator or not key:
            raise ConfigError(f"{override!r} is not of the form key=value, for instance optimizer.learning_rate=1e-4")
        _set(tree, key, text, root)


def _set(tree: dict[str, Any], key: str, text: str, root: type[BaseModel]) -> None:
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
    field = _annotation(tree, key.split("."), root)
    if _is_text(field):
        nothing = text in ("", "null") and NoneType in get_args(field)
        node[last] = None if nothing else _unquoted(text)
    else:
        node[last] = load(text, f"{key}={text}")


def _annotation(tree: dict[str, Any], keys: list[str], root: type[BaseModel]) -> Any:
    """Annotation of the field at `keys`, in any kind of its section that has it; None if there is none."""
    sections, found = [root], None
    for number, key in enumerate(keys):
        if number == 1 and keys[0] == "method" and (name := str(tree["method"].get("name"))) in METHODS:
            sections = [METHODS.load(name)]
        found = next((s.model_fields[key].annotation for s in sections if key in s.model_fields), None)
        sections = list(_sections(found))
    return found


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that an annotation names, but not those of a list."""
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) not in (list, dict, tuple):
        for argument in get_args(annotation):
            yield from _sections(argument)


def _is_text(annotation: Any) -> bool:
    """Whether it is `str` or a choice of texts, perhaps None."""
    if get_origin(annotation) is Annotated:
        return _is_text(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return all(isinstance(choice, str) for choice in get_args(annotation))
    others = [member for member in get_args(annotation) if member is not NoneType]
    return annotation is str or (NoneType in get_args(annotation) and len(others) == 1 and _is_text(others[0]))


def _unquoted(text: str) -> str:
    """What stands in a text of YAML that is one quoted scalar from end to end; else the text itself."""
    if text[:1] in ("'", '"'):
        try:
            node = yaml.compose(text)
        except yaml.YAMLError:
            return text
        if isinstance(node, yaml.ScalarNode) and node.style and node.end_mark.index == len(text):
            return str(node.value)
    return text


def _by_name(key: str, items: list[Any]) -> dict[str, Any]:
    """Rewards in their long form as a mapping from name to weight, so that one of them can be overridden."""
    plain = (isinstance(item, dict) and isinstance(item.get("name"), str) and not item.get("params") for item in items)
    if not all(plain):
        raise ConfigError(f"{key}: cannot override an item of a list with params; override the whole list")
    return {item["name"]: item.get("weight", 1.0) for item in items}
