"""The command line as a user meets it: run as a process."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowrl.cli import _split, main
from flowrl.errors import ConfigError

SMALL = [
    "iterations=4",
    "rollout.num_prompts=2",
    "rollout.group_size=4",
    "rollout.num_inference_steps=4",
    "method.steps.range=[0,3]",
    "method.steps.size=2",
    "optimizer.updates_per_rollout=2",
    "eval.num_prompts=12",
    "eval.num_inference_steps=4",
    "log.grid_every=2",
    "log.checkpoint_every=1",
]


def flowrl(*arguments, timeout=240, env=(), **options):
    return subprocess.run(
        [sys.executable, "-m", "flowrl.cli", *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | dict(env),
        **options,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with a LoRA and an average of the weights."""
    folder = tmp_path_factory.mktemp("runs") / "lora"
    extra = ["model.lora.rank=4", "optimizer.ema_decay=0.9", "log.tensorboard=true", f"output_dir={folder}"]
    result = flowrl("train", *SMALL, *extra)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def test_a_run_leaves_what_the_readme_promises(finished):
    folder, output = finished
    assert "iteration 4/4" in output
    assert "before: shapes_strict" in output
    assert "after:  shapes_strict" in output
    assert "\x1b" not in output, "no control characters where there is no terminal"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {
        "config.yaml",
        "metrics.jsonl",
        "timing.jsonl",
        "summary.md",
        "summary.json",
        "curves.png",
        "samples/000000.png",
        "samples/000004.png",
        "export/pytorch_lora_weights.safetensors",
        "checkpoints/000004/policy.safetensors",
        "checkpoints/000004/ema.safetensors",
    } <= names
    assert any(name.startswith("tensorboard/") for name in names)
    assert not [name for name in names if "partial" in name]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [r["iteration"] for r in records] == [0, 1, 2, 3, 4, 4]
    # eps/2 6e-8 x sqrt(512) of the longest sum x 40 layers = 5e-5 of a velocity of 2, times |d mean / d v| / std, 75 on
    # the step to the tiny last sigma: 8e-3 in each of 512 latents, whose noise is independent of it, so 4e-4 in the
    # mean. A wrong prompt moves the ratio by 1e-2, a wrong state by 1.
    assert all(r["ratio_deviation_first"] < 1e-3 for r in records if "ratio_deviation_first" in r)
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    assert "| all | 12 |" in summary
    assert "reloaded into the stock pipeline" in summary


def test_the_resolved_config_runs_again(finished):
    config = yaml.safe_load((finished[0] / "config.yaml").read_text(encoding="utf-8"))
    assert config["model"]["lora"]["rank"] == 4
    assert config["method"]["clip_range"] > 0


def test_eval_repeats_the_run_s_own_figures(finished):
    folder, _ = finished
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    wanted = {
        (r["reward"], w): r[k]
        for r in summary
        if r["subset"] == "all"
        for k, w in [("before", "base"), ("after", "ema")]
    }
    for weights in ("base", "ema"):
        result = flowrl("eval", folder, "--weights", weights)
        assert result.returncode == 0, result.stderr
        row = next(line for line in result.stdout.splitlines() if " all " in line)
        for name in ("shapes_partial", "shapes_strict"):
            assert f"{wanted[name, weights]:.3f}" in row


def test_sample_writes_a_picture(finished, tmp_path):
    out = tmp_path / "grid.png"
    result = flowrl("sample", "a red circle", "three squares", "--run", finished[0], "--out", out, "--steps", 4)
    assert result.returncode == 0, result.stderr
    assert out.stat().st_size > 1000


def weights_of(folder):
    newest = max((folder / "checkpoints").iterdir())
    return load_file(newest / "policy.safetensors")


@pytest.mark.parametrize(
    "special",
    [
        ["model.lora.rank=4"],
        [],
        # several plans, shared prefixes, and weights of rewards that move
        [
            "method={name: granular_grpo, steps: {steps: [0, 1]}}",
            "reward_schedule={order: [shapes_partial, shapes_strict]}",
        ],
        ["method={name: ram, num_draws: 2, decay_rate: 0.2}", "model.lora.rank=4"],  # lagged copies, as adapters
    ],
    ids=["lora", "full", "granular", "ram"],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, special):
    extra = ["optimizer.ema_decay=0.9", "optimizer.schedule=cosine", *special]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert flowrl("train", *SMALL, *extra, f"output_dir={whole}").returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl.cli", "train", *SMALL, *extra, f"output_dir={killed}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 200
    while not (killed / "checkpoints" / "000002").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "summary.md").exists(), "the run was over before it could be killed"
    result = flowrl("train", "--resume", killed)
    assert result.returncode == 0, result.stderr
    assert "resuming" in result.stdout
    ours, theirs = weights_of(killed), weights_of(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@contextmanager
def running(*arguments, until, **options):
    """A run as a process, from the moment that the file `until` exists; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl.cli", "train", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **options,
    )
    deadline = time.monotonic() + 200
    try:
        while not until.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_saves_says_how_to_go_on_and_ends_with_the_shell_s_code(tmp_path, name, code):
    folder = tmp_path / "run"
    many = [*SMALL, "iterations=500", "log.checkpoint_every=0", f"output_dir={folder}"]
    with running(*many, until=folder / "checkpoints" / "000000" / "manifest.json") as process:
        time.sleep(1)
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"go on with `flowrl train --resume {folder}`" in err
    assert "Traceback" not in out + err
    done = int(max(path.name for path in (folder / "checkpoints").iterdir()))
    assert f"iteration {done} of 500 is saved" in err
    result = flowrl("train", "--resume", folder, f"iterations={done + 1}")
    assert result.returncode == 0, result.stderr
    assert f"iterations: 500 until now, {done + 1} from here on" in result.stdout


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_goes_on(tmp_path):
    folder = tmp_path / "run"
    with running(*SMALL, "iterations=500", f"output_dir={folder}", until=folder / ".owner.json") as process:
        second = flowrl("train", *SMALL, "seed=2", f"output_dir={folder}")
        while not any(folder.glob("checkpoints/*/manifest.json")) and process.poll() is None:
            time.sleep(0.01)
        resumed = flowrl("train", "--resume", folder)
        assert process.poll() is None
    for result in (second, resumed):
        assert result.returncode == 2
        assert f"is in use by process {process.pid} on" in result.stderr


def test_a_full_disk_is_one_line_and_leaves_no_partial_folder(tmp_path):
    """A file may have a megabyte at most; all weights have more."""
    result = flowrl(
        "train",
        *SMALL,
        "output_dir=run",
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "error cannot write the checkpoint run/checkpoints/000000: " in result.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_any_category_comes_through_any_locale(tmp_path):
    prompts = tmp_path / "eval.jsonl"
    prompts.write_text('{"prompt": "a red circle", "category": "颜色"}\n', encoding="utf-8")
    env = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    given = [*SMALL, "iterations=1", f"data.eval={prompts}", "eval.num_prompts=null", f"output_dir={tmp_path / 'run'}"]
    result = flowrl("train", *given, env=env)
    assert result.returncode == 0, result.stderr
    assert "| 颜色 | 1 |" in (tmp_path / "run" / "summary.md").read_text(encoding="utf-8")
    result = flowrl("eval", tmp_path / "run", env=env)
    assert result.returncode == 0, result.stderr
    assert "\\u989c\\u8272" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer.learning_rte=1"], "did you mean 'learning_rate'?"),
        (["--optimizer.lrr=1"], "unknown key 'optimizer.lrr'"),
        (["iterations=many"], "iterations='many'"),
        (["rollout.group_size=1"], "a group needs at least 2 samples"),
        (["method.steps.range=[6,12]"], "leaves the schedule"),
        (["method.noise_level=0"], "method.noise_level=0 makes steps deterministic"),
        (["data.train=none.txt"], "no prompt file 'none.txt'"),
        (["rewards.shapes_strikt=1"], "unknown reward 'shapes_strikt'"),
        (["nonsense"], "no config 'nonsense'"),
        (["--resume", "nowhere"], "'nowhere' is not the folder of a run"),
        (["--resume", "$NO_SUCH_NAME/run"], "the environment has no 'NO_SUCH_NAME'"),
    ],
)
def test_bad_input_is_refused_at_once_and_leaves_nothing(tmp_path, arguments, message):
    output = [] if "--resume" in arguments else [f"output_dir={tmp_path / 'run'}"]
    result = flowrl("train", *arguments, *output, timeout=20, cwd=tmp_path)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_config_is_found_by_its_path_even_with_an_equals_sign(tmp_path, monkeypatch):
    path = tmp_path / "lr=1" / "config.yaml"
    path.parent.mkdir()
    path.write_text("seed: 5\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    for written in (str(path), "~/lr=1/config.yaml"):
        assert _split([written, "output_dir=a=b"]) == (written, ["output_dir=a=b"])
    with pytest.raises(ConfigError, match="expected one config"):
        _split([str(path), "default"])


@pytest.mark.parametrize(
    "command", [["eval"], ["sample", "a", "--run"], ["pairs", "out", "--run"], ["train", "--resume"]]
)
def test_every_path_of_the_command_line_is_expanded(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setenv("WHERE", str(tmp_path))
    with pytest.raises(SystemExit):
        main([*command, "$WHERE/none"])
    assert f"'{tmp_path}/none' is not the folder of a run" in capsys.readouterr().err


def test_an_unusable_output_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    result = flowrl("train", f"output_dir={tmp_path / 'file' / 'run'}", timeout=20)
    assert result.returncode != 0
    assert "output_dir=" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reward_that_fails_ends_the_run_with_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def red(prompts, completions, **columns):\n    raise RuntimeError('no scorer')\n", encoding="utf-8"
    )
    result = flowrl("train", *SMALL, "rewards={'mine:red': 1}", "output_dir=run", cwd=tmp_path)
    assert result.returncode != 0
    assert "reward 'mine:red' failed: RuntimeError: no scorer" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reward_of_one_s_own_in_five_lines_and_a_picture_without_it(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\n\ndef red(prompts, completions, **columns):\n"
        "    return [float(np.asarray(image)[..., 0].mean()) / 255 for image in completions]\n",
        encoding="utf-8",
    )
    result = flowrl("train", *SMALL[1:], "rewards={'mine:red': 1}", "iterations=1", "output_dir=run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "after:  mine:red" in result.stdout
    (tmp_path / "mine.py").unlink()
    result = flowrl("sample", "a red circle", "--run", "run", "--out", "grid.png", "--steps", 2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "grid.png").exists()


def test_a_reward_that_ends_the_process_is_no_success(tmp_path):
    (tmp_path / "leave.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    result = flowrl("train", "rewards={'leave:x': 1}", "output_dir=run", cwd=tmp_path)
    assert result.returncode == 2
    assert "reward 'leave:x' cannot be loaded: SystemExit: 0" in result.stderr


def test_calibrate_moves_each_level_and_prints_what_to_set():
    settings = [*SMALL, "method={name: dense_grpo, transition: cps, steps: {kind: all, stop: 2}}"]
    result = flowrl("calibrate", *settings, "--rounds", 2, "--step", 0.05, "--tolerance", 1)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("round 1: 0.70 (+")
    last = yaml.safe_load(result.stdout.splitlines()[-1].partition("=")[2])
    assert len(last) == 3
    assert all(level in (0.65, 0.75) for level in last[:2]), "both moved by the step"


def test_methods_tells_the_deviations_of_one_and_the_table_of_the_docs():
    one = flowrl("methods", "turning_point_grpo")
    assert "arXiv 2602.06422" in one.stdout and "Deviations from the code:" in one.stdout
    wrong = flowrl("methods", "turning_point")
    assert wrong.returncode == 2 and "did you mean 'turning_point_grpo'" in wrong.stderr
    table = flowrl("methods", "--markdown").stdout
    assert table.strip() in (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command", [["methods"], ["rewards"], ["doctor"], ["--version"], ["--help"], ["train", "--help"]]
)
def test_lists_and_help(command):
    result = flowrl(*command)
    assert result.returncode == 0, result.stderr
    wanted = {"methods": "flow_grpo_fast", "rewards": "shapes_strict", "doctor": "diffusers", "--version": "flowrl 0"}
    assert wanted.get(command[0], "Usage") in result.stdout
    assert Path.cwd().exists()
