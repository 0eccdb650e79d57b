import math

import pytest
import torch

from flowrl.flow.calibrate import CalibrationRound, adjusted, calibrate


def test_levels_rise_where_better_and_worse_balance_and_fall_elsewhere():
    tried = CalibrationRound((0.7, 0.7, 0.7, 0.7), (5, 9, 2, 6), (4, 3, 8, 4))  # differences 1, 6, 6, 2
    assert adjusted(tried, step=0.01, tolerance=2, highest=1.0) == (0.71, 0.69, 0.69, 0.69)


def test_levels_stay_between_one_step_and_the_highest():
    tried = CalibrationRound((1.0, 0.05), (3, 9), (3, 0))
    assert adjusted(tried, step=0.05, tolerance=2, highest=1.0) == (1.0, 0.05)


def test_it_finds_the_level_where_harm_begins_and_stops_there():
    """Step u is balanced up to a level of its own, and harms beyond it."""
    edge = torch.tensor([0.42, 0.68])

    def measure(levels, number):
        harm = (torch.tensor(levels) > edge).float()
        signs = torch.tensor([1.0, -1.0]).repeat(20)[:, None].expand(40, 2)
        return torch.where(torch.rand(40, 2) < harm, -1.0, signs)

    rounds = list(calibrate(measure, (0.6, 0.6), rounds=50, step=0.05, tolerance=2))
    assert len(rounds) < 15, "it stops when every level has turned back"
    assert rounds[-1].levels == pytest.approx((0.4, 0.7), abs=0.051)
    assert (rounds[0].better[1], rounds[0].worse[1]) == (20, 20)


def test_missing_scores_are_in_neither_count():
    increments = torch.tensor([[math.nan], [1.0], [-1.0], [0.0]])
    found = next(calibrate(lambda levels, number: increments, (0.5,), rounds=1))
    assert (found.better, found.worse) == ((1,), (1,))
