"""The weights of a policy: what is trained, the reference, and copies that lag behind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flowrl.errors import ConfigError
from flowrl.pipelines.base import PipelineAdapter, unmatched_targets


class TrainedModel:
    """The denoiser of a pipeline adapter, of which a LoRA or every weight is trained."""

    def __init__(self, adapter: PipelineAdapter):
        self.adapter = adapter
        self._frozen: nn.Module | None = None
        self._lagged: dict[str, dict[str, torch.Tensor]] = {}
        self._lagged_modules: dict[str, nn.Module] = {}
        self._lora = False

    @property
    def model(self) -> Any:
        """The denoiser."""
        return self.adapter.denoiser

    @model.setter
    def model(self, module: Any) -> None:
        self.adapter.denoiser = module

    def add_lora(self, rank: int, alpha: int, targets: list[str] | None = None, *, seed: int = 0) -> None:
        """Trains a LoRA (peft, Gaussian init); the model without it is the reference.

        Raises:
            ConfigError: a target matches no module.
        """
        from peft import LoraConfig

        targets = targets or self.adapter.lora_targets
        unmatched = unmatched_targets(self.model, targets)
        if unmatched:
            raise ConfigError(f"LoRA target {unmatched[0]!r} matches no module of {type(self.model).__name__}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model.add_adapter(
                LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=targets)
            )
        self._lora = True
        self._make_float32()

    def train_all(self, *, keep_reference: bool) -> None:
        """Trains every weight of the denoiser; the reference, if wanted, is a frozen copy."""
        if keep_reference:
            self._frozen = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.model.requires_grad_(True)
        self._make_float32()

    @property
    def is_lora(self) -> bool:
        """Whether a LoRA is trained, rather than all weights."""
        return self._lora

    def _make_float32(self) -> None:
        for _, parameter in self.trainable_parameters():
            parameter.data = parameter.data.float()

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters that the optimizer moves."""
        return ((name, value) for name, value in self.model.named_parameters() if value.requires_grad)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The model as it was before training: adapter off, or the frozen copy."""
        if self._lora:
            module = getattr(self.model, "module", self.model)
            module.disable_adapters()
            try:
                yield
            finally:
                module.enable_adapters()
        elif self._frozen is not None:
            trained, self.model = self.model, self._frozen
            try:
                yield
            finally:
                self.model = trained
        else:
            raise RuntimeError("no reference was kept: full fine-tuning with beta 0 makes no copy of the model")

    def keep_lagged(self, names: Sequence[str]) -> None:
        """Makes copies of the trained weights that follow them by `move_lagged`: LoRA adapters, or whole denoisers."""
        for name in names:
            if self._lora:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several are wanted
                    self.model.add_adapter(self.model.peft_config["default"], adapter_name=name)
                self.model.set_adapter("default")
                self._lagged[name] = {
                    key: dict(self.model.named_parameters())[key.replace(".default.", f".{name}.")]
                    for key, _ in self.trainable_parameters()
                }
            else:
                module = copy.deepcopy(self.model).requires_grad_(False).eval()
                self._lagged_modules[name] = module
                self._lagged[name] = {
                    key: dict(module.named_parameters())[key] for key, _ in self.trainable_parameters()
                }
            self.move_lagged(name, 0.0)

    @torch.no_grad()
    def move_lagged(self, name: str, decay: float) -> None:
        """copy <- decay copy + (1 - decay) trained weights."""
        trained = dict(self.trainable_parameters())
        for key, value in self._lagged[name].items():
            value.lerp_(trained[key].detach().to(value.dtype), 1 - decay)

    @property
    def lagged_weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of all lagged copies, by name of the copy and of the parameter."""
        return self._lagged

    @contextmanager
    def lagged(self, name: str) -> Iterator[None]:
        """Within it the model is a lagged copy; no weights are moved. Only without gradient."""
        if name in self._lagged_modules:
            trained, self.model = self.model, self._lagged_modules[name]
            try:
                yield
            finally:
                self.model = trained
            return
        module = getattr(self.model, "module", self.model)
        trainable = [parameter for _, parameter in self.trainable_parameters()]
        module.set_adapter(name)
        try:
            yield
        finally:
            module.set_adapter("default")  # peft switches requires_grad along
            for key, parameter in module.named_parameters():
                if f".{name}." in key:
                    parameter.requires_grad_(False)
            for parameter in trainable:
                parameter.requires_grad_(True)
