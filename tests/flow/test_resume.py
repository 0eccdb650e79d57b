"""A run that is stopped and resumed ends with the same bits, lagged copies included."""

import pytest
import torch
from one_iteration import trainer_of

SHORT = ["rollout.num_inference_steps=4", "iterations=2", "log.checkpoint_every=1", "optimizer.updates_per_rollout=2"]
# the copies lag from the first iteration on
CASES = {
    "ram": ["method={name: ram, num_draws: 1, decay_rate: 0.4, multiplier: 5}"],
    "diffusion_nft": ["method={name: diffusion_nft, num_draws: 1}"],
    "awm": ["method={name: awm, num_draws: 1, decay_rate: 0.1}"],
    "dgpo": ["method={name: dgpo, num_draws: 1}", "optimizer.ema_decay=0.9"],
    "diffusion_dpo": ["method=diffusion_dpo"],
}


def state(trainer):
    copies = {f"{n}/{k}": v for n, tensors in trainer.policy.lagged_weights.items() for k, v in tensors.items()}
    return {name: value.detach().clone() for name, value in (trainer.updater.parameters | copies).items()}


@pytest.mark.parametrize(("name", "lora"), [*((name, False) for name in CASES), ("ram", True)])
def test_a_resumed_run_ends_with_the_same_bits(name, lora, tmp_path):
    settings = [*CASES[name], *SHORT, *(["model.lora={rank: 4}"] if lora else [])]
    whole = trainer_of(tmp_path / "whole", *settings)
    whole.run()

    def stop(iteration, metrics, seconds):
        if iteration == 2:
            raise KeyboardInterrupt

    stopped = trainer_of(tmp_path / "stopped", *settings)
    stopped.on_iteration = stop
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    resumed = trainer_of(tmp_path / "stopped", *settings)
    resumed.resume()
    assert resumed.iteration == 1
    resumed.run()
    wanted, found = state(whole), state(resumed)
    assert len(wanted) > len(whole.updater.parameters) or name == "diffusion_dpo"
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[key], found[key]) for key in wanted)
    lagged = [key for key in wanted if key.startswith(("old/", "average/"))]
    if lagged and not lora:
        assert any(not torch.equal(wanted[key], wanted[key.partition("/")[2]]) for key in lagged), "it lags"
