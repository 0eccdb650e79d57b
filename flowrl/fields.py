"""What kinds of value the fields of a config take."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel
from pydantic_core import PydanticCustomError

from .catalog import METHODS

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


def expand(path: str) -> str:
    """A path with `~` and `$VARIABLES` replaced.

    Raises:
        ValueError: a variable is not set.
    """
    for name in _VARIABLE.findall(path):
        if name.strip("{}") not in os.environ:
            raise PydanticCustomError("unset", "the variable {name} is not set", {"name": name.strip("{}")})
    return os.path.expanduser(os.path.expandvars(path))


PathText = Annotated[str, AfterValidator(expand)]
"""A path, in which `~` and `$VARIABLES` are expanded."""


def numbers_only(value: Any, annotation: Any) -> Any:
    """The value, booleans in it turned to text where the field takes numbers, as which pydantic would let them pass."""
    kinds = set(_leaves(annotation))
    if not kinds & {int, float} or kinds & {bool, Any}:
        return value
    if isinstance(value, list | tuple):
        return [str(item).lower() if isinstance(item, bool) else item for item in value]
    return str(value).lower() if isinstance(value, bool) else value


def _leaves(annotation: Any) -> Iterator[Any]:
    arguments = get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _leaves(argument)


def value_kind(root: type[BaseModel], key: str, tree: Mapping[str, Any]) -> str:
    """How an override of a dotted key is read, see `flowrl.overrides.apply_override`."""
    section: type[BaseModel] | None = root
    *parents, last = key.split(".")
    for parent in parents:
        section = _method(tree) if parent == "method" else _section(section, parent)
    field = section.model_fields.get(last) if section else None
    if field is None:
        return "yaml"
    kinds = set(_leaves(field.annotation))
    if kinds == {str}:
        return "text"
    return "text or null" if kinds == {str, type(None)} else "yaml"


def _section(section: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    field = section.model_fields.get(name) if section else None
    found = [kind for kind in _leaves(field.annotation) if _is_section(kind)] if field else []
    return found[0] if len(found) == 1 else None


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _method(tree: Mapping[str, Any]) -> type[BaseModel] | None:
    method = tree.get("method")
    name = method.get("name") if isinstance(method, Mapping) else method
    return METHODS.load(name) if isinstance(name, str) and name in METHODS else None
