"""Loads a stock pipeline component by component; whatever is wrong with it becomes one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowrl.catalog import find_model
from flowrl.errors import ConfigError
from flowrl.model_folder import (
    AGAIN,
    Part,
    absent_components,
    check_model_folder,
    local_folder,
    missing_model,
    model_parts,
)

from .base import quiet_loading

logger = logging.getLogger("flowrl")


def load_pipeline(pipeline: type[Any], path: str, *, dtype: torch.dtype) -> Any:
    """The stock pipeline in a folder, a model that comes with flowrl, or a hub id.

    Raises:
        ConfigError: it cannot be loaded, or a weight is missing, of the wrong shape or not finite; one line that names
            the model, the component and the way out.
    """
    path = find_model(path)
    check_model_folder(path, [pipeline.__name__])
    with quiet_loading():
        folder = local_folder(path) or _download(pipeline, path)
        parts: dict[str, Any] = {}
        for part in model_parts(folder):
            if part.has_weights:
                with one_line(path, part.name):
                    parts[part.name] = _load_part(part, dtype)
        with one_line(path):
            return pipeline.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, **absent_components(folder), **parts
            )


@contextmanager
def one_line(model: str, part: str = "") -> Iterator[None]:
    """Makes one line of whatever a library raises while it loads; a lack of memory stays what it is.

    Raises:
        ConfigError: names the model, the component and what the library said; the traceback goes to the debug log.
    """
    place = f"model {model!r}: {part}: " if part else f"model {model!r}: "
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from None
    except Exception as error:
        logger.debug("%scannot be loaded", place, exc_info=True)
        raise ConfigError(f"{place}cannot be loaded ({_first_sentence(error)}); {AGAIN}") from None


def _download(pipeline: type[Any], path: str) -> Path:
    """The folder of a hub id, downloaded if it is not in the cache, and checked."""
    try:
        folder = pipeline.download(path, use_safetensors=True)
    except Exception as error:  # of requests, httpx, huggingface_hub or diffusers
        logger.debug("no download of %s", path, exc_info=True)
        raise ConfigError(f"model {path!r}: {missing_model(path, _first_sentence(error))}") from None
    check_model_folder(str(folder), [pipeline.__name__])
    return Path(folder)


def _load_part(part: Part, dtype: torch.dtype) -> nn.Module:
    """One network.

    Raises:
        ConfigError: see `load_pipeline`.
    """
    if part.variant:
        logger.warning("%s: loading the %s variant, there is no other", part.folder, part.variant)
    options: dict[str, Any] = {"ignore_mismatched_sizes": True} if part.library == "transformers" else {}
    module, info = getattr(import_module(part.library), part.class_name).from_pretrained(
        part.folder, dtype=dtype, variant=part.variant, use_safetensors=True, output_loading_info=True, **options
    )
    for name, found, wanted in info.get("mismatched_keys", ()):
        raise ConfigError(
            f"its weights have {name} of shape {tuple(found)}, config.json wants {tuple(wanted)}; {AGAIN}"
        )
    if info["missing_keys"]:
        raise ConfigError(f"its weights lack {_names(info['missing_keys'])}; {AGAIN}")
    if info["unexpected_keys"]:
        logger.warning("%s: ignored weights %s", part.folder, _names(info["unexpected_keys"]))
    bad = next((name for name, tensor in module.state_dict().items() if not _is_finite(tensor)), None)
    if bad:
        wider = "" if dtype == torch.float32 else " or set model.dtype=float32 if it is only too large for this type;"
        raise ConfigError(f"its weight {bad} has values that are not finite in {dtype};{wider} {AGAIN}")
    return module


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text.partition('. ')[0]}"


def _names(keys: Any) -> str:
    shown = sorted(keys)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are; the extremes tell, without a tensor of booleans as large as the weight."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
