"""YAML as configs have it: only `true` and `false` are truth values, and a date is text (YAML 1.2, core schema)."""

from __future__ import annotations

import re
from typing import Any

import yaml

from .errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
_PLAIN = {  # the tag of a plain scalar, and the characters that it can begin with
    "bool": (re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (_INT, list("-+0123456789")),
    "float": (_FLOAT, list("-+.0123456789")),
    "null": (re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "merge": (re.compile(r"<<$"), ["<"]),
}


def load(text: str, where: str) -> Any:
    """The tree that a YAML text holds.

    Args:
        where: the file or override that it stands in, for messages.

    Raises:
        ConfigError: not YAML, a key that stands twice in a mapping, a merge key, or a tag of YAML 1.1.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{line}: not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from None


def dump(tree: Any, *, flow: bool | None = False) -> str:
    """The text that `load` reads as `tree`; text that YAML 1.1 takes for something else is quoted too.

    Args:
        flow: nothing on lines of its own; None: only the innermost lists and mappings are written so.
    """
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=flow)


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars by `_PLAIN` and builds nothing but mappings, lists and scalars."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuses keys that stand twice, and merge keys."""
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            mark = key_node.start_mark
            if key_node.tag == _TAG + "merge":
                raise yaml.constructor.ConstructorError(problem="<< is not read; write the keys out", problem_mark=mark)
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(problem="a key must be text", problem_mark=mark)
            key, line = self.construct_object(key_node, deep=True), mark.line + 1
            if key in lines:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} stands in line {lines[key]} and again in line {line}; keep one of them",
                    problem_mark=mark,
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` or a reader of YAML 1.1 would not take for text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Writes everything out."""
        return True


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    text.encode("utf-8")  # half of a surrogate pair is no text
    return text


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))


_BUILT = (None, *(_TAG + name for name in ("null", "bool", "seq", "map")))
_Loader.yaml_constructors = {tag: build for tag, build in yaml.SafeLoader.yaml_constructors.items() if tag in _BUILT}
_Loader.yaml_implicit_resolvers = {}
for _name, _build in (("str", _text), ("int", _int), ("float", _float)):
    _Loader.add_constructor(_TAG + _name, _build)
for _name, (_pattern, _first) in _PLAIN.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, _pattern, _first)
