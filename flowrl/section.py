"""What every section of a config is made of: strict values, and paths as a shell would read them."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from .errors import ConfigError


def _strict(schema: Any) -> Any:
    """The schema with all its numbers and truth values strict, but for integers written as 4.0 or 1e3."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_strict, schema))
    if not isinstance(schema, dict):
        return schema
    kept = ("default", "metadata", "serialization")
    schema = {key: value if key in kept else _strict(value) for key, value in schema.items()}
    if schema.get("type") in ("int", "float", "bool"):
        schema["strict"] = True
    if schema.get("type") == "int":
        return core_schema.no_info_before_validator_function(_integer, schema)
    return schema


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Section(BaseModel):
    """Base of all config sections. Text is no number, a truth value is neither; 1e3 is the integer 1000."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _strict(handler(source))
        return schema


def expand_path(text: str) -> str:
    """A path with `~`, `$NAME` and `${NAME}` replaced.

    Raises:
        ConfigError: a variable or the home of a user is unknown, or no file can have that name.
    """
    for name in re.findall(r"\$(?:(\w+)|\{([^}]*)\})", text, flags=re.ASCII):
        if (variable := "".join(name)) not in os.environ:
            raise ConfigError(f"the environment has no {variable!r}, named in {text!r}; set it or write the path out")
    path = os.path.expanduser(os.path.expandvars(text))
    if path.startswith("~"):
        raise ConfigError(
            f"no home of a user {path[1:].split('/')[0]!r} for {text!r}; a folder of that name is ./{path}"
        )
    if "\0" in path or re.search("[\ud800-\udc7f\udd00-\udfff]", path):
        raise ConfigError(f"{text!r}: no file name can hold a NUL character or half of a surrogate pair")
    return path


def _expanded(text: str) -> str:
    try:
        return expand_path(text)
    except ConfigError as error:
        raise PydanticCustomError("path", "{reason}", {"reason": str(error)}) from None


PathText = Annotated[str, AfterValidator(_expanded)]
"""A path in a config; what is stored is the expanded one."""
