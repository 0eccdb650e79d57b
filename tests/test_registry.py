import pytest

from flowrl.catalog import METHODS, find_config, find_model, find_prompts
from flowrl.config import load_config
from flowrl.errors import ConfigError
from flowrl.registry import Registry, import_string, suggest


def test_names_are_checked_without_importing():
    registry = Registry("thing", {"one": "nowhere:x", "two": "math:pi"})
    assert list(registry) == ["one", "two"]
    assert "one" in registry
    assert registry.load("two") == pytest.approx(3.14159, abs=1e-5)
    with pytest.raises(ValueError, match="unknown thing 'tow'; did you mean 'two'?"):
        registry.load("tow")
    with pytest.raises(ValueError, match="unknown thing 'zebra'; known: one, two"):
        registry.load("zebra")
    with pytest.raises(ValueError, match="thing 'one' is registered twice"):
        registry.register("one", "math:e")


@pytest.mark.parametrize("target", ["math", "math:", ":pi", "math:nothing"])
def test_bad_import_strings(target):
    with pytest.raises(ValueError, match="math|pi"):
        import_string(target)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("tp_grpo", "turning_point_grpo"),
        ("tpgrpo", "turning_point_grpo"),
        ("g2rpo", "granular_grpo"),
        ("G2RPO", "granular_grpo"),
        ("e_grpo", "entropy_grpo"),
        ("nft", "diffusion_nft"),
        ("dpo", "diffusion_dpo"),
        ("kto", "diffusion_kto"),
        ("dppo", "flow_dppo"),
        ("guard", "grpo_guard"),
        ("grpo_fast", "flow_grpo_fast"),
        ("Flow-GRPO", "flow_grpo"),
        ("flow_grpo_fats", "flow_grpo_fast"),
        ("ramm", "ram"),
    ],
)
def test_an_acronym_is_understood_as_the_papers_use_it_and_a_slip_as_before(name, wanted):
    assert suggest(name, list(METHODS)) == f"did you mean {wanted!r}?"


def test_an_acronym_of_several_names_or_of_none_is_not_guessed():
    assert suggest("d_x", ["dance_x", "dense_x"]) == "did you mean 'dense_x'?"  # similarity decides
    assert suggest("x", ["dance_x", "dense_x"]) == "known: dance_x, dense_x"
    assert suggest("", ["one", "two"]) == "known: one, two"


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (
            find_config,
            "tp_grpo_shapes",
            "no config 'tp_grpo_shapes': not a file; did you mean 'turning_point_grpo_shapes'?",
        ),
        (find_config, "nft_shapes", "no config 'nft_shapes': not a file; did you mean 'diffusion_nft_shapes'?"),
        (
            find_prompts,
            "shapes_eval.jsonl",
            "no prompt file 'shapes_eval.jsonl'; did you mean 'prompts/shapes_eval.jsonl'?",
        ),
        (find_model, "shapes", "no model 'shapes': neither a folder nor a hub id; did you mean 'shapes-sd3'?"),
    ],
)
def test_files_are_suggested_by_the_same_rule(find, name, message):
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "method.transition=flow_sd",
            "method.transition='flow_sd': expected one of flow_sde, dance_sde, cps; did you mean 'flow_sde'?",
        ),
        (
            "optimizer.schedule=cosin",
            "optimizer.schedule='cosin': expected one of constant, linear, cosine; did you mean 'cosine'?",
        ),
        (
            "model.dtype=fp32",
            "model.dtype='fp32': expected one of float32, bfloat16, float16; did you mean 'float32'?",
        ),
        ("device=gpu", "device='gpu': expected one of auto, cpu, cuda; did you mean 'cuda'?"),
        ("model.dtype=7", "model.dtype='7': expected one of float32, bfloat16, float16"),
        ("optimizer.lr=1", "unknown key 'optimizer.lr'; did you mean 'learning_rate'?"),
    ],
)
def test_a_value_of_a_list_is_answered_with_the_list_and_the_nearest(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config("default", [override])
    assert str(caught.value) == message
