"""`summary.md` of a run: before and after, on the same prompts and noise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.core.evaluation import Evaluation, paired_difference
from flowrl.core.prompts import PromptSet, truth

ALL, HELD_OUT = "all", "held-out combinations"


def subsets(prompts: PromptSet) -> dict[str, list[int]]:
    """Rows of all prompts, of each category, and of those with a held-out combination, as far as there are any.

    A category is the text of what `category` holds, without blanks around it; a row where that is missing or blank
    belongs to none. Where its name is one of the other subsets', " (category)" is added. Held out is what `truth` says.
    """
    found = {ALL: list(range(len(prompts)))}
    categories: dict[str, list[int]] = {}
    for row, value in enumerate(prompts.columns.get("category", [])):
        if value is not None and str(value).strip():
            categories.setdefault(str(value).strip(), []).append(row)
    for name, rows in categories.items():
        while name in (*found, HELD_OUT):
            name += " (category)"
        found[name] = rows
    held_out = [row for row, value in enumerate(prompts.columns.get("held_out", [])) if truth(value)]
    return found | ({HELD_OUT: held_out} if held_out else {})


def comparison_rows(prompts: PromptSet, before: Evaluation, after: Evaluation) -> list[dict[str, Any]]:
    """One record for each reward and subset: means before and after, their difference and its standard error."""
    records = []
    for column, name in enumerate(before.names):
        for subset, rows in subsets(prompts).items():
            a, b = before.table[rows, column], after.table[rows, column]
            difference, error = paired_difference(a, b)
            records.append(
                {
                    "reward": name,
                    "subset": subset,
                    "n": len(rows),
                    "before": a.nanmean().item(),
                    "after": b.nanmean().item(),
                    "difference": difference,
                    "standard_error": error,
                }
            )
    return records


def write_summary(
    path: Path,
    *,
    title: str,
    records: list[dict[str, Any]],
    diversity: tuple[float, float],
    facts: Mapping[str, str],
) -> None:
    """Writes the page.

    Args:
        records: of `comparison_rows`.
        diversity: before and after.
        facts: settings and cost, in the order they are shown.
    """
    lines = [f"# {title}", "", "Same prompts and initial noise before and after.", ""]
    for name in dict.fromkeys(record["reward"] for record in records):
        lines += [
            f"## {name}",
            "",
            "| prompts | n | before | after | difference (standard error) |",
            "|---|--:|--:|--:|--:|",
        ]
        lines += [_figures(record) for record in records if record["reward"] == name]
        lines.append("")
    lines += ["## Diversity", ""]
    lines.append(
        f"Mean pixel distance between two images of the same prompt: {diversity[0]:.4f} before, "
        f"{diversity[1]:.4f} after."
    )
    lines += ["", "## Settings and cost", "", "| | |", "|---|---|"]
    lines += [_row(name, value) for name, value in facts.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def _figures(record: Mapping[str, Any]) -> str:
    change = f"{record['difference']:+.3f} ({record['standard_error']:.3f})"
    return _row(record["subset"], record["n"], f"{record['before']:.3f}", f"{record['after']:.3f}", change)


def _row(*cells: Any) -> str:
    """A line of a table. In a cell, `|` is escaped, with the backslashes before it, and a line break is `<br>`."""
    texts = (re.sub(r"(\\*)\|", r"\1\1\\|", "<br>".join(str(cell).splitlines())) for cell in cells)
    return f"| {' | '.join(texts)} |"
