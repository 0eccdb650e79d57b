import io
import re
import warnings
from math import inf, nan

import pytest
import torch
from PIL import Image
from rich.console import Console

from flowrl.core.evaluation import Evaluation
from flowrl.core.prompts import PromptSet
from flowrl.report.figures import curves, curves_figure, image_grid
from flowrl.report.progress import RunProgress
from flowrl.report.summary import comparison_rows, subsets, write_summary

PROMPTS = PromptSet(["p", "q", "p", "r"], {"category": ["a", "b", "a", "b"], "held_out": [True, False, False, True]})


def evaluation(values):
    return Evaluation(["score"], torch.tensor(values, dtype=torch.float64)[:, None], [], "raw", 0.1)


def table_rows(folder, records, facts=None):
    """The lines of all tables of a summary."""
    write_summary(folder / "s.md", title="t", records=records, diversity=(0.1, 0.2), facts=facts or {})
    return [line for line in (folder / "s.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]


def test_summary_by_hand(tmp_path):
    records = comparison_rows(PROMPTS, evaluation([0, 0, 0, 1]), evaluation([1, 0, 1, 1]))
    found = {record["subset"]: record for record in records}
    assert list(found) == ["all", "a", "b", "held-out combinations"]
    # differences 1, 0, 1, 0: mean 1/2, std 1/sqrt 3, standard error 1 / sqrt 12
    assert (found["all"]["before"], found["all"]["after"], found["all"]["difference"]) == (0.25, 0.75, 0.5)
    assert abs(found["all"]["standard_error"] - 12**-0.5) < 1e-12
    assert (found["a"]["difference"], found["b"]["difference"]) == (1, 0)
    assert found["held-out combinations"]["n"] == 2
    write_summary(tmp_path / "s.md", title="t", records=records, diversity=(0.1, 0.2), facts={"iterations": "4"})
    text = (tmp_path / "s.md").read_text(encoding="utf-8")
    assert "| all | 4 | 0.250 | 0.750 | +0.500 (0.289) |" in text
    assert "0.1000 before, 0.2000 after" in text
    assert "| iterations | 4 |" in text


def test_prompt_files_without_categories_have_one_subset():
    assert subsets(PromptSet(["x", "y"], {})) == {"all": [0, 1]}


def test_held_out_is_read_from_text():
    values = ["false", "False", "NO", "0", "", None, 0, "maybe", "true", "TRUE", "Yes", "1", 1, True]
    found = subsets(PromptSet(["p"] * len(values), {"held_out": values}))
    assert found["held-out combinations"] == [8, 9, 10, 11, 12, 13]
    assert list(subsets(PromptSet(["p", "q"], {"held_out": ["false", "0"]}))) == ["all"]


def test_categories_named_as_another_subset_keep_apart(tmp_path):
    names = ["all (category)", "all", "held-out combinations", "all"]
    prompts = PromptSet(list("pqrs"), {"category": names, "held_out": [True, False, False, True]})
    assert subsets(prompts) == {
        "all": [0, 1, 2, 3],
        "all (category)": [0],
        "all (category) (category)": [1, 3],
        "held-out combinations (category)": [2],
        "held-out combinations": [0, 3],
    }
    records = comparison_rows(prompts, evaluation([0, 0, 0, 1]), evaluation([1, 0, 1, 1]))
    assert [(r["subset"], r["n"]) for r in records] == [(name, len(rows)) for name, rows in subsets(prompts).items()]
    lines = table_rows(tmp_path, records)
    assert sum(line.startswith("| all | 4 |") for line in lines) == 1
    assert sum(line.startswith("| held-out combinations | 2 |") for line in lines) == 1


def test_numbers_and_booleans_are_categories_by_their_text():
    values = [1, "1", True, 1.5, " 1 ", "True"]
    found = subsets(PromptSet(["p"] * len(values), {"category": values}))
    assert {name: rows for name, rows in found.items() if name != "all"} == {"1": [0, 1, 4], "True": [2, 5], "1.5": [3]}


def test_a_row_without_category_belongs_to_none():
    found = subsets(PromptSet(["p", "q", "r"], {"category": [None, "a", " "]}))
    assert found == {"all": [0, 1, 2], "a": [1]}


def test_a_category_that_is_no_text_does_not_cost_the_summary():
    assert list(subsets(PromptSet(["p", "q"], {"category": [["a"], {"b": 1}]}))) == ["all", "['a']", "{'b': 1}"]


def test_no_cell_breaks_a_table(tmp_path):
    prompts = PromptSet(list("pqr"), {"category": ["a|b", "c\nd\r\ne", "f\\|g"]})
    records = comparison_rows(prompts, evaluation([0, 0, 0]), evaluation([1, 0, 1]))
    lines = table_rows(tmp_path, records, {"model | path": "x\ny"})
    assert [line.split(" | ")[0] for line in lines[3:6]] == ["| a\\|b", "| c<br>d<br>e", "| f\\\\\\|g"]
    assert lines[-1] == "| model \\| path | x<br>y |"
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines[:6]} == {6}


def test_pictures(tmp_path):
    grid = image_grid(
        [Image.new("RGB", (32, 32), "red")] * 5, ["a very long caption that needs several lines"] * 5, columns=3
    )
    assert grid.width > 3 * 160
    assert grid.height > 2 * 160
    assert grid.getpixel((90, 90)) == (255, 0, 0)
    records = [{"iteration": 0, "eval/score": 0.2}]
    records += [{"iteration": i, "reward": None if i == 2 else i / 9} for i in range(1, 10)]
    records += [{"iteration": 9, "eval/score": 0.5}]
    curves(records, tmp_path / "curves.png", title="t")
    assert Image.open(tmp_path / "curves.png").width > 800


def run_of(num, value=0.5, judged=True):
    """Metrics of a run of so many iterations, evaluated before, and after if there are any."""
    before, after = {"iteration": 0, "eval/score": 0.2, "eval/score/a": 1.0}, {"iteration": num, "eval/score": 0.4}
    train = [{"iteration": i, "reward": value} for i in range(1, num + 1)]
    return [before, *train, after][: None if num else 1] if judged else train


def shown(axes):
    """Words in the middle, or else the finite points of the labelled lines."""
    if axes.texts:
        assert not axes.lines and not len(axes.get_xticks()) and not len(axes.get_yticks())
        return axes.texts[0].get_text()
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    return {line.get_label(): [int(x) for x, y in line.get_xydata() if y == y] for line in lines}


@pytest.mark.parametrize(
    ("records", "left", "right"),
    [
        ([], "no iterations yet", "no evaluations yet"),
        (run_of(0), "no iterations yet", {"score": [0]}),
        (run_of(1), {"each iteration": [1]}, {"score": [0, 1]}),
        (run_of(2, judged=False), {"each iteration": [1, 2]}, "no evaluations yet"),
        (run_of(2, value=None), "no iteration has a reward", {"score": [0, 2]}),
        (run_of(3, value=nan), "no iteration has a reward", {"score": [0, 3]}),
        (run_of(3, value=inf, judged=False), "no iteration has a reward", "no evaluations yet"),
        ([{"iteration": 0, "eval/score": None}], "no iterations yet", "no evaluation has a score"),
        (run_of(9), {"each iteration": list(range(1, 10))}, {"score": [0, 9]}),
        (run_of(10), {name: list(range(1, 11)) for name in ("each iteration", "mean of 9")}, {"score": [0, 10]}),
    ],
)
def test_curves_of_short_runs_show_what_there_is_or_say_that_there_is_nothing(tmp_path, records, left, right):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curves(records, tmp_path / "curves.png", title="t")
        figure = curves_figure(records, title="a price of $5")
        figure.canvas.draw()
    assert Image.open(tmp_path / "curves.png").width > 800
    assert [shown(axes) for axes in figure.axes] == [left, right]


@pytest.mark.parametrize("num", [0, 1, 2, 3, 30, 110])
def test_curves_have_ticks_at_whole_iterations_and_one_axis_for_both_panels(num):
    left, right = curves_figure(run_of(num), title="t").axes
    low, high = right.get_xlim()
    inside = [tick for tick in right.get_xticks() if low <= tick <= high]
    assert inside and all(tick == int(tick) >= 0 for tick in inside)
    assert low < 0 and num < high
    assert num == 0 or left.get_xlim() == (low, high)


def test_a_point_without_neighbors_has_a_marker_also_in_a_long_run():
    records = run_of(20, judged=False)
    for i in (4, 6):
        records[i]["reward"] = None
    raw, marks = curves_figure(records, title="t").axes[0].lines[:2]
    assert raw.get_marker() in ("", "None")
    assert (marks.get_marker(), list(marks.get_xdata())) == ("o", [6])
    (short, _) = curves_figure(run_of(1, judged=False), title="t").axes[0].lines
    assert short.get_marker() == "o"


def test_the_running_mean_leaves_out_what_has_no_score():
    records = run_of(20, judged=False)
    records[4]["reward"] = None
    mean = next(line for line in curves_figure(records, title="t").axes[0].lines if line.get_label() == "mean of 9")
    assert list(mean.get_ydata()) == [0.5] * 20


def test_progress_is_plain_where_there_is_no_terminal(capsys):
    with RunProgress(20, done=5, console=Console(file=io.StringIO())) as progress:
        for iteration in range(6, 21):
            progress.update(iteration, {"reward": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["10/20", "20/20"]
    assert "reward 0.500" in lines[0]


def test_progress_on_a_terminal_shows_rate_and_reward():
    out = io.StringIO()
    with RunProgress(4, console=Console(file=out, force_terminal=True, width=120)) as progress:
        progress.update(2, {"reward": 0.625})
    assert "2/4" in out.getvalue()
    assert "reward 0.625" in out.getvalue()


def test_a_flag_that_is_text_is_read_as_it_is_meant():
    prompts = PromptSet(["a", "b", "c", "d", "e"], {"held_out": ["false", "True", "", None, "maybe"]})
    assert subsets(prompts) == {"all": [0, 1, 2, 3, 4], "held-out combinations": [1]}
