import io

import torch
from PIL import Image
from rich.console import Console

from flowrl.core.evaluation import Evaluation
from flowrl.core.prompts import PromptSet
from flowrl.report.figures import curves, image_grid
from flowrl.report.progress import RunProgress
from flowrl.report.summary import comparison_rows, subsets, write_summary

PROMPTS = PromptSet(["p", "q", "p", "r"], {"category": ["a", "b", "a", "b"], "held_out": [True, False, False, True]})


def evaluation(values):
    return Evaluation(["score"], torch.tensor(values, dtype=torch.float64)[:, None], [], "raw", 0.1)


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


def test_a_category_called_like_another_subset_is_kept_apart():
    names = ["all", "b", "all (category)", "held-out combinations"]
    found = subsets(PromptSet(list("abcd"), {"category": names, "held_out": [True, False, False, False]}))
    assert found == {
        "all": [0, 1, 2, 3],
        "all (category)": [0],
        "b": [1],
        "all (category) (category)": [2],
        "held-out combinations (category)": [3],
        "held-out combinations": [0],
    }


def test_categories_are_told_apart_by_their_text():
    found = subsets(PromptSet(list("abcdefg"), {"category": [1, True, "1", None, "", [1], 2.5]}))
    assert found == {"all": list(range(7)), "1": [0, 2], "True": [1], "[1]": [5], "2.5": [6]}


def test_a_bar_or_a_line_break_does_not_break_the_tables(tmp_path):
    prompts = PromptSet(["p"], {"category": ["a|b\nc\u2028d"]})
    records = comparison_rows(prompts, evaluation([0]), evaluation([1]))
    write_summary(tmp_path / "s.md", title="t", records=records, diversity=(0, 0), facts={"command": "x|y"})
    text = (tmp_path / "s.md").read_text(encoding="utf-8")
    assert "\n| a\\|b c d | 1 | 0.000 | 1.000 |" in text
    assert "\n| command | x\\|y |" in text
