import math

import pytest
import torch

from flowrl.flow.noise_search import on_shell, refit, search_noise

NAN = math.nan


def test_refit_by_hand():
    # prompt 0: the two best of scores 0, 3, 2, 1 are (2, 4) and (4, 0): mean (3, 2), std (1, 2).
    # prompt 1: those of -5, -1, -9, -2 are (1, 1) and (1, 7): mean (1, 4), std (0, 3), the first at the floor 0.5.
    candidates = torch.tensor([[[0.0, 0], [2, 4], [4, 0], [9, 9]], [[8, 8], [1, 1], [6, 6], [1, 7]]])
    scores = torch.tensor([[0.0, 3, 2, 1], [-5, -1, -9, -2]])
    mean, std = refit(candidates, scores, elites=2, std_floor=0.5)
    assert mean.tolist() == [[3, 2], [1, 4]]
    assert std.tolist() == [[1, 2], [0.5, 3]]
    _, std = refit(candidates, scores, elites=2, std_floor=1.5)
    assert std.tolist() == [[1.5, 2], [1.5, 3]]


def test_one_elite_is_the_mean_and_has_the_floor_as_std():
    candidates = torch.randn(2, 4, 3)
    mean, std = refit(candidates, torch.tensor([[0.0, 3, 2, 1], [0, 1, 2, 3]]), elites=1, std_floor=0.3)
    assert torch.equal(mean, torch.stack([candidates[0, 1], candidates[1, 3]]))
    torch.testing.assert_close(std, torch.full((2, 3), 0.3))


def test_a_candidate_without_a_score_ranks_last():
    # a missing score taken for 0 would win against negative ones
    candidates = torch.tensor([[[0.0, 0], [2, 4], [4, 0], [9, 9]]])
    mean, std = refit(candidates, torch.tensor([[NAN, -7.0, -5.0, -9.0]]), elites=2, std_floor=0.1)
    assert mean.tolist() == [[3, 2]]
    assert std.tolist() == [[1, 2]]


@pytest.mark.parametrize("scores", [[2.0, 2, 2, 2], [NAN, NAN, NAN, NAN]])
def test_where_nothing_is_told_apart_the_law_stays_standard_normal(scores):
    candidates = torch.randn(2, 4, 3, 2) + 5
    mean, std = refit(candidates, torch.tensor([scores, [0.0, 1, 2, 3]]), elites=2, std_floor=0.3)
    assert (mean[0] == 0).all() and (std[0] == 1).all()
    torch.testing.assert_close(mean[1], candidates[1, 2:].mean(0))  # the other prompt learns all the same


def test_on_shell_keeps_the_direction_and_has_the_norm_of_normal_noise():
    # (3, 4) has norm 5 and d = 2: sqrt(2) (0.6, 0.8)
    torch.testing.assert_close(on_shell(torch.tensor([[3.0, 4.0]])), 2**0.5 * torch.tensor([[0.6, 0.8]]))
    noise = 7 * torch.randn(5, 2, 3, 4)
    found = on_shell(noise)
    assert found.shape == noise.shape
    torch.testing.assert_close(found.flatten(1).norm(dim=1), torch.full((5,), 24**0.5))
    torch.testing.assert_close(found / noise, (found / noise)[:, :1, :1, :1].expand_as(noise))
    torch.testing.assert_close(on_shell(0.01 * noise), found)


class Toy:
    """The score is minus the squared distance from each prompt's own target on the shell."""

    def __init__(self, num_prompts=4, dim=8):
        generator = torch.Generator().manual_seed(1)
        self.targets = on_shell(torch.randn(num_prompts, dim, generator=generator))
        self.shape, self.seen, self.numbers = (dim,), [], []

    def draw(self, number, count):
        self.numbers.append((number, count))
        generator = torch.Generator().manual_seed(100 + number)
        return torch.randn(len(self.targets), count, *self.shape, generator=generator)

    def score(self, noise):
        return -(noise - self.targets[:, None]).square().sum(-1)

    def evaluate(self, noise):
        self.seen.append(noise)
        return self.score(noise)

    def search(self, rounds, std_floor=0.1, evaluate=None):
        options = {"candidates": 32, "elites": 8, "rounds": rounds, "std_floor": std_floor}
        return search_noise(self.draw, evaluate or self.evaluate, len(self.targets), **options)


def test_scores_rise_with_the_rounds_for_every_prompt():
    toy = Toy()
    mean, std = toy.search(4)
    by_round = torch.stack([toy.score(noise).mean(1) for noise in toy.seen])  # (rounds, prompts)
    assert by_round.shape == (4, 4)
    assert (by_round.diff(dim=0) > 0).all()
    # the law is that of the last round's elites: tighter than it began, and nearest to the prompt's own target
    assert ((mean[:, None] - toy.targets[None]).norm(dim=-1).argmin(1) == torch.arange(4)).all()
    assert std.max() < 1 and std.min() >= 0.1


def test_a_search_for_the_worst_goes_the_other_way():
    toy = Toy()
    toy.search(3, evaluate=lambda noise: -toy.evaluate(noise))
    by_round = torch.stack([toy.score(noise).mean(1) for noise in toy.seen])
    assert (by_round.diff(dim=0) < 0).all()


def test_first_round_tries_plain_noise_and_all_rounds_stay_on_the_shell():
    toy = Toy()
    toy.search(3)
    assert toy.numbers[0] == (0, 32)
    assert [number for number, _ in toy.numbers] == [0, 1, 2]
    torch.testing.assert_close(toy.seen[0], on_shell(toy.draw(0, 32).flatten(0, 1)).reshape(4, 32, 8))
    for noise in toy.seen:
        torch.testing.assert_close(noise.norm(dim=-1), torch.full((4, 32), 8**0.5))


def test_the_same_draws_give_the_same_law():
    first, second, shorter = Toy().search(3), Toy().search(3), Toy().search(2)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(first[0], shorter[0])


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        Toy().search(0)
