"""Rewards for tests, named in configs as `fake_rewards:NAME`."""

import math

import numpy as np


def dark(prompts, completions, **columns):
    """How dark the picture is, in [0, 1]."""
    return [1 - float(np.asarray(image).mean()) / 255 for image in completions]


def constant(prompts, completions, **columns):
    return [0.2437] * len(completions)


def never(prompts, completions, **columns):
    return [None] * len(completions)


class EveryThird:
    """`dark`, but no score for every third call's first sample."""

    def __init__(self, kind="none"):
        self.kind = kind

    def __call__(self, prompts, completions, **columns):
        scores = dark(prompts, completions)
        scores[0] = {"none": None, "nan": math.nan, "inf": math.inf}[self.kind]
        return scores


class OnlyTheLast:
    """`dark` for the last `P * G = 8` completions of a call, no score for the others: those of earlier states."""

    def __call__(self, prompts, completions, **columns):
        scores = dark(prompts, completions)
        return [None] * (len(scores) - 8) + scores[-8:]


class Darker:
    """Judges pairs: whether a picture is darker than its opponent."""

    pairwise = True

    def __call__(self, prompts, completions, opponents, **columns):
        pairs = zip(dark(prompts, completions), dark(prompts, opponents), strict=True)
        return [0.5 + 0.5 * ((a > b) - (a < b)) for a, b in pairs]
