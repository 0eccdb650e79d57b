"""YAML as configs are written: the core scalars of YAML 1.2, and no key twice.

So `on` and `1:30` are text, 1e-4 is a number, and a date is text.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from .errors import ConfigError

_SCALARS = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+.0123456789",
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"^<<$", "<"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"{name!r} stands twice, in line {lines[name]} and in line {line}")
            lines[name] = line
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]


for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list(_first))
_Loader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda loader, node: int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10),
)


def load_yaml(text: str, where: str) -> Any:
    """The value of a YAML text.

    Raises:
        ConfigError: it is none, or a mapping has a key twice; starts with `where`.
    """
    try:
        return yaml.load(text, _Loader)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # also unhashable keys
        raise ConfigError(f"{where}: not YAML: {error}") from None


def dump_yaml(tree: Any) -> str:
    """YAML that `load_yaml` reads back as it was; keys keep their order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
