"""Preference methods through the trainer: what they compare, what their first gradient is, what they reduce to."""

import math

import pytest
import torch
from one_iteration import G, P, run, trainer_of

from flowrl.config import load_config
from flowrl.core.types import Scores, UnitBatch
from flowrl.errors import ConfigError
from flowrl.flow.matching import mean_square, noised
from flowrl.flow.methods.preference import winners_first

PAIRWISE = ["diffusion_dpo", "apo", "diffusion_kto", "dspo", "mapo", "inpo", "spo"]


def picked(tmp_path, *overrides):
    """A trainer, and the pairs of its first rollout as one batch."""
    trainer = trainer_of(tmp_path, *overrides)
    method, seen = trainer.method, {}
    trainer.updater.run = lambda rollout, advantages, keep, ids, iteration: (
        seen.update(rollout=rollout, advantages=advantages, keep=keep, ids=ids) or {}
    )
    trainer.run()
    batches, _ = trainer.updater._micro_batches(seen["ids"], seen["keep"], seen["advantages"])
    pairs = torch.cat(batches)
    return trainer, method, seen["rollout"].pick(pairs[:, 0], pairs[:, 1], seen["advantages"][pairs[:, 0], pairs[:, 1]])


@pytest.mark.parametrize("method", ["diffusion_dpo", "dspo", "apo", "dgpo"])
def test_winner_and_loser_share_time_and_noise(method, tmp_path):
    _, _, batch = picked(tmp_path, f"method={method}", "method.num_draws=3")
    rows = 2 if method != "dgpo" else G
    sigma, noise = batch.inputs.sigma.reshape(-1, rows), batch.inputs.noise.unflatten(0, (-1, rows))
    assert (sigma == sigma[:, :1]).all() and (noise == noise[:, :1]).all()
    assert len(sigma.unique()) == 3 * P, "each draw of each group has a time of its own"
    assert (batch.inputs.group.reshape(-1, rows) == batch.inputs.group.reshape(-1, rows)[:, :1]).all()
    assert len(batch.inputs.group.unique()) == 3 * P


def test_dpo_starts_at_ln_2_with_the_gradient_of_its_formula(tmp_path, exact):
    trainer, method, batch = picked(tmp_path, "method={name: diffusion_dpo, beta: 50, num_draws: 2}")
    policy = trainer.policy
    loss, metrics = method.loss(policy, batch)
    assert loss.tolist() == pytest.approx([math.log(2)] * len(loss), abs=exact)
    assert metrics["implicit_accuracy"].tolist() == [0.5] * (len(loss) // 2), "ties count half"
    found = torch.autograd.grad(loss.mean(), list(trainer.updater.parameters.values()))
    # at the start -log sigmoid'(0) = 1/2: the gradient is beta / 4 (grad error of the winner - that of the loser)
    u, sign = batch.inputs, batch.advantages.reshape(-1, 2)
    sign = torch.where(sign == sign.max(1, keepdim=True).values, 1.0, -1.0).flatten()
    error = mean_square(policy.predict_at(u.x, u.sigma, u.cond) - u.target)
    formula = 50 / 4 * (sign * error).sum() / (len(sign) / 2)
    wanted = torch.autograd.grad(formula, list(trainer.updater.parameters.values()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=exact)


@pytest.mark.parametrize("method", PAIRWISE)
def test_online_pairs_are_the_best_and_the_worst(method):
    method = load_config(None, [f"method={method}"]).method
    rewards = torch.tensor([0.1, 0.9, 0.4, math.nan, 0.5, 0.5, 0.5, 0.5])
    scores = Scores(rewards[:, None, None].double(), torch.ones(1), torch.tensor([0] * 4 + [1] * 4), 2)
    keep = method.select(method.advantages(scores).expand(-1, 2), scores, None)
    assert keep.all(1).tolist() == [True, True] + [False] * 6, "no pair of equals, none without a score"
    method = method.model_copy(update={"margin": 0.8})
    assert not method.select(method.advantages(scores).expand(-1, 2), scores, None).any()


def test_rows_of_pairs_are_sorted_and_put_back():
    class Inputs(list):
        def rows(self, index):
            return Inputs([self[i] for i in index])

    advantages = torch.tensor([0.2, 0.7, 0.9, -0.1, 0.3, 0.4])
    batch, order = winners_first(UnitBatch(Inputs("abcdef"), torch.zeros(6), advantages))
    assert batch.inputs == list("bcfade")
    assert torch.equal(batch.advantages[order.argsort()], advantages)


def test_apo_of_strength_0_is_diffusion_dpo_to_the_bit(tmp_path):
    settings = ["optimizer.updates_per_rollout=2", "method.beta=500"]
    dpo = run(tmp_path / "a", "method=diffusion_dpo", *settings)[1]
    none = run(tmp_path / "b", "method={name: apo, strength: 0}", *settings)[1]
    late = run(tmp_path / "c", "method={name: apo, latest_time: 0}", *settings)[1]
    apo = run(tmp_path / "d", "method={name: apo, latest_time: 1}", *settings)[1]
    assert all(torch.equal(dpo[name], none[name]) and torch.equal(dpo[name], late[name]) for name in dpo)
    assert max((dpo[name] - apo[name]).abs().max() for name in dpo) > 1e-6


def test_apo_s_penalty_holds_the_network_at_the_reference(tmp_path, exact):
    trainer, method, batch = picked(tmp_path, "method={name: apo, penalty: 3.0, latest_time: 1}")
    assert method.loss(trainer.policy, batch)[0].tolist() == pytest.approx([math.log(2)] * 2 * P, abs=exact)
    with torch.no_grad():
        for parameter in trainer.updater.parameters.values():
            parameter.mul_(1.05)
    plain = method.model_copy(update={"strength": 0.0})
    assert (method.loss(trainer.policy, batch)[0] > plain.loss(trainer.policy, batch)[0] + 1e-4).all()


def test_the_safeguard_leaves_the_winner_alone(tmp_path):
    """With mu = 1 the loser has no gradient where it is against the winner's: what is left is the winner's."""
    trainer, method, batch = picked(tmp_path, "method={name: mapo, safeguard: 1.0}")
    parameters = list(trainer.updater.parameters.values())
    plain = method.model_copy(update={"safeguard": None})
    values = [m.loss(trainer.policy, batch)[0] for m in (method, plain)]
    torch.testing.assert_close(*values, rtol=0, atol=0)
    guarded, free = (torch.cat([g.flatten() for g in torch.autograd.grad(v.mean(), parameters)]) for v in values)
    assert (guarded - free).norm() > 1e-3 * free.norm()
    ordered, _ = winners_first(batch)
    u = ordered.inputs
    error = mean_square(trainer.policy.predict_at(u.x, u.sigma, u.cond) - u.target)
    winner = torch.cat([g.flatten() for g in torch.autograd.grad(error[:P].mean(), parameters)])
    assert guarded @ winner > free @ winner, "a step lowers the winner's error by more"


def test_inpo_s_noise_is_what_the_model_ascribes_to_the_image(tmp_path, exact):
    times = ["method.times={kind: uniform, low: 0.3, high: 0.6}"]
    trainer, method, batch = picked(tmp_path, "method={name: inpo, fresh_noise: 0, inversion_steps: 24}", *times)
    u = method.inputs(trainer.policy, batch)
    torch.testing.assert_close(noised(u.clean, u.noise, u.sigma), u.x, rtol=0, atol=exact)
    torch.testing.assert_close(u.target, u.noise - u.clean, rtol=0, atol=exact)
    assert (u.noise - batch.inputs.noise).abs().mean() > 0.1
    # back down the same ODE: the inverted latent denoises to the image it came from
    x, sigma = u.x, u.sigma
    with torch.no_grad():
        for step in range(24, 0, -1):
            here = sigma * step / 24
            x = x - (sigma / 24)[:, None, None, None] * trainer.policy.predict_at(x, here, u.cond)
    assert (x - u.clean).square().mean() < 0.1 * (u.x - u.clean).square().mean()
    own = [mean_square(trainer.policy.predict_at(v.x, v.sigma, v.cond) - v.target).mean() for v in (u, batch.inputs)]
    assert own[0] < own[1], "the model denoises its own noise better than any"


@pytest.mark.parametrize("method", ["diffusion_dpo", "dgpo", "spo"])
def test_groups_are_whole_whatever_the_batch_size(method, tmp_path, exact):
    settings = [f"method={method}", "optimizer.updates_per_rollout=2", "rollout.num_prompts=4"]
    whole = run(tmp_path / "a", *settings)[1]
    small = run(tmp_path / "b", *settings, "optimizer.batch_size=3")[1]
    for name in whole:
        torch.testing.assert_close(small[name], whole[name], rtol=0, atol=exact)


@pytest.mark.parametrize("method", ["diffusion_dpo", "spo"])
def test_the_network_learns_the_order_of_a_pair(method, tmp_path):
    again = ["optimizer.epochs_per_rollout=6", "optimizer.learning_rate=1e-4", "rollout.num_prompts=2"]
    metrics, _ = run(tmp_path, f"method={method}", *again)
    assert metrics["implicit_accuracy"] > 0.7
    assert metrics["margin"] > 0 and metrics["reward_gap"] > 0


def test_dspo_refuses_a_safeguard():
    with pytest.raises(ConfigError, match="the losers of method.name=dspo have no gradient"):
        load_config(None, ["method={name: dspo, safeguard: 0.5}"])
