"""Errors whose message is written for the user: the command line shows it without a traceback."""


class FlowrlError(Exception):
    """Base of all such errors."""


class ConfigError(FlowrlError, ValueError):
    """A config that cannot be run; the message says what to change."""


class RewardError(FlowrlError, RuntimeError):
    """A reward broke its contract; the message names it."""
