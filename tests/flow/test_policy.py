"""What is scored is what is stored, and the gradient is that of the log-prob."""

import pytest
import torch
from torch.distributions import Normal

from flowrl.config import load_config
from flowrl.core.gaussian import gaussian_kl
from flowrl.core.types import SampleIds
from flowrl.flow.export import export_policy
from flowrl.flow.methods.flow_grpo import FlowGRPO
from flowrl.flow.methods.flow_grpo_fast import FlowGRPOFast
from flowrl.flow.paths import predict_clean, predict_noise
from flowrl.flow.plans import all_steps, window

NUM_STEPS = 6
LEVELS = (0.7,) * (NUM_STEPS - 1)


def ids(num=4):
    return SampleIds(torch.arange(num), torch.arange(num) // 2, torch.arange(num) // 2)


def pick_all(rollout, advantages=None):
    num, units = len(rollout.ids), rollout.num_units
    pairs = torch.cartesian_prod(torch.arange(num), torch.arange(units))
    advantages = torch.ones(num) if advantages is None else advantages
    return rollout.pick(pairs[:, 0], pairs[:, 1], advantages[pairs[:, 0]])


def perturb(policy, scale=0.02):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in policy.trainable_parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transition", ["flow_sde", "cps"])
@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
def test_ratio_is_one_before_the_first_update(make_policy, storage, transition, guidance_scale):
    policy = make_policy(
        transition=transition,
        num_inference_steps=NUM_STEPS,
        storage_dtype=storage,
        guidance_scale=guidance_scale,
        keep_means=True,
    )
    rollout = policy.rollout(ids(), all_steps(LEVELS), seed=0, iteration=0)
    # the same batch shape as in the rollout, so the same bits; the last trained step included
    for unit in range(rollout.num_units):
        batch = rollout.pick(torch.arange(4), torch.full((4,), unit), torch.ones(4))
        with torch.no_grad():
            out = policy.replay(batch)
        assert torch.equal(out.log_prob, batch.old_log_prob)
        assert torch.equal(out.mean, batch.inputs.mean)


def drift(out, batch):
    """rms(mean of replay - mean of rollout) / std, the largest of the batch."""
    return ((out.mean - batch.inputs.mean).square().mean((1, 2, 3)).sqrt() / out.std).max()


def test_packing_units_of_several_steps_changes_nothing_that_matters(make_policy, exact):
    policy = make_policy(transition="flow_sde", num_inference_steps=NUM_STEPS, keep_means=True)
    batch = pick_all(policy.rollout(ids(), all_steps(LEVELS), seed=0, iteration=0))
    with torch.no_grad():
        out = policy.replay(batch)
    assert ((out.log_prob - batch.old_log_prob).exp() - 1).abs().max() < exact
    assert drift(out, batch) < exact


def test_drift_sees_a_wrong_velocity_that_the_ratio_hides(make_policy):
    """At the first step a velocity 2 % off moves a mean-reduced ratio by less than the drift shows."""
    policy = make_policy(transition="flow_sde", num_inference_steps=NUM_STEPS, keep_means=True)
    batch = pick_all(policy.rollout(ids(), window(LEVELS, start=0, size=1), seed=0, iteration=0))
    predict = policy.adapter.predict
    policy.adapter.predict = lambda *args: 1.02 * predict(*args)
    with torch.no_grad():
        out = policy.replay(batch)
    assert ((out.log_prob - batch.old_log_prob).exp() - 1).abs().max() < 1e-3
    assert drift(out, batch) > 1e-3


def test_policy_gradient_equals_autograd_through_an_explicit_log_prob(make_policy, exact):
    policy = make_policy(transition="flow_sde", num_inference_steps=NUM_STEPS)
    policy.train_all(keep_reference=False)
    rollout = policy.rollout(ids(), window(LEVELS, start=2, size=1), seed=0, iteration=0)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5])
    batch = pick_all(rollout, advantages)
    method = FlowGRPO(clip_range=1e-3)
    loss, _ = method.loss(policy, batch)
    loss.mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in policy.trainable_parameters()}

    policy.model.zero_grad()
    u = batch.inputs
    sigma, sigma_next, a = float(u.sigma[0]), float(u.sigma_next[0]), 0.7
    v = policy.adapter.predict(u.x, u.sigma, policy.conditioning(u.cond))
    rate = a * (sigma / (1 - sigma)) ** 0.5  # equation 12 of arXiv 2505.05470, written out
    mean = u.x - (sigma - sigma_next) * (v + rate**2 / (2 * sigma) * (u.x + (1 - sigma) * v))
    log_prob = Normal(mean, rate * (sigma - sigma_next) ** 0.5).log_prob(u.x_next).mean((1, 2, 3))
    (-advantages * log_prob).mean().backward()
    for name, parameter in policy.trainable_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=exact)


@pytest.mark.parametrize("lora", [True, False])
def test_kl_has_a_gradient_and_starts_at_zero(make_policy, lora):
    policy = make_policy(transition="cps", num_inference_steps=NUM_STEPS)
    policy.add_lora(4, 8) if lora else policy.train_all(keep_reference=True)
    rollout = policy.rollout(ids(), all_steps(LEVELS), seed=0, iteration=0)
    batch = pick_all(rollout, torch.zeros(4))
    method = FlowGRPO(transition="cps", beta=1.0)
    assert method.loss(policy, batch)[1]["kl"].abs().max() == 0
    perturb(policy)
    optimizer = torch.optim.Adam([parameter for _, parameter in policy.trainable_parameters()], lr=1e-3)
    history = []
    for _ in range(12):
        loss, metrics = method.loss(policy, batch)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        history.append(metrics["kl"].mean().item())
    assert history[-1] < 0.5 * history[0]
    policy.model.zero_grad()
    FlowGRPO(transition="cps", beta=0.0).loss(policy, batch)[0].mean().backward()
    assert all(p.grad is None or (p.grad == 0).all() for _, p in policy.trainable_parameters())


def test_kl_is_that_of_the_transition(make_policy):
    policy = make_policy(transition="flow_sde", num_inference_steps=NUM_STEPS)
    policy.add_lora(4, 8)
    perturb(policy)
    rollout = policy.rollout(ids(), all_steps(LEVELS), seed=0, iteration=0)
    batch = pick_all(rollout, torch.zeros(4))
    with torch.no_grad():
        out = policy.replay(batch)
        with policy.reference():
            reference = policy.replay(batch)
    law, other = (Normal(o.mean, o.std[:, None, None, None]) for o in (out, reference))
    expected = torch.distributions.kl_divergence(law, other).mean((1, 2, 3))
    torch.testing.assert_close(gaussian_kl(out.mean, reference.mean, out.std), expected)


def test_reference_is_the_untouched_model(make_policy):
    base = make_policy()
    x, sigma = base.noise([torch.Generator().manual_seed(0)]), torch.tensor([0.5])
    expected = base.adapter.predict(x, sigma, base.negative)
    for prepare in (lambda p: p.add_lora(4, 8), lambda p: p.train_all(keep_reference=True)):
        policy = make_policy()
        prepare(policy)
        perturb(policy, 0.1)
        with policy.reference():
            torch.testing.assert_close(policy.adapter.predict(x, sigma, policy.negative), expected, rtol=0, atol=0)
        assert (policy.adapter.predict(x, sigma, policy.negative) - expected).abs().max() > 1e-3


def test_trained_weights_are_float32_and_lora_targets_are_checked(make_policy):
    policy = make_policy()
    policy.model.to(torch.bfloat16)
    policy.add_lora(4, 8)
    parameters = dict(policy.trainable_parameters())
    assert parameters
    assert all("lora" in name and value.dtype == torch.float32 for name, value in parameters.items())
    with pytest.raises(ValueError, match="LoRA target 'attn.to_qq' matches no module"):
        make_policy().add_lora(4, 8, ["attn.to_qq"])


@pytest.mark.parametrize(("rank", "alpha"), [(4, 4), (4, 8), (8, 4)])
def test_exported_lora_does_in_stock_diffusers_what_it_does_here(
    make_policy, shapes_path, tmp_path, exact, rank, alpha
):
    from diffusers import StableDiffusion3Pipeline
    from safetensors.torch import load_file

    from flowrl.catalog import find_model

    policy = make_policy()
    x, sigma = policy.noise([torch.Generator().manual_seed(0)]), torch.tensor([0.5])
    base = policy.adapter.predict(x, sigma, policy.negative)
    policy.add_lora(rank, alpha)
    perturb(policy, 0.2)
    assert export_policy(policy, shapes_path, tmp_path) < exact
    pipe = StableDiffusion3Pipeline.from_pretrained(find_model(shapes_path), text_encoder_3=None, tokenizer_3=None)
    pipe.load_lora_weights(tmp_path)
    ours = policy.adapter.predict(x, sigma, policy.negative)
    theirs = pipe.transformer(x, timestep=sigma * 1000, **policy.negative.tensors).sample
    assert (ours - theirs).abs().max() < exact
    assert (ours - base).abs().max() > 0.1
    keys = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    assert not [key for key in keys if any(bad in key for bad in ("base_model", "default", "module.", "_orig_mod"))]


def test_rollout_does_not_depend_on_the_batch(make_policy, exact):
    policy = make_policy(transition="cps", num_inference_steps=NUM_STEPS)
    plan = all_steps(LEVELS)
    together = policy.rollout(ids(), plan, seed=3, iteration=7)
    parts = policy.join([policy.rollout(ids()[rows], plan, seed=3, iteration=7) for rows in (slice(0, 1), slice(1, 4))])
    torch.testing.assert_close(parts.trajectory.states, together.trajectory.states, rtol=0, atol=exact)
    assert parts.ids.sample.tolist() == together.ids.sample.tolist()
    other = policy.rollout(ids(), plan, seed=3, iteration=8)
    assert (other.trajectory.clean - together.trajectory.clean).abs().max() > 0.1


def test_path_ends():
    x0, eps, sigma = torch.randn(3, 2), torch.randn(3, 2), torch.tensor([0.1, 0.5, 0.9])
    x = (1 - sigma[:, None]) * x0 + sigma[:, None] * eps
    torch.testing.assert_close(predict_clean(x, eps - x0, sigma), x0)
    torch.testing.assert_close(predict_noise(x, eps - x0, sigma), eps)


def test_window_is_drawn_within_its_range():
    import numpy as np

    method, grid = FlowGRPOFast(steps={"size": 2, "range": (1, 5)}), torch.linspace(1, 0, 11)

    def draw(seed):
        return method.plans(grid, iteration=0, rng=np.random.default_rng(seed))[0]

    assert {draw(seed).trained for seed in range(60)} == {(1, 2), (2, 3), (3, 4)}
    assert [step for step, level in enumerate(draw(0).noise_levels) if level] == list(draw(0).trained)
    with pytest.raises(ValueError, match="does not fit"):
        window((0.7,) * 9, start=8, size=2)


def test_only_the_window_is_stored(make_policy):
    policy = make_policy(num_inference_steps=10)
    rollout = policy.rollout(ids(2), window((0.7,) * 9, start=3, size=2), seed=0, iteration=0)
    assert rollout.trajectory.states.shape[:2] == (2, 3)
    assert rollout.num_units == 2


def test_default_config_plans_fit():
    config = load_config()
    assert config.method.problems(config.rollout) == []


def test_a_group_can_share_its_initial_noise(make_policy):
    plan = all_steps(LEVELS)
    for share in (False, True):
        policy = make_policy(num_inference_steps=NUM_STEPS, share_initial_noise=share, group_size=2)
        states = policy.rollout(ids(), plan, seed=0, iteration=0).trajectory.states
        assert torch.equal(states[0, 0], states[1, 0]) == share
        assert not torch.equal(states[0, 1], states[1, 1]), "the first step tells them apart"
        assert not torch.equal(states[1, 0], states[2, 0]), "another group"
