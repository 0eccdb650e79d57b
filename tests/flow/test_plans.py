import math
from itertools import groupby

import pytest
import torch

from flowrl.flow.plans import (
    Completion,
    StepPlan,
    all_steps,
    dense_completions,
    granular_completions,
    merge_length,
    merged,
    sliding_start,
    stochastic_path,
    tree,
    window,
    with_tail,
)
from flowrl.flow.rollout import sigma_path

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of a grid with 10 steps
PLAN = window(LEVELS, start=2, size=3)


def shift3_grid(num_steps):
    return [3 * s / (1 + 2 * s) for s in (1 - i / num_steps for i in range(num_steps + 1))]


# validation


@pytest.mark.parametrize(
    "path", [(), (0.0, 1.0), (0.0, 1.0, 2.0, 3.0), (1.0, 2.0, 3.0), (0.0, 2.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_a_path_must_rise_from_0_with_one_entry_more_than_levels(path):
    with pytest.raises(ValueError, match="the path must rise from 0, with one entry more than 2 noise levels"):
        StepPlan(path, (0.7, 0.0), (0,))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trained": ()}, "must train at least one step"),
        ({"trained": (1, 0)}, r"trained steps \(1, 0\) must be ascending and lie in 0..2"),
        ({"trained": (0, 0)}, "must be ascending"),
        ({"trained": (-1, 0)}, "must be ascending"),
        ({"trained": (1, 3)}, "must be ascending"),
        ({"trained": (0, 2)}, r"steps \[2\] have noise level 0"),
        ({"noise_levels": (-0.7, 0.7, 0.0)}, r"steps \[0\] have noise level 0"),
        ({"branching": (2, 2)}, "branching has 2 entries for 3 steps"),
        ({"branching": (1, 2, 2)}, r"steps \[2\] branch at noise level 0"),
        ({"completions": (Completion(3, (3.0,)),)}, "a completion starts at a state of the path"),
        ({"completions": (Completion(-1, (3.0,)),)}, "a completion starts at a state of the path"),
        ({"completions": (Completion(1, (2.0, 3.0)),)}, "a completion starts at a state of the path"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(changed, message):
    fine = {"path": (0.0, 1.0, 2.0, 3.0), "noise_levels": (0.7, 0.7, 0.0), "trained": (0, 1)}
    assert len(StepPlan(**fine, branching=(2, 1, 1), completions=(Completion(1, (1.0, 3.0)),))) == 3
    with pytest.raises(ValueError, match=message):
        StepPlan(**{**fine, **changed})


# all steps, windows


def test_all_steps_leaves_out_the_last():
    plan = all_steps((0.1, 0.2, 0.3))
    assert plan == StepPlan((0.0, 1.0, 2.0, 3.0, 4.0), (0.1, 0.2, 0.3, 0.0), (0, 1, 2))
    assert all_steps((0.1, 0.2, 0.3), stop=3) == plan
    assert all_steps((0.1, 0.2, 0.3), stop=1) == StepPlan(plan.path, (0.1, 0.0, 0.0, 0.0), (0,))


def test_a_window_is_noisy_inside_and_has_the_levels_of_its_steps():
    assert PLAN.path == tuple(map(float, range(11)))
    assert PLAN.noise_levels == (0.0, 0.0, 0.3, 0.4, 0.5) + (0.0,) * 5
    assert (PLAN.trained, PLAN.branching, PLAN.completions) == ((2, 3, 4), (), ())
    assert window(LEVELS, start=0, size=9) == all_steps(LEVELS)
    assert window(LEVELS, start=8, size=1).trained == (8,)


@pytest.mark.parametrize(("start", "size"), [(0, 0), (-1, 2), (0, 10), (7, 3), (9, 1)])
def test_a_window_must_lie_within_the_stochastic_steps(start, size):
    with pytest.raises(ValueError, match=rf"window of {size} from step {start} does not fit: .* 0..8 of 10"):
        window(LEVELS, start=start, size=size)


def test_a_tail_is_evenly_spaced_behind_the_window():
    plan = with_tail(window(LEVELS, start=0, size=4), num_steps=3, solver="dpmpp_2m")
    assert plan.path == (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
    assert plan.noise_levels == (0.1, 0.2, 0.3, 0.4, 0.0, 0.0, 0.0)
    assert (plan.trained, plan.solver, plan.solver_from) == ((0, 1, 2, 3), "dpmpp_2m", 4)
    plan = with_tail(window(LEVELS, start=2, size=2), num_steps=1, solver="heun")
    assert plan.path == (0.0, 1.0, 2.0, 3.0, 4.0, 10.0)
    assert plan.noise_levels == (0.0, 0.0, 0.3, 0.4, 0.0)
    assert (plan.trained, plan.solver, plan.solver_from) == ((2, 3), "heun", 4)


def test_a_tail_always_ends_at_the_clean_end():
    for start in range(8):
        for num_steps in range(1, 10 - start - 2 + 1):
            plan = with_tail(window(LEVELS, start=start, size=2), num_steps=num_steps, solver="dpmpp_2m")
            assert plan.path[-1] == 10
            assert len(plan) == start + 2 + num_steps
            assert plan.path[: start + 3] == tuple(map(float, range(start + 3)))
    # as many steps as there were: the window itself, with the other solver
    plan = with_tail(PLAN, num_steps=5, solver="heun")
    assert (plan.path, plan.noise_levels) == (PLAN.path, PLAN.noise_levels)


# merged steps


def test_a_merged_step_spans_several_grid_steps():
    plan = merged(LEVELS, step=3, length=4)
    assert plan.path == (0.0, 1.0, 2.0, 3.0, 7.0, 8.0, 9.0, 10.0)
    assert plan.noise_levels == (0.0, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0)
    assert plan.trained == (3,)


@pytest.mark.parametrize("step", [0, 4, 8])
def test_a_merge_of_one_step_is_the_singular_window(step):
    assert merged(LEVELS, step=step, length=1) == window(LEVELS, start=step, size=1)


@pytest.mark.parametrize(("step", "length"), [(3, 0), (-1, 1), (9, 1), (8, 2), (0, 10)])
def test_a_merged_step_does_not_reach_the_clean_end(step, length):
    assert merged(LEVELS, step=0, length=9).path == (0.0, 9.0, 10.0)  # the longest that fits
    with pytest.raises(ValueError, match=rf"a step over {length} from {step} does not fit .* 0..8"):
        merged(LEVELS, step=step, length=length)


def test_merge_lengths_are_those_of_the_paper():
    """E-GRPO, T = 16, shift 3, threshold 2.2. The paper counts k from the clean end: position 16 - k."""
    grid = shift3_grid(16)
    found = {k: merge_length(grid, 16 - k, 2.2) for k in range(1, 17)}
    assert {k: found[k] for k in range(9, 16)} == {15: 2, 14: 4, 13: 5, 12: 6, 11: 7, 10: 8, 9: 8}
    assert found[16] == 1  # sigma 1: infinite
    assert all(found[k] == 1 for k in range(1, 8))  # never
    # k = 8 reaches the threshold at l = 8 (0.75 / 0.25 * 0.75 = 2.25), at sigma 0 itself, where no stochastic step
    # may end; at l = 7 it is 0.75 / 0.25 * (0.75 - 1 / 6) = 1.75. So it is not merged, unlike in the paper's list.
    assert found[8] == 1
    assert merge_length(grid, 8, 1.75 - 1e-6) == 7


def test_merge_length_scores_are_the_closed_form_of_the_paper():
    # shift s: Hs(k, l) = s^2 T k l / ((T - k) (T + (s - 1) k) (T + (s - 1) (k - l)))
    def score(k, length):
        return 9 * 16 * k * length / ((16 - k) * (16 + 2 * k) * (16 + 2 * (k - length)))

    assert [round(score(k, n), 2) for k, n in ((15, 2), (14, 4), (13, 5), (12, 6), (9, 8))] == [
        2.24,
        2.55,
        2.32,
        2.31,
        2.42,
    ]
    for k in range(2, 16):
        for length in range(1, k):
            reached, missed = (merge_length(shift3_grid(16), 16 - k, score(k, length) + d) for d in (-1e-9, 1e-9))
            assert reached == length
            assert missed == (length + 1 if length + 1 < k else 1)


def test_a_threshold_is_reached_when_it_is_met():
    grid = (1.0, 0.5, 0.25, 0.125, 0.0)  # from 0.5: 0.5 / 0.5 * 0.25, then 0.375, both exact
    assert [merge_length(grid, 1, threshold) for threshold in (0.25, 0.3, 0.375, 0.4)] == [1, 2, 2, 1]


def test_threshold_0_merges_nothing():
    assert [merge_length(shift3_grid(16), step, 0.0) for step in range(16)] == [1] * 16


# trees, shared noise


def test_copies_count_the_samples_that_share_a_state():
    plan = tree((0.3,) * 5, splits=(0, 2, 3))
    assert plan.branching == (2, 1, 2, 2, 1, 1)
    assert plan.copies() == (8, 4, 4, 2, 1, 1, 1)
    assert (plan.trained, plan.noise_levels) == ((0, 1, 2, 3, 4), (0.3,) * 5 + (0.0,))
    assert tree((0.3,) * 5, splits=(1,), children=3).copies() == (3, 3, 1, 1, 1, 1, 1)
    assert tree((0.3,) * 5, splits=(0,), stop=2).trained == (0, 1)
    assert all_steps((0.3,) * 5).copies() == (1,) * 7


def test_branch_grpo_grows_sixteen_leaves():
    copies = tree((0.3,) * 19, splits=(0, 3, 6, 9)).copies()
    assert copies == (16,) + (8,) * 3 + (4,) * 3 + (2,) * 3 + (1,) * 11


def test_a_group_shares_its_noise_until_the_first_stochastic_step():
    plan = PLAN.sharing_noise(4)
    assert plan.branching == (1, 1, 4) + (1,) * 7
    assert plan.copies() == (4, 4, 4) + (1,) * 8
    assert (plan.path, plan.noise_levels, plan.trained) == (PLAN.path, PLAN.noise_levels, PLAN.trained)
    grown = tree((0.3,) * 5, splits=(1,))
    assert grown.sharing_noise(4) is grown


# completions


def paths(plan):
    return [(completion.state, completion.path) for completion in plan.completions]


def steps(*positions):
    return tuple(map(float, positions))


def test_dense_completions_take_every_state_of_the_trained_steps_to_the_end():
    plan = dense_completions(PLAN)
    assert paths(plan) == [(state, steps(*range(state, 11))) for state in (2, 3, 4)]
    assert (plan.path, plan.noise_levels, plan.trained) == (PLAN.path, PLAN.noise_levels, PLAN.trained)
    assert [c.state for c in dense_completions(all_steps((0.7,) * 3)).completions] == [0, 1, 2]


def test_dense_completions_may_be_coarser():
    assert paths(dense_completions(PLAN, num_steps=2)) == [
        (2, steps(2, 6, 10)),
        (3, steps(3, 6.5, 10)),
        (4, steps(4, 7, 10)),
    ]
    assert paths(dense_completions(PLAN, num_steps=1)) == [(state, steps(state, 10)) for state in (2, 3, 4)]
    # 7 steps remain from state 3: no more than those
    assert paths(dense_completions(PLAN, num_steps=7))[1:] == paths(dense_completions(PLAN))[1:]


@pytest.mark.parametrize(
    ("levels", "trained"), [((0.7, 0.0, 0.7, 0.0), (0, 2)), ((0.7, 0.7, 0.7, 0.0), (0, 2)), ((0.7, 0.7, 0.0), (0,))]
)
def test_dense_completions_refuse_gaps(levels, trained):
    plan = StepPlan(steps(*range(len(levels) + 1)), levels, trained)
    with pytest.raises(ValueError, match="the stochastic steps to be neighbours, and all of them to be trained"):
        dense_completions(plan)


def test_granular_completions_follow_the_schedule_of_the_paper():
    """sigma[:k + 2] ++ sigma[k + 2::g], T = 16; what does not hit the clean end is taken there."""
    for k in range(8):
        singular = merged((0.7,) * 15, step=k, length=1)
        plan = granular_completions(singular, (1, 2, 3))
        expected = []
        for stride in (2, 3):  # stride 1 is the sample itself
            positions = [k + 1, *range(k + 2, 17, stride)]
            expected.append((k + 1, steps(*positions, *([] if positions[-1] == 16 else [16]))))
        assert paths(plan) == expected
        assert (plan.path, plan.trained) == (singular.path, (k,))
    # the first two by hand
    plan = granular_completions(merged((0.7,) * 7, step=0, length=1), (2,))
    assert paths(plan) == [(1, steps(1, 2, 4, 6, 8))]
    plan = granular_completions(merged((0.7,) * 7, step=1, length=1), (2,))
    assert paths(plan) == [(2, steps(2, 3, 5, 7, 8))]


def test_granular_completions_of_a_merged_step_start_where_it_ends():
    plan = granular_completions(merged((0.7,) * 9, step=1, length=3), (2, 4))
    assert plan.path == steps(0, 1, 4, 5, 6, 7, 8, 9, 10)
    assert paths(plan) == [(2, steps(4, 5, 7, 9, 10)), (2, steps(4, 5, 9, 10))]


def test_granular_completions_at_the_end_have_only_the_last_step():
    assert paths(granular_completions(merged((0.7,) * 9, step=8, length=1), (2, 5))) == [(9, steps(9, 10))] * 2
    assert granular_completions(PLAN, (1,)) == PLAN


# the sliding window


def starts(num, **options):
    defaults = {"strategy": "progressive", "every": 2, "stride": 1, "roll_back": True}
    options = {**defaults, "decay_from": 13, "decay_rate": 0.1, **options}
    return [sliding_start(iteration, **options) for iteration in range(num)]


def stays(found):
    return [(place, len(list(group))) for place, group in groupby(found)]


def test_a_progressive_window_moves_on_every_so_many_iterations():
    assert starts(9, last=2) == [0, 0, 1, 1, 2, 2, 0, 0, 1]
    assert starts(9, last=2, roll_back=False) == [0, 0, 1, 1, 2, 2, 2, 2, 2]
    assert starts(9, last=5, stride=2) == [0, 0, 2, 2, 4, 4, 0, 0, 2]
    assert starts(5, last=0) == [0] * 5


def test_mix_grpo_visits_the_first_twelve_places_in_its_300_iterations():
    assert stays(starts(300, last=20, every=25)) == [(place, 25) for place in range(12)]


def test_a_frozen_window_stays_at_the_start():
    for strategy in ("progressive", "decay", "exp_decay"):
        assert starts(200, last=20, stride=0, strategy=strategy) == [0] * 200


def test_decay_is_linear_from_every_to_1():
    # last 4, every 5: p = 0, 1/4, ..., 1 gives int(5 (1 - p) + p) = 5, 4, 3, 2, 1
    found = starts(15, last=4, every=5, strategy="decay")
    assert stays(found) == [(0, 5), (1, 4), (2, 3), (3, 2), (4, 1)]
    assert starts(18, last=4, every=5, strategy="decay")[15:] == [0] * 3
    assert starts(18, last=4, every=5, strategy="decay", roll_back=False)[15:] == [4] * 3


def test_decay_is_the_released_formula_of_mix_grpo():
    """int(max (1 - p) + min p), max = every and min = 1: 10, 9.55, 9.1, 8.65, ..., 1.45, 1 over 21 places."""
    expected = [10] + [9] * 2 + [8] * 2 + [7] * 2 + [6] * 2 + [5] * 3 + [4] * 2 + [3] * 2 + [2] * 2 + [1] * 3
    assert expected == [int((10 * (20 - place) + place) / 20) for place in range(21)]
    found = starts(sum(expected), last=20, every=10, strategy="decay")
    assert stays(found) == list(enumerate(expected))


def test_exp_decay_sets_in_at_a_place_and_rounds_up():
    # 10 exp(-0.5 max(0, place - 1)) = 10, 10, 6.07, 3.68, 2.23
    expected = [(0, 10), (1, 10), (2, 7), (3, 4), (4, 3)]
    assert stays(starts(34, last=4, every=10, strategy="exp_decay", decay_from=1, decay_rate=0.5)) == expected
    assert stays(starts(50, last=4, every=10, strategy="exp_decay", decay_rate=0.5)) == [(p, 10) for p in range(5)]
    # the released settings: from place 13 on by 0.1
    found = dict(stays(starts(2000, last=20, every=25, strategy="exp_decay", roll_back=False)))
    assert [found[place] for place in (12, 13, 14, 19)] == [25, 25, math.ceil(25 * math.exp(-0.1)), 14]


# sigmas of a path


def test_sigmas_between_grid_entries_are_interpolated():
    grid = torch.tensor([1.0, 0.8, 0.5, 0.0])
    assert sigma_path(grid, (0.0, 1.0, 1.5, 2.25, 3.0)).tolist() == pytest.approx([1.0, 0.8, 0.65, 0.375, 0.0])
    whole = sigma_path(grid, (0.0, 1.0, 2.0, 3.0))
    assert torch.equal(whole, grid) and whole.dtype == torch.float32
    assert torch.equal(sigma_path(grid.double(), (0.0, 3.0)), grid[[0, 3]])


def test_a_plan_without_merges_follows_the_grid():
    grid = torch.tensor(shift3_grid(10))
    assert torch.equal(sigma_path(grid, PLAN.path), grid)
    # a tail of 2 from position 4: 4, 7, 10
    tail = with_tail(window(LEVELS, start=0, size=4), num_steps=2, solver="heun")
    assert torch.equal(sigma_path(grid, tail.path), grid[[0, 1, 2, 3, 4, 7, 10]])


def test_a_stochastic_path_trains_what_is_noisy():
    plan = stochastic_path([0, 2, 3], {1: 0.5}, solver="heun")
    assert plan == StepPlan((0.0, 2.0, 3.0), (0.0, 0.5), (1,), solver="heun")
