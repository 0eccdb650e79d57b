"""`summary.md` of a run: before and after, on the same prompts and noise."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.core.evaluation import Evaluation, paired_difference
from flowrl.core.prompts import PromptSet, is_flagged

_HELD_OUT = "held-out combinations"


def subsets(prompts: PromptSet) -> dict[str, list[int]]:
    """Rows of all prompts, of each category, and of those with a held-out combination, as far as there are any.

    Categories are told apart by their text; missing and blank ones are none. One that is called like another subset is
    shown as `all (category)`. `held_out` is read by `is_flagged`; what is neither true nor false is no flag.
    """
    found, held_out = {"all": list(range(len(prompts)))}, _held_out(prompts)
    categories = ["" if value is None else str(value) for value in prompts.columns.get("category", [])]
    for category in dict.fromkeys(category for category in categories if category.strip()):
        name = category
        while name in found or name == _HELD_OUT:
            name += " (category)"
        found[name] = [i for i, value in enumerate(categories) if value == category]
    return found | ({_HELD_OUT: held_out} if held_out else {})


def _held_out(prompts: PromptSet) -> list[int]:
    rows = []
    for i, value in enumerate(prompts.columns.get("held_out", [])):
        with suppress(ValueError):
            rows += [i] if is_flagged(value) else []
    return rows


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
    lines = [f"# {_line(title)}", "", "Same prompts and initial noise before and after.", ""]
    for name in dict.fromkeys(record["reward"] for record in records):
        lines += [
            f"## {_line(name)}",
            "",
            "| prompts | n | before | after | difference (standard error) |",
            "|---|--:|--:|--:|--:|",
        ]
        lines += [_row(record) for record in records if record["reward"] == name]
        lines.append("")
    lines += ["## Diversity", ""]
    lines.append(
        f"Mean pixel distance between two images of the same prompt: {diversity[0]:.4f} before, "
        f"{diversity[1]:.4f} after."
    )
    lines += ["", "## Settings and cost", "", "| | |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def _row(record: Mapping[str, Any]) -> str:
    return (
        f"| {_cell(record['subset'])} | {record['n']} | {record['before']:.3f} | {record['after']:.3f} "
        f"| {record['difference']:+.3f} ({record['standard_error']:.3f}) |"
    )


def _line(text: Any) -> str:
    """Text without line breaks."""
    return " ".join(str(text).splitlines())


def _cell(text: Any) -> str:
    """Text as a cell of a Markdown table."""
    return _line(text).replace("|", "\\|")
