import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from flowrl.flow.plans import all_steps, merged, tree, window, with_tail
from flowrl.flow.steps import (
    AllSteps,
    EntropySteps,
    PlanContext,
    RandomWindow,
    SingularSteps,
    SlidingWindow,
    Steps,
    TreeSteps,
)


def levels(num_steps):
    return tuple(0.01 * (step + 1) for step in range(num_steps - 1))  # all different


def context(num_steps, iteration=0, seed=0):
    sigmas = [3 * s / (1 + 2 * s) for s in (1 - i / num_steps for i in range(num_steps + 1))]
    return PlanContext(tuple(sigmas), levels(num_steps), iteration, np.random.default_rng(seed))


def plan(steps, num_steps, iteration=0, seed=0):
    assert steps.problems(num_steps) == []
    (found,) = steps.plans(context(num_steps, iteration, seed))
    return found


def only(problems):
    (problem,) = problems
    return problem


# which section it is


def test_the_kind_chooses_the_section():
    read = TypeAdapter(Steps).validate_python
    kinds = {
        "all": AllSteps,
        "window": RandomWindow,
        "sliding": SlidingWindow,
        "singular": SingularSteps,
        "entropy": EntropySteps,
        "tree": TreeSteps,
    }
    for kind, section in kinds.items():
        assert type(read({"kind": kind})) is section
    with pytest.raises(ValidationError, match="'all', 'window', 'sliding', 'singular', 'entropy', 'tree'"):
        read({"kind": "windows"})


@pytest.mark.parametrize(
    "steps",
    [
        AllSteps(),
        AllSteps(stop=5),
        RandomWindow(size=2),
        SlidingWindow(size=3),
        SlidingWindow(size=3, tail_ratio=0.4),
        SingularSteps(),
        EntropySteps(),
        TreeSteps(stop=10),
    ],
)
def test_the_number_of_trained_steps_is_told_in_advance(steps):
    assert steps.problems(16) == []
    assert {len(made.trained) for made in steps.plans(context(16))} == {steps.num_trained(16)}
    for made in steps.plans(context(16)):
        assert made.path[-1] == 16
        assert made.noise_levels[-1] == 0
        assert {made.noise_levels[step] for step in made.trained} <= set(levels(16))


# all steps


def test_all_steps_is_one_plan():
    assert plan(AllSteps(), 10) == all_steps(levels(10))
    assert plan(AllSteps(stop=3), 10) == all_steps(levels(10), stop=3)
    assert plan(AllSteps(stop=9), 10) == plan(AllSteps(), 10)


def test_a_stop_behind_the_last_stochastic_step_is_a_problem():
    problem = only(AllSteps(stop=10).problems(10))
    assert "method.steps.stop=10" in problem and "0..8" in problem and "at most 9" in problem
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        AllSteps(stop=0)


# a random window


def test_a_random_window_lies_in_the_first_half_unless_told():
    def places(steps, num_steps):
        return {plan(steps, num_steps, seed=seed).trained[0] for seed in range(100)}

    assert places(RandomWindow(size=3), 10) == {0, 1, 2}
    assert places(RandomWindow(size=2, range=(4, 9)), 10) == {4, 5, 6, 7}
    assert places(RandomWindow(size=3), 6) == {0}  # Flow-GRPO-Fast on FLUX
    assert places(RandomWindow(size=4), 6) == {0}  # longer than the half: the smallest range that holds it
    assert plan(RandomWindow(size=3, range=(2, 5)), 10) == window(levels(10), start=2, size=3)


def test_a_random_window_is_drawn_from_the_given_generator():
    steps = RandomWindow(size=1, range=(0, 9))
    draws = context(10)
    found = [steps.plans(draws)[0].trained[0] for _ in range(20)]
    expected = np.random.default_rng(0)
    assert found == [int(expected.integers(0, 9)) for _ in range(20)]
    assert len(set(found)) > 4


@pytest.mark.parametrize("bounds", [(0, 10), (-1, 4)])
def test_a_range_that_leaves_the_schedule_is_a_problem(bounds):
    problem = only(RandomWindow(range=bounds).problems(10))
    assert f"method.steps.range=[{bounds[0]}, {bounds[1]}] leaves the schedule" in problem
    assert "0..8" in problem and "[0, 9]" in problem


def test_a_window_longer_than_its_range_or_the_grid_is_a_problem():
    assert only(RandomWindow(size=4, range=(2, 5)).problems(10)) == (
        "method.steps.size=4 does not fit into method.steps.range=[2, 5]"
    )
    assert RandomWindow(size=3, range=(2, 5)).problems(10) == []
    assert RandomWindow(size=9).problems(10) == []
    assert "0..8" in only(RandomWindow(size=10).problems(10))
    assert RandomWindow(size=3, range=(5, 2)).problems(10)


def test_a_window_over_everything_is_all_steps():
    assert plan(RandomWindow(size=9, range=(0, 9)), 10) == plan(AllSteps(), 10)
    for iteration in (0, 30, 1000):
        assert plan(SlidingWindow(size=9), 10, iteration) == plan(AllSteps(), 10)


# a sliding window


def test_a_sliding_window_moves_with_the_iterations():
    steps = SlidingWindow(size=4, every=2)
    # places 0..5 on a grid of 10 steps: the last one trains the steps 5..8
    found = [plan(steps, 10, iteration).trained[0] for iteration in range(14)]
    assert found == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 0]
    assert plan(steps, 10, 5) == window(levels(10), start=2, size=4)
    stopped = SlidingWindow(size=4, every=2, roll_back=False, stride=2, last_step=6)
    assert [plan(stopped, 10, iteration).trained[0] for iteration in range(7)] == [0, 0, 2, 2, 2, 2, 2]
    decaying = SlidingWindow(size=7, every=3, strategy="decay")  # places 0, 1, 2: for 3, 2, 1 iterations
    assert [plan(decaying, 10, iteration).trained[0] for iteration in range(7)] == [0, 0, 0, 1, 1, 2, 0]
    # places 0, 1, 2: 4, 4 exp(-0.7) = 1.99, 4 exp(-1.4) = 0.99
    fading = SlidingWindow(size=7, every=4, strategy="exp_decay", decay_from=0, decay_rate=0.7)
    assert [plan(fading, 10, iteration).trained[0] for iteration in range(8)] == [0, 0, 0, 0, 1, 1, 2, 0]


def test_a_random_sliding_window_is_anywhere_it_fits():
    steps = SlidingWindow(size=4, strategy="random")
    assert {plan(steps, 10, seed=seed).trained[0] for seed in range(100)} == {0, 1, 2, 3, 4, 5}


def test_a_frozen_window_stays():
    steps = SlidingWindow(size=4, stride=0)
    assert {plan(steps, 25, iteration).trained for iteration in (0, 25, 500)} == {(0, 1, 2, 3)}


def test_a_fast_tail_takes_a_share_of_the_steps_behind_the_window():
    # 10 steps, window 0..3: 6 remain; 0.5 of them are 3, 0.4 are 2.4, and at least one
    for ratio, num_steps in ((0.5, 3), (0.4, 2), (0.01, 1), (1.0, 6)):
        found = plan(SlidingWindow(size=4, tail_ratio=ratio), 10)
        assert found == with_tail(window(levels(10), start=0, size=4), num_steps=num_steps, solver="dpmpp_2m")
        assert len(found) == 4 + num_steps
    # at the last place one step remains, and the image is still clean
    found = plan(SlidingWindow(size=4, every=1, tail_ratio=0.2, tail_solver="heun"), 10, iteration=5)
    assert (found.trained, found.path[-2:], found.solver) == ((5, 6, 7, 8), (9.0, 10.0), "heun")
    # MixGRPO-Flash on 25 steps: 21 remain
    assert len(plan(SlidingWindow(tail_ratio=0.4), 25)) == 4 + 8
    assert len(plan(SlidingWindow(tail_ratio=0.2, stride=0), 25)) == 4 + 4


def test_a_sliding_window_that_fits_nowhere_is_a_problem():
    assert SlidingWindow(size=9).problems(10) == []
    problem = only(SlidingWindow(size=10).problems(10))
    assert "method.steps.size=10 does not fit" in problem and "0..8" in problem
    assert SlidingWindow(size=4, last_step=3).problems(10) == []
    assert "0..2" in only(SlidingWindow(size=4, last_step=2).problems(10))
    assert "method.steps.last_step=50: with" in only(SlidingWindow(size=4, last_step=50).problems(10))


# one step


def test_singular_steps_are_a_plan_for_each():
    steps = SingularSteps(steps=(0, 3, 8))
    assert steps.plans(context(10)) == [merged(levels(10), step=step, length=1) for step in (0, 3, 8)]
    assert [found.trained for found in SingularSteps().plans(context(16))] == [(step,) for step in range(8)]
    assert [found.trained for found in SingularSteps().plans(context(2))] == [(0,)]


@pytest.mark.parametrize("chosen", [(), (9,), (-1, 2), (0, 10)])
@pytest.mark.parametrize("section", [SingularSteps, EntropySteps])
def test_steps_that_are_not_stochastic_are_a_problem(section, chosen):
    assert section(steps=(0, 8)).problems(10) == []
    problem = only(section(steps=chosen).problems(10))
    assert f"method.steps.steps={list(chosen)}" in problem
    assert "0..8" in problem and "at least one" in problem


def test_entropy_merges_as_the_paper_does():
    # T = 16, shift 3, threshold 2.2: step 0 is alone; then 2, 4, 5, 6, 7, 8, 8
    found = EntropySteps().plans(context(16))
    lengths = (1, 2, 4, 5, 6, 7, 8, 8)
    assert found == [merged(levels(16), step=step, length=length) for step, length in enumerate(lengths)]
    assert found[7].path == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 15.0, 16.0)


def test_every_entropy_step_fits_whatever_the_threshold():
    for threshold in (0.1, 1.0, 2.2, 2.25, 50.0):
        steps = EntropySteps(steps=tuple(range(15)), threshold=threshold)
        assert len(steps.plans(context(16))) == 15


def test_entropy_with_threshold_0_is_singular():
    chosen = tuple(range(15))
    found = EntropySteps(steps=chosen, threshold=0.0).plans(context(16))
    assert found == SingularSteps(steps=chosen).plans(context(16))
    assert EntropySteps(steps=chosen).plans(context(16)) != found


# trees


def test_a_tree_splits_where_it_is_told():
    assert plan(TreeSteps(), 20) == tree(levels(20), splits=(0, 3, 6, 9))
    assert plan(TreeSteps(), 20).copies()[0] == 16
    found = plan(TreeSteps(splits=(0, 2), stop=3), 10)
    assert (found.trained, found.copies()[:5]) == ((0, 1, 2), (4, 2, 2, 1, 1))


@pytest.mark.parametrize(("splits", "stop"), [((), None), ((9,), None), ((-1, 2), None), ((0, 3), 3)])
def test_splits_outside_the_stochastic_steps_are_a_problem(splits, stop):
    assert TreeSteps(splits=(0, 8)).problems(10) == []
    assert TreeSteps(splits=(0, 2), stop=3).problems(10) == []
    problem = only(TreeSteps(splits=splits, stop=stop).problems(10))
    assert f"method.steps.splits={list(splits)}" in problem
    assert f"0..{8 if stop is None else stop - 1}" in problem and "must rise" in problem


def test_a_tree_with_a_wrong_stop_says_so():
    assert "method.steps.stop=12" in only(TreeSteps(stop=12).problems(10))
    assert "method.steps.stop=12" in only(TreeSteps(stop=12, splits=(20,)).problems(10))
