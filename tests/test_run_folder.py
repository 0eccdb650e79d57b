"""A run's folder: who owns it, what is tied to what, how a run stops, goes on, and is changed on the way."""

import json
import signal

import fake_rewards
import pytest
import torch
import yaml
from test_training import SMALL, same, weights

from flowrl.build import load_policy
from flowrl.config import load_config
from flowrl.errors import CheckpointError, ConfigError, FlowrlError, Interrupted, RewardError
from flowrl.folder import owned
from flowrl.run import train

DARK = "rewards={'fake_rewards:dark': 1}"


def at_call(call, what):
    """A reward whose call number `call` raises, exits, or sends a signal."""
    fake_rewards.AtCall.armed = True
    return f"rewards=[{{name: 'fake_rewards:AtCall', params: {{call: {call}, what: {what}}}}}]"


def start(folder, *overrides):
    return train(load_config(None, [*SMALL, DARK, f"output_dir={folder}", *overrides]))


def records(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def edit(folder, *keys, value):
    path = folder / "config.yaml"
    tree = node = yaml.safe_load(path.read_text(encoding="utf-8"))
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")


def summary(folder):
    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return next(record for record in found if record["subset"] == "all")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run with a LoRA; tests that change a run copy it."""
    return start(tmp_path_factory.mktemp("runs") / "done", "model.lora.rank=4", "optimizer.schedule=linear")


@pytest.fixture
def copied(done, tmp_path):
    import shutil

    return shutil.copytree(done, tmp_path / "copied")


# who owns the folder


def test_a_second_run_in_the_same_folder_is_told_who_holds_it(tmp_path):
    with owned(tmp_path / "run"), pytest.raises(ConfigError, match=r"is in use by process \d+ on "):
        start(tmp_path / "run")


def test_what_failed_before_there_was_anything_to_keep_does_not_block_the_next_try(tmp_path):
    with pytest.raises(RewardError):
        start(tmp_path / "run", at_call(1, "raise"))
    assert (tmp_path / "run" / "config.yaml").exists()
    start(tmp_path / "run")
    assert [record["iteration"] for record in records(tmp_path / "run")] == [0, 1, 2, 2]


def test_a_folder_with_something_else_in_it_is_not_taken(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists already"):
        start(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_is_not_taken_for_leftovers(copied):
    with pytest.raises(ConfigError, match="continue it with `flowrl train --resume"):
        start(copied)


# how it stops


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_stops_a_run_where_it_goes_on_with_the_same_bits(tmp_path, name, capsys):
    """In the rollout of the second iteration, with checkpoints written at the end only."""
    extra = [
        "log.checkpoint_every=0",
        "rollout.batch_size=4",
        "optimizer.ema_decay=0.9",
        "eval.every=1",
        "iterations=3",
    ]
    start(tmp_path / "whole", *extra)
    reward = at_call(6, name)
    with pytest.raises(Interrupted) as stop:
        start(tmp_path / "stopped", *extra, reward)
    assert stop.value.signal == getattr(signal, name)
    assert "iteration 1 of 3 is saved: go on with `flowrl train --resume" in capsys.readouterr().err
    train(resume=tmp_path / "stopped")
    assert same(weights(tmp_path / "whole", 3), weights(tmp_path / "stopped", 3))
    ours, theirs = ((tmp_path / f / "metrics.jsonl").read_bytes() for f in ("stopped", "whole"))
    assert ours.replace(b"AtCall", b"dark") == theirs


def test_an_evaluation_that_was_cut_short_is_made_up_for(tmp_path):
    """Calls of the reward: before training, iteration 1, the evaluation after it."""
    extra = ["eval.every=1", "eval.batch_size=2"]
    start(tmp_path / "whole", *extra)
    reward = at_call(5, "SIGINT")
    with pytest.raises(Interrupted):
        start(tmp_path / "stopped", *extra, reward)
    assert [("eval_n" in r, r["iteration"]) for r in records(tmp_path / "stopped")] == [(True, 0), (False, 1)]
    train(resume=tmp_path / "stopped")
    ours, theirs = ((tmp_path / f / "metrics.jsonl").read_bytes() for f in ("stopped", "whole"))
    assert ours.replace(b"AtCall", b"dark") == theirs


def test_a_signal_before_there_is_anything_to_save_leaves_the_folder_free(tmp_path, capsys):
    reward = at_call(1, "SIGINT")
    with pytest.raises(Interrupted):
        start(tmp_path / "run", reward, "eval.batch_size=2")
    assert "the same command starts again" in capsys.readouterr().err
    start(tmp_path / "run")


@pytest.mark.parametrize("what", ["raise", "exit"])
def test_a_reward_that_fails_costs_no_finished_iteration(tmp_path, what, capsys):
    reward = at_call(3, what)
    with pytest.raises(RewardError):
        start(tmp_path / "run", "log.checkpoint_every=15", reward)
    assert "iteration 1 of 2 is saved" in capsys.readouterr().err
    assert weights(tmp_path / "run", 1)


def test_a_fault_in_one_part_of_the_last_page_costs_that_part_only(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr("flowrl.last_page.export_policy", fail)
    with pytest.raises(FlowrlError, match="the training is done, but not everything could be written: the export: OSE"):
        start(tmp_path / "run")
    assert "| export | failed" in (tmp_path / "run" / "summary.md").read_text(encoding="utf-8")
    assert (tmp_path / "run" / "curves.png").exists()


# what is tied to what


def test_the_evaluation_before_is_made_again_when_its_prompts_changed(tmp_path, capsys):
    prompts = tmp_path / "eval.jsonl"
    lines = [json.dumps({"prompt": p}) for p in ("a red circle", "three squares", "a triangle", "two circles")]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    folder = start(tmp_path / "run", f"data.eval={prompts}", "eval.num_prompts=null")
    old = summary(folder)
    lines[:2] = [json.dumps({"prompt": "a blue square"})]  # one row replaced, one gone
    prompts.write_text("\n".join(lines), encoding="utf-8")
    train(resume=folder)
    assert "made again: prompts of data.eval changed since" in capsys.readouterr().out
    assert summary(folder)["n"] == 3 and summary(folder)["before"] != old["before"]
    found = [(record["iteration"], record.get("eval_n")) for record in records(folder)]
    assert found == [(0, 3), (1, None), (2, None), (2, 3)]
    fresh = start(tmp_path / "fresh", f"data.eval={prompts}", "eval.num_prompts=null")
    assert summary(fresh)["before"] == summary(folder)["before"]


def test_an_evaluation_file_that_was_cut_is_made_again(copied, capsys):
    (copied / "before.pt").write_bytes(b"PK")
    before = summary(copied)
    train(resume=copied)
    assert "made again: before.pt cannot be read" in capsys.readouterr().out
    assert summary(copied) == before


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("model", "lora", "alpha"), 8),
        (("model", "lora", "rank"), 8),
        (("model", "lora"), None),
        (("method",), "ram"),
        (("seed",), 1),
        (("optimizer", "learning_rate"), 1e-5),
        (("optimizer", "ema_decay"), 0.9),
        (("rewards",), {"fake_rewards:constant": 1}),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else None,
)
def test_what_would_make_another_training_is_refused(copied, keys, value):
    edit(copied, *keys, value=value)
    with pytest.raises(ConfigError, match=keys[0] if keys[0] != "method" else "method"):
        train(resume=copied)


def test_the_refusal_names_both_values_and_the_way_out(copied):
    edit(copied, "model", "lora", "alpha", value=8)
    for go_on in (lambda: train(resume=copied), lambda: load_policy(copied)):
        with pytest.raises(ConfigError, match=r"model\.lora\.alpha=8, .* trained with 64.*model\.start_from=.*copied"):
            go_on()


def test_other_prompts_under_the_same_name_are_refused(tmp_path):
    prompts = tmp_path / "train.txt"
    prompts.write_text("a red circle\nthree squares\n", encoding="utf-8")
    folder = start(tmp_path / "run", f"data.train={prompts}")
    prompts.write_text("a red circle\nfour squares\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="the training prompts: .* its contents changed"):
        train(resume=folder)


# what may change


def test_a_run_goes_on_under_new_settings_and_says_so(copied, capsys):
    again = ["iterations=3", "eval.num_prompts=5", "optimizer.batch_size=3", "log.grid_every=1"]
    train(None, again, resume=copied)
    out = capsys.readouterr().out
    assert "iterations: 2 until now, 3 from here on; the linear schedule of the learning rate now ends there" in out
    assert {(change["key"], change["from"], change["to"]) for change in records(copied, "changes.jsonl")} == {
        ("iterations", 2, 3),
        ("eval.num_prompts", 6, 5),
        ("optimizer.batch_size", 72, 3),
        ("log.grid_every", 0, 1),
    }
    assert yaml.safe_load((copied / "config.yaml").read_text(encoding="utf-8"))["iterations"] == 3
    assert summary(copied)["n"] == 5
    assert "| iterations since iteration 2 | 3, before 2 |" in (copied / "summary.md").read_text(encoding="utf-8")
    train(resume=copied)  # nothing more to say
    assert len(records(copied, "changes.jsonl")) == 4


def test_fewer_iterations_than_are_done_are_refused(copied):
    with pytest.raises(ConfigError, match=r"iterations=1, but .* has done 2 already"):
        train(None, ["iterations=1"], resume=copied)


@pytest.mark.parametrize("lora", [["model.lora.rank=4"], []], ids=["lora", "full"])
def test_a_new_run_starts_from_the_weights_of_another(tmp_path, lora):
    first = start(tmp_path / "first", *lora, "optimizer.learning_rate=1e-3", "method.beta=0.1")
    again = [*lora, f"model.start_from={first}", "optimizer.learning_rate=1e-5", "method.beta=0.1"]
    second = start(tmp_path / "second", *again)
    assert summary(second)["before"] == summary(first)["after"] != summary(first)["before"]
    assert same(weights(first, 2), weights(second, 0))
    assert records(second)[1]["kl"] > 0, "the reference stays the model itself"
    policy, _ = load_policy(second, weights="base")
    assert same(dict(policy.trainable_parameters()), weights(first, 2))


def test_a_run_that_started_from_another_goes_on_without_it(tmp_path, copied):
    second = start(tmp_path / "second", "model.lora.rank=4", f"model.start_from={copied}")
    copied.rename(tmp_path / "away")
    train(None, ["iterations=3"], resume=second)
    assert load_policy(second)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (["model.lora.rank=8"], "trained a LoRA .*'rank': 4.* but this run trains a LoRA .*'rank': 8"),
        ([], "but this run trains all weights"),
    ],
)
def test_weights_of_another_kind_are_no_start(tmp_path, done, lora, message):
    with pytest.raises(ConfigError, match=message):
        start(tmp_path / "run", *lora, f"model.start_from={done}")
    assert not (tmp_path / "run").exists()


# rewards


def test_a_reward_is_built_once(tmp_path):
    fake_rewards.Counted.built = 0
    start(tmp_path / "run", "rewards={'fake_rewards:Counted': 1}", "eval.every=1", "log.grid_every=1")
    assert fake_rewards.Counted.built == 1


def test_a_reward_that_changes_what_it_is_given_changes_nothing(tmp_path):
    extra = ["log.checkpoint_every=0", "eval.every=1"]
    start(tmp_path / "a", "rewards={'fake_rewards:dark': 1}", *extra)
    start(tmp_path / "b", "rewards={'fake_rewards:greedy': 0, 'fake_rewards:dark': 1}", *extra)
    assert torch.is_grad_enabled()
    assert same(weights(tmp_path / "a", 2), weights(tmp_path / "b", 2))
    assert [r["rewards/fake_rewards:dark/mean"] for r in records(tmp_path / "a") if "reward" in r] == [
        r["rewards/fake_rewards:dark/mean"] for r in records(tmp_path / "b") if "reward" in r
    ]


def test_the_same_reward_with_other_params_is_not_silently_the_same():
    with pytest.raises(ConfigError, match="eval.rewards: 'fake_rewards:EveryThird' is a training reward with params"):
        load_config(
            None,
            [
                "rewards=[{name: 'fake_rewards:EveryThird', params: {kind: none}}]",
                "eval.rewards=[{name: 'fake_rewards:EveryThird', params: {kind: nan}}]",
            ],
        )


def test_a_run_without_whole_checkpoints_names_them(copied):
    for path in (copied / "checkpoints").iterdir():
        (path / "state.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no whole checkpoint to resume from; 000000: state\.pt has 0 bytes"):
        train(resume=copied)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        load_policy(copied)


def test_a_cut_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(copied, caplog):
    wanted = {name: value.clone() for name, value in weights(copied, 2).items()}  # no longer mapped
    (copied / "checkpoints" / "000002" / "policy.safetensors").write_bytes(b"")
    train(resume=copied)
    assert "000002 is broken (policy.safetensors has 0 bytes" in caplog.text
    assert same(wanted, weights(copied, 2))
