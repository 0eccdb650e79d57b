"""What flowrl asks of a model family. An adapter wraps a stock pipeline and knows no method.

Shapes: `B` rows, `P` prompts, `T` steps; latents `(B, *latent_shape)`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
import transformers
from torch import nn


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts: named tensors, each with one row for each prompt, `(P, ...)`."""

    tensors: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def rows(self, index: torch.Tensor) -> Conditioning:
        """The rows `index (B,)`."""
        return Conditioning({name: value[index.to(value.device)] for name, value in self.tensors.items()})

    def expand(self, num_rows: int) -> Conditioning:
        """The one row of this, `num_rows` times."""
        return Conditioning({name: value.expand(num_rows, *value.shape[1:]) for name, value in self.tensors.items()})

    @staticmethod
    def concatenate(parts: Sequence[Conditioning]) -> Conditioning:
        """All rows of several, in order."""
        return Conditioning({name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors})

    def fingerprint(self) -> str:
        """Hex digest of the exact bytes, to tell whether rollout and update saw the same conditioning."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            value = self.tensors[name].detach().cpu().contiguous()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        return digest.hexdigest()[:16]


class PipelineAdapter(ABC):
    """A stock diffusers pipeline, taken apart into the calls that rollouts and updates need."""

    lora_targets: ClassVar[list[str]]
    """Modules of the denoiser that a LoRA adapts by default."""
    path: ClassVar[str] = "rectified"
    """Of the forward process, see `flowrl.flow.paths`."""
    prediction: ClassVar[str] = "velocity"
    """What the denoiser outputs there."""

    pipe: Any
    latent_shape: tuple[int, ...]

    @classmethod
    @abstractmethod
    def load(cls, path: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> PipelineAdapter:
        """Loads a pipeline folder or hub id."""

    @property
    @abstractmethod
    def denoiser(self) -> nn.Module:
        """The network that is trained."""

    @denoiser.setter
    @abstractmethod
    def denoiser(self, module: nn.Module) -> None: ...

    @abstractmethod
    def encode(self, prompts: list[str]) -> Conditioning:
        """Encodes prompts, one row each, without gradient."""

    @abstractmethod
    def sigmas(self, num_inference_steps: int) -> torch.Tensor:
        """The grid of the stock pipeline, `(T + 1,)` float32, from 1 down to 0."""

    @abstractmethod
    def predict(self, x: torch.Tensor, sigma: torch.Tensor, cond: Conditioning) -> torch.Tensor:
        """One network call: the denoiser's output `(B, *latent_shape)` at `x` and `sigma (B,)`."""

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Images `(B, 3, height, width)` in [0, 1], float32, without gradient."""

    @abstractmethod
    def encode_images(self, images: torch.Tensor) -> torch.Tensor:
        """Latents `(B, *latent_shape)`, float32, of images `(B, 3, height, width)` in [0, 1]; `decode` turned round."""

    @property
    @abstractmethod
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""

    @abstractmethod
    def save_lora(self, folder: Path) -> None:
        """Writes the LoRA so that the stock pipeline's `load_lora_weights(folder)` gives the same model."""

    def initial_noise(self, generators: Sequence[torch.Generator]) -> torch.Tensor:
        """Standard normal latents, row i from `generators[i]`, float32 on the CPU."""
        return torch.stack([torch.randn(self.latent_shape, generator=generator) for generator in generators])

    def velocity(
        self,
        x: torch.Tensor,
        sigma: torch.Tensor,
        cond: Conditioning,
        negative: Conditioning | None = None,
        guidance_scale: float = 1.0,
    ) -> torch.Tensor:
        """Velocity with classifier-free guidance, as the stock pipeline computes it; none at scale 1 or less.

        Args:
            negative: one row, shared by all, or as many as `cond`.
        """
        if guidance_scale <= 1 or negative is None:
            return self.predict(x, sigma, cond)
        both = Conditioning.concatenate([negative.expand(len(x)) if len(negative) == 1 else negative, cond])
        uncond, with_text = self.predict(torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
        return uncond + guidance_scale * (with_text - uncond)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Without the progress bars and warnings of diffusers and transformers."""
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    shown = [library for library in libraries if library.is_progress_bar_enabled()]
    verbosities = [library.get_verbosity() for library in libraries]
    for library in shown:
        library.disable_progress_bar()
    for library in libraries:
        library.set_verbosity_error()
    try:
        yield
    finally:
        for library, verbosity in zip(libraries, verbosities, strict=True):
            library.set_verbosity(verbosity)
        for library in shown:
            library.enable_progress_bar()


def unmatched_targets(module: nn.Module, targets: Sequence[str]) -> list[str]:
    """LoRA targets, as peft reads them, that no submodule's name equals or ends with."""
    names = [name for name, _ in module.named_modules()]
    return [t for t in targets if not any(name == t or name.endswith("." + t) for name in names)]


def check_pipeline(adapter: PipelineAdapter) -> dict[str, float]:
    """Runs the contract on an adapter: grid, shapes, determinism, conditioning, guidance, decoding, LoRA targets.

    Returns:
        measured figures, for instance the largest difference between a call with one row and one with several.

    Raises:
        ValueError: what the adapter does wrong, in words.
    """

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{type(adapter).__name__}: {message}")

    grid = adapter.sigmas(4)
    require(grid.shape == (5,) and grid.dtype == torch.float32, f"sigmas(4) must be 5 float32 values, got {grid}")
    require(bool((grid.diff() < 0).all()) and bool(grid[-1] == 0), f"sigmas must fall to 0, got {grid.tolist()}")
    cond = adapter.encode(["a", "b"])
    require(len(cond) == 2, f"encode of two prompts gave {len(cond)} rows")
    require(cond.fingerprint() == adapter.encode(["a", "b"]).fingerprint(), "encode is not deterministic")
    negative = adapter.encode([""])
    device = next(adapter.denoiser.parameters()).device
    x = adapter.initial_noise([torch.Generator().manual_seed(seed) for seed in (0, 1)]).to(device)
    sigma = torch.tensor([0.7, 0.3], device=device)
    with torch.no_grad():
        both = adapter.velocity(x, sigma, cond)
        single = torch.cat(
            [adapter.velocity(x[i : i + 1], sigma[i : i + 1], cond.rows(torch.tensor([i]))) for i in (0, 1)]
        )
        guided = adapter.velocity(x, sigma, cond, negative, 3.0)
        plain = adapter.velocity(x, sigma, negative.expand(2))
    require(both.shape == x.shape, f"velocity has shape {tuple(both.shape)}, latents {tuple(x.shape)}")
    gap = (both - single).abs().max().item()
    require(gap < 1e-3, f"a row's velocity depends on the other rows of its batch (by {gap:.1e})")
    guidance_gap = (guided - (plain + 3 * (both - plain))).abs().max().item()
    require(guidance_gap < 1e-3, f"guidance is not uncond + scale * (cond - uncond) (off by {guidance_gap:.1e})")
    images = adapter.decode(x)
    require(images.ndim == 4 and images.shape[:2] == (2, 3), f"decode gave shape {tuple(images.shape)}")
    require(bool(images.min() >= 0) and bool(images.max() <= 1), "decode must give values in [0, 1]")
    require(images.shape[2:] == adapter.image_size, f"image_size is {adapter.image_size}, images {images.shape[2:]}")
    latents = adapter.encode_images(images)
    require(latents.shape == x.shape, f"encode_images gave shape {tuple(latents.shape)}, latents {tuple(x.shape)}")
    unmatched = unmatched_targets(adapter.denoiser, adapter.lora_targets)
    require(not unmatched, f"no module matches {', '.join(map(repr, unmatched))}")
    return {"batch_gap": gap, "guidance_gap": guidance_gap}
