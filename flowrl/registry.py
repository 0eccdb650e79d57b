"""The one registry class: explicit names, lazily imported values, errors that help."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any


def suggest(name: str, known: list[str]) -> str:
    """ "did you mean 'x'?" for the nearest known name, else the list of known names."""
    close = nearest(name, known)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(sorted(known))}"


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that `name` abbreviates, as papers do, or else is most similar to; None if there is none.

    An abbreviation is made of beginnings of the parts of a name, in order: `tp_grpo`, `nft` and `G2RPO` are
    `turning_point_grpo`, `diffusion_nft` and `granular_grpo`. The fewer parts it leaves out, the nearer it is.
    """
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    squares_written_out = re.sub("([a-z])2", r"\1\1", word)
    costs = {
        other: cost
        for other in known
        for cost in (_parts_left_out(spelling, other.lower()) for spelling in (word, squares_written_out))
        if word and cost is not None
    }
    best = [other for other, cost in costs.items() if cost == min(costs.values())]
    if len(best) == 1:
        return best[0]
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.6)), None)


def _parts_left_out(word: str, name: str) -> int | None:
    """Of how many parts of `name` an abbreviation has not even the first letter; None if `word` is none of it."""
    part, *rest = re.split(r"[^a-z0-9]+", name, maxsplit=1)
    if not rest:
        return (not word) if part.startswith(word) else None
    tails = [(n, _parts_left_out(word[n:], rest[0])) for n in range(len(part) + 1) if word.startswith(part[:n])]
    return min((tail + (n == 0) for n, tail in tails if tail is not None), default=None)


def import_string(target: str) -> Any:
    """The object at `package.module:attribute`.

    Raises:
        ValueError: not of that form, or the module has no such attribute.
        ImportError: the module cannot be imported.
    """
    module, separator, attribute = target.partition(":")
    if not separator or not module or not attribute:
        raise ValueError(f"{target!r} is not of the form 'package.module:attribute'")
    try:
        return getattr(import_module(module), attribute)
    except AttributeError:
        raise ValueError(f"module {module!r} has no attribute {attribute!r}") from None


class Registry:
    """Names of one kind of thing, each with the import string `module:attribute` of its value.

    Looking a name up checks it without importing anything; `load` imports.
    """

    def __init__(self, kind: str, entries: dict[str, str] | None = None):
        self.kind = kind
        self._entries: dict[str, str] = {}
        for name, target in (entries or {}).items():
            self.register(name, target)

    def register(self, name: str, target: str) -> None:
        """Adds a name.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice: {self._entries[name]} and {target}")
        self._entries[name] = target

    def target(self, name: str) -> str:
        """The import string of a name.

        Raises:
            ValueError: unknown name; says the nearest one.
        """
        if name not in self._entries:
            raise ValueError(f"unknown {self.kind} {name!r}; {suggest(name, list(self))}")
        return self._entries[name]

    def load(self, name: str) -> Any:
        """The value of a name."""
        return import_string(self.target(name))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
