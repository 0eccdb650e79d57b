"""Makes `assets/shapes-sd3`: `python -m flowrl.shapes.pretrain`. Resumable, seeded, a CPU is enough.

Two stages: an autoencoder on drawn scenes, then text encoders and transformer together by flow
matching on its latents. Each writes `<work>/<stage>.pt` and lines of JSON to `<work>/<stage>.jsonl`;
a killed run goes on from its last checkpoint when the command is given again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .checker import check_images
from .render import render
from .scenes import CATEGORIES, Spec, all_specs, sample_scene
from .tiny_sd3 import MAX_TOKENS, build_pipeline

NULL_TOKENS = 256  # of zeros, that the stock pipeline appends by default where there is no T5 encoder


def draw_batch(rng: np.random.Generator, size: int) -> tuple[list[Spec], torch.Tensor]:
    """`size` specs, the categories equally likely, and their pictures `(size, 3, 32, 32)` in [-1, 1]."""
    tables = [list(all_specs(category)) for category in CATEGORIES]
    specs = []
    for _ in range(size):
        table = tables[rng.integers(len(tables))]
        specs.append(table[rng.integers(len(table))])
    pixels = np.stack([np.asarray(render(sample_scene(spec, rng))) for spec in specs])
    return specs, torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


class Stage:
    """Checkpoint, log and learning-rate schedule of one training stage."""

    def __init__(self, name: str, work: Path, steps: int, modules: nn.ModuleDict, lr: float, warmup: int = 100):
        self.path, self.log_path, self.steps = work / f"{name}.pt", work / f"{name}.jsonl", steps
        self.modules, self.start, self.seconds = modules, 0, 0.0
        self.optimizer = torch.optim.AdamW(modules.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))),
        )
        self.ema = {name: value.detach().clone() for name, value in modules.state_dict().items()}
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            modules.load_state_dict(state["modules"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.ema, self.start, self.seconds = state["ema"], state["step"], state["seconds"]
        self._clock = time.monotonic()

    def update(self, loss: torch.Tensor, step: int, ema_decay: float = 0.998) -> None:
        """One optimizer step, and one of the average of the weights."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.modules.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        decay = min(ema_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, value in self.modules.state_dict().items():
                self.ema[name].lerp_(value, 1 - decay) if value.is_floating_point() else self.ema[name].copy_(value)

    def save(self, step: int) -> None:
        """Writes the checkpoint beside its place and renames it."""
        now = time.monotonic()
        self.seconds += now - self._clock
        self._clock = now
        state = {
            "modules": self.modules.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "ema": self.ema,
            "step": step,
            "seconds": self.seconds,
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(self.path)

    def log(self, **record: Any) -> None:
        """Appends a line to the log and prints it."""
        with self.log_path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(record) + "\n")
        print(record, flush=True)


def train_vae(
    pipe: Any,
    work: Path,
    steps: int,
    *,
    seed: int,
    batch: int = 32,
    save_every: int = 200,
    num_checked: int = 1000,
    stop_after: int | None = None,
) -> None:
    """Fits the autoencoder, sets its scaling, and logs how many of `num_checked` scenes it keeps readable.

    Args:
        stop_after: leave after this step, as if the process had been stopped.
    """
    vae = pipe.vae
    stage = Stage("vae", work, steps, nn.ModuleDict({"vae": vae}), lr=2e-3)
    vae.train()
    for step in range(stage.start, steps):
        torch.manual_seed(seed * 1_000_003 + step)
        _, pixels = draw_batch(np.random.default_rng((seed, 0, step)), batch)
        posterior = vae.encode(pixels).latent_dist
        decoded = vae.decode(posterior.sample()).sample
        error, kl = decoded - pixels, posterior.kl().mean() / posterior.mean[0].numel()
        loss = error.abs().mean() + 2 * error.square().mean() + 1e-3 * kl
        stage.update(loss, step)
        if (step + 1) % save_every == 0 or step + 1 == steps:
            stage.save(step + 1)
            stage.log(step=step + 1, loss=loss.item(), mse=error.square().mean().item(), kl=kl.item())
        if step + 1 == stop_after:
            return
    vae.load_state_dict({name.removeprefix("vae."): value for name, value in stage.ema.items()})
    vae.eval()
    specs, pixels = draw_batch(np.random.default_rng((seed, 1)), num_checked)
    with torch.no_grad():
        latents = torch.cat([vae.encode(part).latent_dist.mode() for part in pixels.split(100)])
        decoded = torch.cat([vae.decode(part).sample for part in latents.split(100)])
    vae.register_to_config(
        shift_factor=round(latents.mean().item(), 4), scaling_factor=round(1 / latents.std().item(), 4)
    )
    strict = check_images(to_uint8(decoded), specs)[0].mean()
    stage.log(step=steps, strict_after_reconstruction=float(strict), seconds=stage.seconds)


def to_uint8(pixels: torch.Tensor) -> np.ndarray:
    """Pictures `(n, 3, H, W)` in [-1, 1] as the checker wants them, `(n, H, W, 3)` uint8."""
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


@torch.no_grad()
def encode_dataset(pipe: Any, work: Path, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents `(size, 8, 8, 8)` and caption tokens `(size, MAX_TOKENS)` of drawn scenes, cached in `work`."""
    path = work / "latents.pt"
    if path.exists():
        return torch.load(path, weights_only=True)
    latents, tokens = [], []
    for part in range(size // 500):
        specs, pixels = draw_batch(np.random.default_rng((seed, 2, part)), 500)
        mode = pipe.vae.encode(pixels).latent_dist.mode()
        latents.append((mode - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor)
        tokens.append(_tokenize(pipe, [spec.caption for spec in specs]))
    data = torch.cat(latents), torch.cat(tokens)
    torch.save(data, path.with_suffix(".partial"))
    path.with_suffix(".partial").rename(path)
    return data


def _tokenize(pipe: Any, captions: list[str]) -> torch.Tensor:
    return pipe.tokenizer(captions, padding="max_length", max_length=MAX_TOKENS, return_tensors="pt").input_ids


def _encode_text(pipe: Any, tokens: torch.Tensor, null_tokens: int) -> tuple[torch.Tensor, ...]:
    """What `pipe.encode_prompt` returns, but with gradient."""
    outputs = [encoder(tokens, output_hidden_states=True) for encoder in (pipe.text_encoder, pipe.text_encoder_2)]
    embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    embeds = torch.cat([embeds, embeds.new_zeros(len(tokens), null_tokens, embeds.shape[-1])], dim=1)
    return embeds, torch.cat([output.text_embeds for output in outputs], dim=-1)


def train_flow(pipe: Any, work: Path, steps: int, *, seed: int, lr: float, batch: int = 64) -> None:
    """Trains text encoders and transformer by flow matching.

    A tenth of the captions is dropped, for guidance. A tenth of the batches carries the zeros that the stock
    pipeline appends in place of T5, so that a plain `pipe(prompt)` works too.
    """
    latents, tokens = encode_dataset(pipe, work, 60_000, seed)
    names = ("transformer", "text_encoder", "text_encoder_2")
    modules = nn.ModuleDict({name: getattr(pipe, name) for name in names})
    stage = Stage("flow", work, steps, modules, lr=lr)
    empty = _tokenize(pipe, [""])
    modules.train()
    running = []
    for step in range(stage.start, steps):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        torch.manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(latents), (batch,), generator=generator)
        clean, ids = latents[rows], tokens[rows]
        ids = torch.where(torch.rand(batch, 1, generator=generator) < 0.1, empty, ids)
        uniform = torch.rand(batch, generator=generator)
        sigma = torch.where(uniform < 0.2, uniform / 0.2, torch.randn(batch, generator=generator).sigmoid())
        noise = torch.randn(clean.shape, generator=generator)
        level = sigma[:, None, None, None]
        embeds, pooled = _encode_text(pipe, ids, NULL_TOKENS if step % 10 == 9 else 0)
        velocity = pipe.transformer(
            (1 - level) * clean + level * noise,
            timestep=sigma * 1000,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
        ).sample
        loss = F.mse_loss(velocity, noise - clean)
        stage.update(loss, step)
        running.append(loss.item())
        if (step + 1) % 250 == 0 or step + 1 == steps:
            stage.save(step + 1)
            stage.log(step=step + 1, loss=sum(running) / len(running), seconds=stage.seconds)
            running = []
        if (step + 1) % 1000 == 0 or step + 1 == steps:
            raw = {name: value.clone() for name, value in modules.state_dict().items()}
            modules.load_state_dict(stage.ema)
            for guidance in (1.0, 2.5):
                stage.log(step=step + 1, guidance=guidance, **evaluate(pipe, guidance, per_category=40))
            modules.load_state_dict(raw)
    modules.load_state_dict(stage.ema)


@torch.no_grad()
def evaluate(pipe: Any, guidance: float, per_category: int, **call: Any) -> dict[str, float]:
    """Strict accuracy of the stock pipeline (20 steps) per category, and their mean as `strict`."""
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 20, "max_sequence_length": 0} | call
    result = {}
    for index, category in enumerate(CATEGORIES):
        specs = list(all_specs(category))
        rng = np.random.default_rng((7, index))
        specs = [specs[row] for row in rng.integers(len(specs), size=per_category)]
        generator = torch.Generator().manual_seed(index)
        images = pipe(
            [spec.caption for spec in specs], guidance_scale=guidance, generator=generator, output_type="pt", **call
        ).images
        result[category] = float(check_images(to_uint8(images * 2 - 1), specs)[0].mean())
    return {"strict": sum(result.values()) / len(result)} | result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/shapes-sd3"), help="folder of the finished pipeline")
    parser.add_argument("--work", type=Path, default=Path("runs/pretrain"), help="checkpoints and logs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=2500)
    parser.add_argument("--flow-steps", type=int, default=5000)
    parser.add_argument("--lr", type=float, default=1.2e-3, help="peak learning rate of the flow stage")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    pipe: Any = build_pipeline(args.seed)
    train_vae(pipe, args.work, args.vae_steps, seed=args.seed)
    train_flow(pipe, args.work, args.flow_steps, seed=args.seed, lr=args.lr)
    pipe.save_pretrained(args.out, safe_serialization=True)


if __name__ == "__main__":
    main()
