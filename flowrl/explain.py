"""Says in one line what is wrong with a config, with the nearest name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from .registry import nearest, suggest

_OTHER_WORDS = {"gpu": "cuda", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
"""What other programs call a value."""


def explain(error: Any, root: type[BaseModel], prefix: tuple[str, ...] = ()) -> str:
    """One line for one error of pydantic's in a tree of sections; `prefix` is where the tree hangs."""
    unknown = error["type"] == "extra_forbidden"
    keys, section, others = _place(root, error["loc"], last_is_unknown=unknown)
    dotted = ".".join(map(str, (*prefix, *keys)))
    if unknown:
        return f"unknown key {dotted!r}; {_suggest_key(str(keys[-1]), prefix, root, section, others)}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"missing key {dotted!r}"
    if error["type"] == "literal_error":
        known = re.findall("'([^']*)'", error["ctx"]["expected"])
        meant = _OTHER_WORDS.get(str(error["input"]))
        close = meant if meant in known else nearest(str(error["input"]), known)
        hint = f"; did you mean {close!r}?" if close else ""
        return f"{dotted}={error['input']!r}: expected one of {', '.join(known)}{hint}"
    if error["type"] == "union_tag_invalid":
        known = [tag.strip("' ") for tag in error["ctx"]["expected_tags"].split(",")]
        return f"unknown {dotted}.kind {error['ctx']['tag']!r}; {suggest(error['ctx']['tag'], known)}"
    return f"{dotted}={error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _place(
    root: type[BaseModel], location: Sequence[Any], *, last_is_unknown: bool
) -> tuple[list[Any], type[BaseModel], list[type[BaseModel]]]:
    """The keys that a user wrote on the way to an error, the section it lies in, and the other kinds of that section.

    pydantic's location also names members of unions; those are left out.
    """
    keys: list[Any] = []
    section = root
    others: list[type[BaseModel]] = []
    candidates: list[type[BaseModel]] = []
    for number, part in enumerate(location):
        tagged = [model for model in candidates if part == _kind(model)]
        if tagged:
            section, others, candidates = tagged[0], [model for model in candidates if model not in tagged], []
            continue
        field = section.model_fields.get(part) if isinstance(part, str) else None
        if field is None and isinstance(part, str) and not (last_is_unknown and number == len(location) - 1):
            keys += [part] if section is root and not keys else []
            continue
        keys.append(part)
        if field is not None:
            candidates = list(_models(field.annotation))
            if len(candidates) == 1:
                section, others = candidates[0], []
    return keys, section, others


def _kind(model: type[BaseModel]) -> Any:
    return getattr(model.model_fields.get("kind"), "default", None)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _suggest_key(
    name: str, prefix: tuple[str, ...], root: type[BaseModel], section: type[BaseModel], others: list[type[BaseModel]]
) -> str:
    """Another kind of the section that has the key, another section that has it, or the nearest key."""
    kinds = [str(_kind(model)) for model in others if name in model.model_fields]
    if kinds:
        own, have = _kind(section), "has" if len(kinds) == 1 else "have"
        return (
            f"kind {own} has no such key, but {' and '.join(kinds)} {have}; where the method or the kind is changed, "
            f"the other keys of the config stay, so give the section whole: method.steps={{kind: {own}}}"
        )
    elsewhere = [
        ".".join((*prefix, key, name))
        for key, field in root.model_fields.items()
        if len(models := list(_models(field.annotation))) == 1 and name in models[0].model_fields
    ]
    return f"did you mean {elsewhere[0]!r}?" if elsewhere else suggest(name, list(section.model_fields))
