"""Ctrl-C and SIGTERM: a run stops where it can go on, instead of in the middle of a step."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from flowrl.errors import Interrupted


class Interruption:
    """Within it the first SIGINT or SIGTERM only asks to stop, which `check` does; the second stops at once.

    Outside the main thread, where Python sets no handlers, signals do what they did before.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """To be called where a run can go on later.

        Raises:
            Interrupted: it was asked to stop.
        """
        if self.asked is not None:
            raise Interrupted(self.asked)

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            raise Interrupted(number)
        self.asked = number
        os.write(2, b"stopping where the run can go on; once more stops at once\n")  # print may be under way
