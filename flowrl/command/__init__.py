"""Entry point of the command `flowrl`; installed as the package `flowrl_align`, which no other project overwrites."""

from __future__ import annotations

import sys
from typing import Any


def main() -> Any:
    """Runs `flowrl.cli`, or says that the package `flowrl` which Python finds is another project's."""
    try:
        import flowrl

        if flowrl.__distribution__ != "flowrl-align":
            raise AttributeError
    except (ImportError, AttributeError):
        found = getattr(sys.modules.get("flowrl"), "__file__", None) or "a folder without __init__.py"
        print(
            f"error the package 'flowrl' that Python finds ({found}) is not that of flowrl-align: "
            "pip uninstall flowrl && pip install --force-reinstall flowrl-align",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    from flowrl.cli import main as run

    return run()
