"""Tells another project's distribution `flowrl` from this one, which is called `flowrl-align` in the package index.

Both install a folder `flowrl`, so they cannot be had together. A distribution of the name `flowrl` is this project's
own if its metadata name this project's authors: a checkout that was installed before the name changed has left such a
one, and so has one built in place (`flowrl.egg-info`).
"""

from __future__ import annotations

from importlib.metadata import Distribution, distributions
from pathlib import Path

AUTHOR = "The flowrl developers"
WAY_OUT = "pip uninstall flowrl && pip install --force-reinstall flowrl-align"


def foreign_distributions() -> list[Distribution]:
    """Distributions `flowrl` of someone else, looked up by name alone, which costs milliseconds."""
    return [found for found in distributions(name="flowrl") if found.metadata.get_all("Author") != [AUTHOR]]


def conflicts() -> list[str]:
    """What to say of each of them; empty if this project has the name for itself."""
    own = Path(__file__).resolve().parent
    return [
        f"another project's distribution 'flowrl' {found.version} is installed in {found.locate_file('')} and "
        + ("its files are mixed with" if own == Path(str(found.locate_file("flowrl"))).resolve() else "can hide")
        + f" those of flowrl-align in {own}: {WAY_OUT}"
        for found in foreign_distributions()
    ]
