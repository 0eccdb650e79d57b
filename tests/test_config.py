from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from flowrl.catalog import METHODS, find_model, find_prompts
from flowrl.config import Config, load_config
from flowrl.errors import ConfigError
from flowrl.preflight import check_files

CONFIGS = sorted(Path(str(files("flowrl.configs"))).glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(path):
    config = load_config(path)
    assert find_prompts(config.data.train).is_file()
    assert find_prompts(config.data.eval).is_file()
    assert find_model(config.model.path)


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_is_reachable_by_its_name(name):
    needs = ["method.steps.splits=[0,1,3]"] if name == "branch_grpo" else []  # 8 samples are a tree with 3 splits
    needs += ["data.pairs=somewhere"] if METHODS.load(name).needs_data else []
    config = load_config(None, [f"method={name}", *needs])
    assert config.method.name == name
    assert type(config.method) is METHODS.load(name)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rte=1", "unknown key 'optimizer.learning_rte'; did you mean 'learning_rate'?"),
        ("--optimizer.lrr=1", "unknown key 'optimizer.lrr'"),
        ("learning_rate=1", "unknown key 'learning_rate'; did you mean 'optimizer.learning_rate'?"),
        ("iteration=1", "unknown key 'iteration'; did you mean 'iterations'?"),
        ("method.clip_rang=1", "unknown key 'method.clip_rang'; did you mean 'clip_range'?"),
        ("model.lora.rnk=3", "unknown key 'model.lora.rnk'; did you mean 'rank'?"),
        ("iterations=many", "iterations='many'"),
        ("iterations=0", "iterations=0"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate=-1"),
        ("rollout.group_size=1", "rollout.group_size=1: advantages compare samples of one prompt"),
        ("optimizer.updates_per_rollout=7", "does not divide"),
        ("method.noise_level=0", "method.noise_level=0 makes steps deterministic, but method.name="),
        ("method.steps.range=[4,9]", "method.steps.range=[4, 9] leaves the schedule"),
        ("method={name: flow_grpo, steps: {size: 3}}", "kind all has no such key, but window and sliding have"),
        ("method={name: flow_grpo, strides: [2]}", "method.strides is read with method.credit=granularities only"),
        ("method={name: pref_grpo, steps: singular}", "trains none; 1 trains all"),
        ("method.noise_level=3", "method.noise_level=3: input should be less than or equal to 2"),
        ("method={name: mix_grpo, credit: increments, steps: {tail_ratio: 0.5}}", "without method.steps.tail_ratio"),
        ("method.steps.sizee=5", "unknown key 'method.steps.sizee'; did you mean 'size'?"),
        ("method.steps.kind=windo", "unknown method.steps.kind 'windo'; did you mean 'window'?"),
        ("method.steps.size=many", "method.steps.size='many'"),
        ("reward_schedule={order: [shapes_partial, shapes_strct]}", "did you mean 'shapes_strict'?"),
        ("method.steps.size=50", "method.steps.size=50 does not fit"),
        ("method=flow_grop", "unknown method 'flow_grop'; did you mean 'flow_grpo'?"),
        ("model.family=sd33", "did you mean 'sd3'?"),
        ("rewards={}", "at least one is needed"),
        ("rewards={shapes_strict: 0}", "all weights are 0"),
        ("rewards.shapes_strct=1", "unknown reward 'shapes_strct'; did you mean 'shapes_strict'?"),
        ("rewards={'nowhere_at_all:x': 1}", "reward 'nowhere_at_all:x' cannot be loaded: ModuleNotFoundError"),
        ("rewards={'math:pi': 1}", "reward 'math:pi' is a float, not a function or class"),
        ("optimizer.betas=[2, 0.9]", "optimizer.betas.0=2"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate=inf"),
        ("method.noise_level=1.5", "with method.transition=cps at most 1"),
        ("rewards={'math:nothing': 1}", "module 'math' has no attribute 'nothing'"),
        ("seed", "is not of the form key=value"),
    ],
)
def test_bad_settings_are_refused_with_a_way_out(override, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert message in str(error.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        load_config(None, ["iterations=x", "sed=1", "optimizer.eps=-1"])
    assert len(str(error.value).splitlines()) == 3


def test_overrides_are_yaml():
    config = load_config(None, ["optimizer.learning_rate=1e-5", "model.lora.rank=8", "method.steps.range=[1, 5]"])
    assert config.optimizer.learning_rate == 1e-5
    assert config.model.lora.rank == 8
    assert config.method.steps.range == (1, 5)


def test_one_reward_of_a_list_can_be_overridden():
    config = load_config({**load_config().model_dump(), "method": "flow_grpo"}, ["rewards.shapes_partial=0.3"])
    assert [(reward.name, reward.weight) for reward in config.rewards] == [
        ("shapes_strict", 1.0),
        ("shapes_partial", 0.3),
    ]


@pytest.mark.parametrize("text", ["{a: [", "- a\n- b\n"])
def test_files_that_are_no_config_are_named(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="bad.yaml"):
        load_config(path)


def test_a_config_survives_being_written(tmp_path):
    config = load_config(None, ["model.lora.rank=8", "seed=5"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    assert load_config(path) == config


def test_every_field_is_documented():
    def sections(model):
        yield model
        for field in model.model_fields.values():
            for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(candidate, type) and hasattr(candidate, "model_fields"):
                    yield from sections(candidate)

    for model in [*sections(Config), *(METHODS.load(name) for name in METHODS)]:
        assert model.__doc__
        for name, field in model.model_fields.items():
            nested = hasattr(field.annotation, "model_fields")
            inherited = any(name in getattr(base, "model_fields", {}) for base in model.__mro__[1:])
            assert field.description or nested or inherited or name in ("name", "method", "rewards"), (model, name)


def test_models_are_found_or_named(tmp_path):
    assert find_model("someone/a-hub-id") == "someone/a-hub-id"
    assert (Path(find_model("shapes-sd3")) / "model_index.json").is_file()
    with pytest.raises(ConfigError, match="no model './nowhere'"):
        find_model("./nowhere")
    with pytest.raises(ConfigError, match="did you mean 'shapes-sd3'"):
        find_model("shape-sd3")
    with pytest.raises(ConfigError, match="is not a pipeline folder"):
        find_model(str(tmp_path))


def test_files_are_checked_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="no prompt file 'prompts/none.txt'"):
        check_files(load_config(None, ["data.train=prompts/none.txt"]))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="no prompts in it"):
        check_files(load_config(None, [f"data.train={empty}"]))
    taken = tmp_path / "run"
    taken.mkdir()
    (taken / "config.yaml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists already"):
        check_files(load_config(None, [f"output_dir={taken}"]))
    fresh = tmp_path / "a" / "b"
    check_files(load_config(None, [f"output_dir={fresh}"]))
    assert not fresh.parent.exists()
