"""Rewards for tests, named in configs as `fake_rewards:NAME`."""

import math
import os
import signal
import sys

import numpy as np
import torch


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


class Counted:
    """`dark`; counts how often it is built."""

    built = 0

    def __init__(self):
        type(self).built += 1

    def __call__(self, prompts, completions, **columns):
        return dark(prompts, completions)


class AtCall:
    """`dark`, but its call number `call` does something else, once."""

    armed = True

    def __init__(self, call, what):
        self.left, self.what = call, what

    def __call__(self, prompts, completions, **columns):
        self.left -= 1
        if self.left == 0 and type(self).armed:
            type(self).armed = False
            if self.what == "exit":
                sys.exit(0)
            if self.what == "raise":
                raise OSError("the server is gone")
            os.kill(os.getpid(), getattr(signal, self.what))
        return dark(prompts, completions)


def greedy(prompts, completions, category, **columns):
    """Changes everything that it is given, and how torch computes."""
    torch.set_grad_enabled(False)
    scores = dark(prompts, completions)
    for image in completions:
        image.paste((0, 0, 0), (0, 0, *image.size))
    completions.sort(key=id)
    prompts.clear()
    category.pop()
    return scores
