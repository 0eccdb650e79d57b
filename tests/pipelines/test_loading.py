"""Whatever is wrong with a model, loading it says so in one line: the model, the part, and the way out."""

import json
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from flowrl.pipelines.loading import load_pipeline, one_line
from flowrl.pipelines.sd3 import SD3Adapter
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5EncoderModel

from flowrl.catalog import PIPELINE_CLASSES, PIPELINES, find_model
from flowrl.errors import ConfigError
from flowrl.model_folder import check_image_size, check_model_folder

VAE, TEXT = "vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
SHARD = "diffusion_pytorch_model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path, shapes_path):
    """A copy of the embedded model, to be broken."""
    return Path(shutil.copytree(find_model(shapes_path), tmp_path / "model"))


def refused(path):
    """What is said, and that it is one line."""
    with pytest.raises(ConfigError) as caught:
        SD3Adapter.load(str(path))
    assert "\n" not in str(caught.value)
    assert repr(str(path)) in str(caught.value)
    return str(caught.value)


def refused_unloaded(path):
    """The same, where the check of the files alone finds it, at once and in the same words."""
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        check_model_folder(str(path), ["StableDiffusion3Pipeline"])
    assert time.monotonic() - begin < 1
    assert refused(path) == str(caught.value)
    return str(caught.value)


def edit_weights(path, change):
    tensors = load_file(path)
    change(tensors, next(iter(sorted(tensors))))
    save_file(tensors, path, metadata={"format": "pt"})


def write(path, text):
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", ["runs/model", "stabilityai/stable-diffusion-3.5-medium"])
def test_a_name_that_is_no_folder_and_not_cached_says_so_while_the_hub_is_out_of_reach(name):
    said = refused_unloaded(name)
    assert "neither a folder here nor in the cache, and the hub cannot be reached (HF_HUB_OFFLINE is set)" in said
    assert "point model.path to a pipeline folder" in said
    assert f"hf download {name}" in said


def test_a_hub_that_fails_is_one_line_too(monkeypatch):
    def download(*arguments, **options):
        raise OSError("401 Client Error.\nAccess to model a/b is restricted. You must log in.")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(StableDiffusion3Pipeline, "download", download)
    assert "the hub cannot be reached (OSError: 401 Client Error)" in refused("a/b")


def test_a_model_in_the_cache_is_checked_like_a_folder(folder, monkeypatch):
    (folder / VAE).unlink()
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: str(folder / "model_index.json"))
    assert refused_unloaded("some/model").startswith("model 'some/model': vae: no weights")


def test_a_folder_that_is_no_pipeline(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert refused("a/b") == "'a/b' is not a pipeline folder (no model_index.json in it)"


def test_weights_of_a_variant_are_loaded_and_it_is_said(folder, caplog):
    plain = SD3Adapter.load(str(folder)).denoiser.state_dict()
    for path in folder.rglob("*.safetensors"):
        path.rename(path.with_name(f"{path.stem}.fp16.safetensors"))
    with caplog.at_level(logging.WARNING, "flowrl"):
        found = SD3Adapter.load(str(folder)).denoiser.state_dict()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert f"{folder / 'vae'}: loading the fp16 variant, there is no other" in caplog.text


@pytest.mark.parametrize(
    "part", ["vae", "tokenizer", "scheduler", "text_encoder", "text_encoder_2", "tokenizer_2", "transformer"]
)
def test_a_part_without_a_folder(folder, part):
    shutil.rmtree(folder / part)
    assert f"{part}: model_index.json names it, but it has no folder; download" in refused_unloaded(folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("vae/config.json", "vae/config.json is missing"),
        ("text_encoder/config.json", "text_encoder/config.json is missing"),
        ("scheduler/scheduler_config.json", "scheduler/scheduler_config.json is missing"),
        ("tokenizer/tokenizer_config.json", "tokenizer/tokenizer_config.json is missing"),
        ("tokenizer/tokenizer.json", "tokenizer: no vocabulary (one of tokenizer.json, vocab.json"),
        (VAE, "vae: no weights (diffusion_pytorch_model.safetensors)"),
        (TEXT, "text_encoder: no weights (model.safetensors)"),
    ],
)
def test_a_part_without_one_of_its_files(folder, file, message):
    (folder / file).unlink()
    assert message in refused_unloaded(folder)


@pytest.mark.parametrize("file", ["model_index.json", "vae/config.json", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize(("text", "message"), [('{"a":', "is not JSON"), ("[]", "holds a list, not an object")])
def test_broken_json(folder, file, text, message):
    write(folder / file, text)
    assert f"{file} {message}" in refused_unloaded(folder)


def test_an_index_that_names_a_missing_shard(folder):
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    write(weights.with_name(f"{weights.name}.index.json"), json.dumps({"metadata": {}, "weight_map": {"a": SHARD}}))
    assert f"transformer: the index of its weights names {SHARD}, which is missing" in refused_unloaded(folder)


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
@pytest.mark.parametrize("file", [VAE, TEXT])
def test_weights_cut_short(folder, file, share):
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[: int(share * len(whole))])
    part, name = file.split("/")
    assert f"{part}: {name} is cut short or damaged" in refused_unloaded(folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (VAE, "vae: cannot be loaded (ValueError: Cannot load because decoder.conv_in.bias expected shape"),
        (TEXT, "position_embedding.weight of shape (3, 5), config.json wants (12, 64)"),
    ],
)
def test_weights_of_the_wrong_shape(folder, file, message, capfd):
    edit_weights(folder / file, lambda tensors, name: tensors.update({name: torch.zeros(3, 5)}))
    assert message in refused(folder)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (VAE, "vae: its weights lack decoder.conv_in.bias; download"),
        (TEXT, "text_encoder: its weights lack text_model.embeddings.position_embedding.weight; download"),
    ],
)
def test_weights_that_are_missing_are_not_made_up(folder, file, message):
    edit_weights(folder / file, lambda tensors, name: tensors.pop(name))
    assert message in refused(folder)


def test_weights_that_no_module_takes_are_told(folder, caplog):
    edit_weights(folder / VAE, lambda tensors, name: tensors.update(spare=torch.zeros(1)))
    SD3Adapter.load(str(folder))
    assert f"{folder / 'vae'}: ignored weights spare" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("file", "message"),
    [
        (VAE, "vae: its weight decoder.conv_in.bias has values that are not finite in torch.float32"),
        (
            TEXT,
            "text_encoder: its weight text_model.embeddings.position_embedding.weight has values that are not finite",
        ),
    ],
)
def test_weights_that_are_not_finite(folder, file, message, value):
    edit_weights(folder / file, lambda tensors, name: tensors[name].view(-1)[:1].fill_(value))
    assert message in refused(folder)


def test_weights_too_large_for_the_dtype(folder):
    edit_weights(folder / VAE, lambda tensors, name: tensors[name].view(-1)[:1].fill_(1e5))
    SD3Adapter.load(str(folder))
    with pytest.raises(ConfigError, match="not finite in torch.float16; or set model.dtype=float32 if"):
        SD3Adapter.load(str(folder), dtype=torch.float16)


def set_class(folder, name):
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    write(folder / "model_index.json", json.dumps(index | {"_class_name": name}))


@pytest.mark.parametrize("name", ["FluxPipeline", "StableDiffusionPipeline"])
def test_another_pipeline_class_is_refused(folder, name):
    set_class(folder, name)
    said = refused_unloaded(folder)
    assert f"model_index.json says {name}, this model family needs StableDiffusion3Pipeline" in said


def test_a_subclass_of_one_s_own_is_fine(folder):
    set_class(folder, "MyOwnPipeline")
    assert isinstance(SD3Adapter.load(str(folder)).pipe, StableDiffusion3Pipeline)


def test_pickles_are_refused(folder):
    tensors = load_file(folder / VAE)
    torch.save(tensors, (folder / VAE).with_suffix(".bin"))
    (folder / VAE).unlink()
    said = refused_unloaded(folder)
    assert "vae: only weights in .bin files, which are pickles and can run code; convert them to safetensors" in said


def test_a_class_that_the_library_does_not_have(folder):
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    write(folder / "model_index.json", json.dumps(index | {"vae": ["diffusers", "AutoencoderOfTomorrow"]}))
    assert "vae: cannot be loaded (AttributeError: " in refused(folder)


def test_a_part_that_the_pipeline_needs_and_the_index_does_not_name(folder):
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index.pop("vae")
    write(folder / "model_index.json", json.dumps(index))
    assert "cannot be loaded (ValueError: " in refused(folder)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, KeyboardInterrupt])
def test_a_lack_of_memory_and_an_interrupt_stay_what_they_are(error):
    with pytest.raises(error), one_line("model", "vae"):
        raise error


def test_the_traceback_is_in_the_debug_log(caplog):
    caplog.set_level(logging.DEBUG, "flowrl")
    with pytest.raises(ConfigError, match="RuntimeError: it is so"), one_line("model", "vae"):
        raise RuntimeError("it is so. And more\nof it")
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards_are_loaded_of_either_library(folder, variant):
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    for name in ("transformer", "text_encoder"):
        shutil.rmtree(folder / name)
        getattr(pipe, name).save_pretrained(folder / name, max_shard_size="200KB", variant=variant)
        assert len(list((folder / name).glob("*-of-*.safetensors"))) > 1
    found = SD3Adapter.load(str(folder)).pipe
    for name in ("transformer", "text_encoder"):
        wanted = getattr(pipe, name).state_dict()
        assert all(torch.equal(value, wanted[key]) for key, value in getattr(found, name).state_dict().items())


def test_tied_weights_of_t5_are_not_missing(folder, caplog):
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=20)
    encoder = T5EncoderModel(config)
    encoder.save_pretrained(folder / "text_encoder_3")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    write(folder / "model_index.json", json.dumps(index | {"text_encoder_3": ["transformers", "T5EncoderModel"]}))
    found = SD3Adapter.load(str(folder)).pipe.text_encoder_3
    assert torch.equal(found.shared.weight, encoder.shared.weight)
    assert not caplog.text


def test_a_whole_model_passes_and_costs_no_torch(shapes_path):
    code = (
        "import sys\nfrom flowrl.catalog import PIPELINE_CLASSES, find_model\n"
        "from flowrl.model_folder import check_image_size, check_model_folder\n"
        f"check_model_folder(find_model({shapes_path!r}), PIPELINE_CLASSES['sd3'])\n"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_catalog_names_the_class_that_each_adapter_loads(shapes_path):
    assert set(PIPELINE_CLASSES) == set(PIPELINES)
    assert type(SD3Adapter.load(shapes_path).pipe).__name__ in PIPELINE_CLASSES["sd3"]


def test_the_stock_loader_gives_the_same_weights(shapes_path):
    path = find_model(shapes_path)
    stock = StableDiffusion3Pipeline.from_pretrained(path, text_encoder_3=None, tokenizer_3=None)
    ours = load_pipeline(StableDiffusion3Pipeline, path, dtype=torch.float32)
    for name in ("vae", "text_encoder", "text_encoder_2", "transformer"):
        wanted, found = getattr(stock, name).state_dict(), getattr(ours, name).state_dict()
        assert all(torch.equal(wanted[key], found[key]) for key in wanted)
        assert not getattr(ours, name).training


def pipe_of(**config):
    """As much of a pipeline as sizes depend on: sample_size 8, no patches, 16 positions, a VAE of factor 4."""
    known = {"in_channels": 8, "sample_size": 8, "patch_size": 1, "pos_embed_max_size": 16}
    part = SimpleNamespace(config=SimpleNamespace(**known | config), requires_grad_=lambda flag: torch.nn.Identity())
    return SimpleNamespace(
        vae_scale_factor=4,
        set_progress_bar_config=lambda **options: None,
        transformer=part,
        vae=None,
        text_encoder=None,
        text_encoder_2=None,
        text_encoder_3=None,
    )


@pytest.mark.parametrize(
    ("size", "config", "message"),
    [
        ({"height": 35}, {}, "model.height=35 is not a multiple of 4, as this model needs; take 32 or 36"),
        ({"width": 35}, {}, "model.width=35 is not a multiple of 4, as this model needs; take 32 or 36"),
        ({"width": 36}, {"patch_size": 2}, "model.width=36 is not a multiple of 8, as this model needs; take 32 or 40"),
        ({"height": 10}, {"patch_size": 4}, "model.height=10 is not a multiple of 16, as this model needs; take 16"),
        ({"height": 512}, {}, "model.height=512: this model has positions for at most 64 pixels a side"),
        (
            {"height": 130},
            {"patch_size": 2},
            "model.height=130: this model has positions for at most 128 pixels a side",
        ),
    ],
)
def test_sizes_that_the_model_has_not(size, config, message):
    with pytest.raises(ConfigError) as caught:
        SD3Adapter(pipe_of(**config), **size)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("height", "width", "message"),
    [
        (35, None, "model.height=35 is not a multiple of 4, as this model needs; take 32 or 36"),
        (None, 512, "model.width=512: this model has positions for at most 64 pixels a side"),
        (None, None, ""),
        (64, 36, ""),
    ],
)
def test_sizes_are_checked_before_anything_is_loaded(shapes_path, height, width, message):
    said = ""
    try:
        check_image_size(find_model(shapes_path), height, width)
    except ConfigError as error:
        said = str(error)
    assert said == message


def test_sizes_that_the_model_has():
    assert SD3Adapter(pipe_of()).image_size == (32, 32)
    assert SD3Adapter(pipe_of(), height=36, width=64).image_size == (36, 64)
    assert SD3Adapter(pipe_of(patch_size=2), height=128).image_size == (128, 32)
