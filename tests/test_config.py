import math
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowrl import yaml_text
from flowrl.catalog import METHODS, find_model, find_prompts
from flowrl.config import Config, load_config, load_run_config
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
        ("iterations=true", "iterations=True: input should be a valid integer"),
        ("iterations=1:30", "iterations='1:30': input should be a valid integer"),
        ("iterations=4.5", "iterations=4.5: input should be a valid integer"),
        ("iterations='4'", "iterations='4': input should be a valid integer"),
        ("optimizer.warmup_steps=yes", "optimizer.warmup_steps='yes': input should be a valid integer"),
        ("optimizer.learning_rate=true", "optimizer.learning_rate=True: input should be a valid number"),
        ("optimizer.betas=[true, 0.9]", "optimizer.betas.0=True: input should be a valid number"),
        ("rewards={shapes_strict: true}", "weight=True: input should be a valid number"),
        ("method.steps.size=true", "method.steps.size=True: input should be a valid integer"),
        ("method.noise_level=false", "method.noise_level=False: input should be a valid number"),
        ("log.tensorboard=1", "log.tensorboard=1: input should be a valid boolean"),
        ("log.tensorboard=yes", "log.tensorboard='yes': input should be a valid boolean"),
        ("model={path: a, path: b}", "the key 'path' stands in line 1 and again in line 1"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate=nan"),
        ("output_dir=$NO_SUCH_NAME/x", "output_dir='$NO_SUCH_NAME/x': the environment has no 'NO_SUCH_NAME'"),
        ("data.eval=${NO_SUCH_NAME}", "data.eval='${NO_SUCH_NAME}': the environment has no 'NO_SUCH_NAME'"),
        ("output_dir=~no_such_user/x", "no home of a user 'no_such_user'"),
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


fuzz = settings(derandomize=True, deadline=None, max_examples=100)
TEXT_FIELDS = ("output_dir", "model.path", "data.train", "data.eval", "data.pairs")


def value_of(config, key):
    for name in key.split("."):
        config = getattr(config, name)
    return config


def test_scalars_of_yaml_are_those_of_its_core_schema():
    read = yaml_text.load("[true, FALSE, on, no, y, 1:30, 2026-12-07, 010, 0o17, 0x1f, 1_000, =]", "x")
    assert read == [True, False, "on", "no", "y", "1:30", "2026-12-07", 10, 15, 31, "1_000", "="]
    numbers = yaml_text.load("[1e-4, 1e3, .5, -2., 1.5E+2, .inf, -.INF]", "x")
    assert numbers == [1e-4, 1000, 0.5, -2, 150, math.inf, -math.inf]
    assert all(isinstance(number, float) for number in numbers)
    assert math.isnan(yaml_text.load(".nan", "x"))
    assert yaml_text.load("[null, ~, Null, ]", "x") == [None, None, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "x, line 3: not YAML: the key 'a' stands in line 1 and again in line 3"),
        ("a:\n  - b: {c: 1,\n    c: 2}\n", "x, line 3: not YAML: the key 'c' stands in line 2 and again in line 3"),
        ("a: &b {c: 1}\nd:\n  <<: *b\n", "x, line 3: not YAML: << is not read; write the keys out"),
        ("[a]: 1", "x, line 1: not YAML: a key must be text"),
        ("a: !!timestamp 2026-12-07", "x, line 1: not YAML: could not determine a constructor"),
        ("a: !!int b", "x: not YAML"),
        ('a: "\\ud800"', "x: not YAML"),
        ("a: " + "[" * 5000, "x: not YAML"),
        ("a: " + "1" * 5000, "x: not YAML"),
        ("a: \0", "x: not YAML"),
        ("a: [1", "x, line 1: not YAML: expected ',' or ']'"),
    ],
)
def test_yaml_that_is_not_read_is_refused_with_its_line(text, message):
    with pytest.raises(ConfigError) as error:
        yaml_text.load(text, "x")
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


odd_text = st.sampled_from(["1e3", "on", "2026-12-07", "null", "~", "", "<<", "1:30", "08", "=", ".inf", "a: b", "#"])
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | odd_text,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | odd_text, inner),
)


@fuzz
@given(trees, st.sampled_from([None, False, True]))
def test_what_is_dumped_is_loaded_again(tree, flow):
    assert yaml_text.load(yaml_text.dump(tree, flow=flow), "x") == tree


@given(odd_text)
def test_what_is_dumped_is_the_same_for_other_readers(text):
    assert yaml.safe_load(yaml_text.dump({"a": text})) == {"a": text}


def test_duplicate_keys_of_a_config_file_are_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1\nmodel: {path: a}\nseed: 2\n", encoding="utf-8")
    for read, source in ((load_config, path), (load_run_config, tmp_path)):
        with pytest.raises(ConfigError, match=r", line 3: .* the key 'seed' stands in line 1 and again in line 3"):
            read(source)


def test_integers_may_be_written_as_floats():
    config = load_config(None, ["iterations=1e3", "optimizer.warmup_steps=4.0", "optimizer.learning_rate=1"])
    assert (config.iterations, config.optimizer.warmup_steps, config.optimizer.learning_rate) == (1000, 4, 1.0)
    assert type(config.iterations) is int and type(config.optimizer.learning_rate) is float


@pytest.mark.parametrize("key", TEXT_FIELDS[:-1])
@pytest.mark.parametrize("text", ["my run #1", "2026-12-07", "1e3", "null", "true", "a: b", "[x", "", "it's", "'a' b"])
def test_a_text_takes_the_value_as_it_is_typed(key, text):
    assert value_of(load_config(None, [f"{key}={text}"]), key) == text


def test_a_quoted_text_is_what_stands_in_the_quotes():
    assert load_config(None, ["output_dir='a b'"]).output_dir == "a b"
    assert load_config(None, ['output_dir="a\\tb #1"']).output_dir == "a\tb #1"


@pytest.mark.parametrize("text", ["null", ""])
def test_null_is_nothing_where_a_text_may_be_missing(text):
    assert load_config(None, [f"data.pairs={text}"]).data.pairs is None


def test_a_text_of_a_method_takes_the_value_as_it_is_typed():
    with pytest.raises(ConfigError, match="unknown method '1e3'"):
        load_config(None, ["method.name=1e3"])


def test_the_last_of_two_overrides_holds():
    assert load_config(None, ["seed=1", "--seed=2"]).seed == 2


@pytest.mark.parametrize("key", TEXT_FIELDS)
def test_home_and_variables_are_expanded_in_every_path(key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("WHERE", "/data")
    more = ["method=sft"] if key == "data.pairs" else []
    for text, wanted in (("~/x", "/home/me/x"), ("$WHERE/x", "/data/x"), ("a${WHERE}b", "a/datab"), ("a~", "a~")):
        config = load_config(None, [f"{key}={text}", *more])
        assert value_of(config, key) == wanted
        assert yaml_text.dump(config.model_dump(mode="json")).count(wanted), "config.yaml holds the expanded path"


def test_home_and_variables_are_expanded_in_the_config_itself(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text("rewards: shapes_strict\nmethod: flow_grpo\nseed: 5\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WHERE", str(tmp_path))
    assert load_config("~/a.yaml").seed == load_config("$WHERE/a.yaml").seed == 5
    with pytest.raises(ConfigError, match="has no 'NO_SUCH_NAME'"):
        load_config("$NO_SUCH_NAME/a.yaml")


@pytest.mark.parametrize("key", ["data.train", "data.eval", "model.path", "output_dir"])
def test_names_too_long_for_a_file_are_refused(key):
    with pytest.raises(ConfigError, match="x" * 300):
        check_files(load_config(None, [f"{key}={'x' * 300}"]))


known = [
    f"{name}.{key}"
    for name, field in Config.model_fields.items()
    for key in getattr(field.annotation, "model_fields", {})
]
keys = st.sampled_from([*Config.model_fields, *known, "rewards.shapes_strict", "eval.rewards.x", "nope", "a..b", "<<"])
values = st.text() | odd_text | trees.map(lambda tree: yaml_text.dump(tree, flow=True))


@fuzz
@given(st.lists(st.tuples(keys, values), max_size=3))
@example([("seed", "!!bool x")])
@example([("seed", "1" * 5000)])
@example([("seed", "[" * 5000)])
@example([("rewards", "[{}]"), ("rewards.x", "1")])
def test_any_override_is_taken_or_refused(items):
    with suppress(ConfigError):
        assert isinstance(load_config(None, [f"{key}={value}" for key, value in items]), Config)


@fuzz
@given(st.sampled_from(TEXT_FIELDS[:-1]), st.text() | odd_text)
def test_any_text_is_taken_as_it_is_typed(key, text):
    special = text.startswith(("~", "'", '"')) or "$" in text or "\0" in text
    if not special:
        assert value_of(load_config(None, [f"{key}={text}"]), key) == text
