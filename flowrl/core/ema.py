"""An exponential moving average of the trainable parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class EMA:
    """Average with decay `min(decay, (1 + n) / (10 + n))` after n updates, so that it forgets its start early."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], decay: float):
        self._parameters = dict(parameters)
        self.decay = decay
        self.num_updates = 0
        self.shadow = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the present weights."""
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.num_updates += 1
        for name, parameter in self._parameters.items():
            self.shadow[name].lerp_(parameter.detach(), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model carries the average; afterwards, also after an exception, its own weights again."""
        raw = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._write(self.shadow)
        try:
            yield
        finally:
            self._write(raw)

    @torch.no_grad()
    def _write(self, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])
