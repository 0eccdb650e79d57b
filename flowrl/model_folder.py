"""Looks a pipeline folder over without loading it: within milliseconds, and without torch or diffusers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError

AGAIN = "download the model again, or save it again with pipe.save_pretrained(folder)"
_CONFIGS = {  # by a word in the name of the class; networks have a config.json
    "Scheduler": "scheduler_config.json",
    "Tokenizer": "tokenizer_config.json",
    "Processor": "preprocessor_config.json",
    "FeatureExtractor": "preprocessor_config.json",
}
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")


class Part(NamedTuple):
    """A component that `model_index.json` names, and the folder of its files."""

    name: str
    library: str
    class_name: str
    folder: Path

    @property
    def config(self) -> str:
        """Name of the file that describes it."""
        return next((name for word, name in _CONFIGS.items() if word in self.class_name), "config.json")

    @property
    def has_weights(self) -> bool:
        """Whether it is a network."""
        return self.config == "config.json" and self.library in ("diffusers", "transformers")

    @property
    def stem(self) -> str:
        """How the names of its weight files start."""
        return "diffusion_pytorch_model" if self.library == "diffusers" else "model"

    @property
    def variant(self) -> str | None:
        """None for weights under the plain name, else the variant (such as `fp16`) that is there instead."""
        plain, index = f"{self.stem}.safetensors", f"{self.stem}.safetensors.index"
        if (self.folder / plain).is_file() or (self.folder / f"{index}.json").is_file():
            return None
        names = sorted(path.name for path in self.folder.glob(f"{self.stem}.*"))
        single = [name.split(".")[1] for name in names if name.endswith(".safetensors") and name.count(".") == 2]
        sharded = [name.split(".")[3] for name in names if name.startswith(f"{index}.") and name.count(".") == 4]
        return next(iter([*sharded, *(name for name in single if "-of-" not in name)]), None)

    def weight_files(self) -> list[Path]:
        """Its weight files in safetensors; those that an index names, whether they are there or not."""
        middle = f".{self.variant}" if self.variant else ""
        index = self.folder / f"{self.stem}.safetensors.index{middle}.json"
        if index.is_file():
            return [self.folder / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
        single = self.folder / f"{self.stem}{middle}.safetensors"
        return [single] if single.is_file() else []


def model_parts(folder: Path) -> list[Part]:
    """The components that a pipeline folder says it has.

    Raises:
        ConfigError: its `model_index.json` cannot be read.
    """
    return [
        Part(name, value[0], value[1], folder / name)
        for name, value in _components(folder).items()
        if all(isinstance(word, str) for word in value)
    ]


def absent_components(folder: Path) -> dict[str, None]:
    """Components that a pipeline folder says it does not have, as arguments for `from_pretrained`."""
    return {name: None for name, value in _components(folder).items() if not any(value)}


def check_model_folder(path: str, pipelines: Sequence[str]) -> None:
    """Checks a model before anything of it is loaded: its class, its components, its files and their lengths.

    Args:
        path: a folder or hub id, as `flowrl.catalog.find_model` gives it. A hub id is looked up in the cache if the
            hub cannot be asked; else there is nothing to look at yet.
        pipelines: names of the pipeline classes that fit; a class that diffusers does not know passes, it may be
            a subclass of one's own.

    Raises:
        ConfigError: names the model, the component and the way out.
    """
    folder = local_folder(path)
    if folder is not None:
        try:
            _check_class(folder, pipelines)
            for part in model_parts(folder):
                _check_part(part)
        except ConfigError as error:
            raise ConfigError(f"model {path!r}: {error}") from None


def check_image_size(path: str, height: int | None, width: int | None) -> None:
    """Checks against the config files of a model, as far as they are here, whether it has images of that size.

    Args:
        path: as of `check_model_folder`.
        height, width: in pixels; None is the model's own.

    Raises:
        ConfigError: it has not; says what sizes there are.
    """
    folder = local_folder(path)
    if folder is None or not (folder / "transformer").is_dir():
        return
    denoiser, vae = (_read_json(folder / name / "config.json") for name in ("transformer", "vae"))
    factor = 2 ** (len(vae.get("block_out_channels", [0])) - 1)
    multiple = factor * denoiser.get("patch_size", 1)
    check_sides(height, width, multiple=multiple, num_positions=denoiser.get("pos_embed_max_size"))


def check_sides(height: int | None, width: int | None, *, multiple: int, num_positions: int | None) -> None:
    """Checks that each side is a whole number of patches of `multiple` pixels, and has no more than `num_positions`.

    Raises:
        ConfigError: says what sizes there are.
    """
    for name, size in (("height", height), ("width", width)):
        if size is None:
            continue
        if num_positions and size > multiple * num_positions:
            most = multiple * num_positions
            raise ConfigError(f"model.{name}={size}: this model has positions for at most {most} pixels a side")
        if size % multiple:
            below = size - size % multiple
            nearest = " or ".join(str(side) for side in (below, below + multiple) if side)
            raise ConfigError(
                f"model.{name}={size} is not a multiple of {multiple}, as this model needs; take {nearest}"
            )


def local_folder(path: str) -> Path | None:
    """The folder of a model: itself, or that of a hub id in the cache while offline; None where the hub can be asked.

    Raises:
        ConfigError: offline, and the model is not in the cache.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE:
        return None
    found = try_to_load_from_cache(path, "model_index.json")
    if isinstance(found, str):
        return Path(found).parent
    raise ConfigError(f"model {path!r}: {missing_model(path, 'HF_HUB_OFFLINE is set')}")


def missing_model(path: str, reason: str) -> str:
    """What to say of a hub id that cannot be had, and what to do."""
    return (
        f"neither a folder here nor in the cache, and the hub cannot be reached ({reason}); point model.path to a "
        f"pipeline folder, or download the model where there is a network: HF_HUB_OFFLINE=0 hf download {path}"
    )


def _components(folder: Path) -> dict[str, list[Any]]:
    entries = _read_json(folder / "model_index.json")
    return {name: value for name, value in entries.items() if isinstance(value, list) and len(value) == 2}


def _read_json(path: Path) -> dict[str, Any]:
    name = path.name if path.name == "model_index.json" else f"{path.parent.name}/{path.name}"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{name} is missing; {AGAIN}") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{name} is not JSON ({error}); {AGAIN}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} holds a {type(tree).__name__}, not an object; {AGAIN}")
    return tree


def _check_class(folder: Path, pipelines: Sequence[str]) -> None:
    found = _read_json(folder / "model_index.json").get("_class_name")
    if isinstance(found, str) and found not in pipelines and _is_of_diffusers(found):
        raise ConfigError(
            f"model_index.json says {found}, this model family needs {' or '.join(pipelines)}; "
            "choose another model.path, or the model.family that fits"
        )


def _is_of_diffusers(class_name: str) -> bool:
    """Whether diffusers has a class of that name, told without importing it."""
    spec = find_spec("diffusers")
    if spec is None or spec.origin is None:
        return False
    return f'"{class_name}"' in Path(spec.origin).read_text(encoding="utf-8")


def _check_part(part: Part) -> None:
    if not part.folder.is_dir():
        raise ConfigError(f"{part.name}: model_index.json names it, but it has no folder; {AGAIN}")
    for path in sorted({part.folder / part.config, *part.folder.glob("*.json")}):
        _read_json(path)
    if part.config == "tokenizer_config.json" and not any((part.folder / name).is_file() for name in _VOCABULARIES):
        raise ConfigError(f"{part.name}: no vocabulary (one of {', '.join(_VOCABULARIES)}); {AGAIN}")
    if part.has_weights:
        for problem in _weight_problems(part):
            raise ConfigError(f"{part.name}: {problem}")


def _weight_problems(part: Part) -> Iterator[str]:
    from safetensors import SafetensorError, safe_open

    files = part.weight_files()
    if not files and any(part.folder.glob("*.bin")):
        yield (
            "only weights in .bin files, which are pickles and can run code; convert them to safetensors where you "
            "trust them: pipe.save_pretrained(folder, safe_serialization=True)"
        )
    elif not files:
        yield f"no weights ({part.stem}.safetensors); {AGAIN}"
    for path in files:
        if not path.is_file():
            yield f"the index of its weights names {path.name}, which is missing; {AGAIN}"
            continue
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            yield f"{path.name} is cut short or damaged ({error}); {AGAIN}"
