"""Errors whose message is written for the user: the command line shows it without a traceback."""


class FlowrlError(Exception):
    """Base of all such errors."""


class ConfigError(FlowrlError, ValueError):
    """A config that cannot be run; the message says what to change."""


class RewardError(FlowrlError, RuntimeError):
    """A reward broke its contract; the message names it."""


class CheckpointError(FlowrlError, RuntimeError):
    """A checkpoint cannot be written or read; the message says which and why."""


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, and did so where it can go on; `signal` is the number of the signal that asked."""

    def __init__(self, signal: int):
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal
