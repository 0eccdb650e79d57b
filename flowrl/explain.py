"""Says in one line what is wrong with a config, with the nearest name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from .registry import suggest


def explain(error: Any, root: type[BaseModel], prefix: tuple[str, ...] = ()) -> str:
    """One line for one error of pydantic's in a tree of sections; `prefix` is where the tree hangs."""
    location, sections = _sections(root, error["loc"])
    dotted = ".".join(map(str, (*prefix, *location)))
    if error["type"] == "extra_forbidden":
        return f"unknown key {dotted!r}; {_suggest_key(str(location[-1]), root, sections[-1])}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"missing key {dotted!r}"
    if error["type"] == "union_tag_invalid":
        known = [tag.strip("' ") for tag in error["ctx"]["expected_tags"].split(",")]
        return f"unknown {dotted}.kind {error['ctx']['tag']!r}; {suggest(error['ctx']['tag'], known)}"
    return f"{dotted}={error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _sections(root: type[BaseModel], location: Sequence[Any]) -> tuple[list[Any], list[type[BaseModel]]]:
    """The keys of an error's place, without the tags of unions, and the sections on the way there."""
    keys: list[Any] = []
    sections = [root]
    candidates: list[type[BaseModel]] = []
    for part in location:
        field = sections[-1].model_fields.get(part) if isinstance(part, str) else None
        tagged = [c for c in candidates if part == getattr(c.model_fields.get("kind"), "default", None)]
        if tagged:
            sections.append(tagged[0])
            candidates = []
            continue
        keys.append(part)
        if field is not None:
            candidates = list(_models(field.annotation))
            if len(candidates) == 1:
                sections.append(candidates[0])
    return keys, sections


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _suggest_key(name: str, root: type[BaseModel], section: type[BaseModel]) -> str:
    """Nearest key of the section, or the section in which the key exists."""
    elsewhere = [
        f"{key}.{name}"
        for key, field in root.model_fields.items()
        if any(name in model.model_fields for model in _models(field.annotation))
    ]
    return f"did you mean {elsewhere[0]!r}?" if elsewhere else suggest(name, list(section.model_fields))
