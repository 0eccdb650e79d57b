"""Checks all that a run touches on disk, before any model is loaded. Imports no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .catalog import PIPELINE_CLASSES, find_model, find_prompts
from .config import Config
from .core.pairs import read_pairs
from .core.prompts import check_categories, read_prompts
from .errors import ConfigError
from .folder import check_new, check_unused
from .model_folder import check_image_size, check_model_folder


def check_files(config: Config, *, resume: bool = False, writes: bool = True) -> None:
    """Checks all that a run touches on disk, before any model is loaded; creates nothing.

    Args:
        resume: the output folder is that of a run to go on with.
        writes: something is written to the output folder.

    Raises:
        ConfigError: a file is missing, or the output folder cannot be used.
    """
    if not config.data.pairs:
        read_prompts(find_prompts(config.data.train))
    judged = find_prompts(config.data.eval)
    check_categories(read_prompts(judged), judged)
    pairs = read_pairs(config.data.pairs) if config.data.pairs else None
    if pairs and config.group_size == 2 and not pairs.has_losers:
        raise ConfigError(
            f"data.pairs={config.data.pairs!r} has no losers, which method.name={config.method.name} needs"
        )
    model = find_model(config.model.path)
    check_model_folder(model, PIPELINE_CLASSES[config.model.family])
    check_image_size(model, config.model.height, config.model.width)
    if writes:
        check_unused(Path(config.output_dir))
    if writes and not resume:
        check_new(Path(config.output_dir))
    if config.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("log.tensorboard=true needs the extra: pip install 'flowrl-align[tensorboard]'")
