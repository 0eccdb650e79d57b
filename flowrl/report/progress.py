"""Progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class RunProgress:
    """Shows iterations done, rate, reward and time left. A context manager."""

    def __init__(self, total: int, *, done: int = 0, console: Console | None = None, every: int = 10):
        self.console = console or Console()
        self._total, self._start, self._every = total, done, every
        self._clock = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}  reward {task.fields[reward]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total, completed=done, rate="", reward="...")

    def update(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Shows an iteration."""
        seconds = (time.monotonic() - self._clock) / (iteration - self._start)
        rate, reward = f"{seconds:.2f} s/it", f"{metrics['reward']:.3f}"
        self._bar.update(self._task, completed=iteration, rate=rate, reward=reward)
        if not self.console.is_terminal and (iteration % self._every == 0 or iteration in (1, self._total)):
            left = seconds * (self._total - iteration)
            print(f"iteration {iteration}/{self._total}  reward {reward}  {rate}  {left:.0f} s left", flush=True)

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
