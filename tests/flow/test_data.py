"""Learning from the images of a data set, and building one."""

import numpy as np
import pytest
import torch
from one_iteration import run, trainer_of
from PIL import Image

from flowrl.config import check_files, load_config
from flowrl.core.pairs import Pair, read_pairs, write_pairs
from flowrl.core.types import SampleIds
from flowrl.errors import ConfigError
from flowrl.flow.data import PairData, to_pixels
from flowrl.pair_building import write_pairs_of
from flowrl.shapes.render import render
from flowrl.shapes.scenes import all_specs, sample_scene

OFFLINE = ["rewards=null", "eval.rewards={shapes_strict: 1}"]


def picture(category="colors", seed=0, row=0):
    rng = np.random.default_rng(seed)
    return render(sample_scene(list(all_specs(category))[row], rng))


@pytest.fixture
def folder(tmp_path):
    """Four pairs: winners are pictures, losers black."""
    black = Image.new("RGB", (32, 32))
    pairs = [Pair("a red circle", picture(seed=seed), black, columns={"source": seed}) for seed in range(4)]
    pairs[0] = Pair("three squares", picture(seed=9), black, reward_w=0.8, reward_l=0.3)
    write_pairs(tmp_path / "pairs", pairs)
    return tmp_path / "pairs"


def ids(rows, num_images=2):
    prompt = torch.tensor(rows).repeat_interleave(num_images)
    return SampleIds(torch.arange(len(prompt)), torch.arange(len(rows)).repeat_interleave(num_images), prompt)


def test_images_come_with_their_judgement(folder):
    images = PairData(read_pairs(folder), 2).images(ids([2, 0]))
    assert [image.info["preferred"] for image in images] == [1.0, 0.0, 0.8, 0.3]
    assert [np.asarray(image).mean() > 0 for image in images] == [True, False, True, False]
    winners = PairData(read_pairs(folder), 1).images(ids([2, 0], 1))
    assert [image.info["preferred"] for image in winners] == [1.0, 0.8]


def test_images_are_cut_and_resized():
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 15:25] = 255  # the middle square of the picture
    pixels = to_pixels([Image.fromarray(wide)], 20, 20)
    assert pixels.shape == (1, 3, 20, 20)
    assert pixels.mean() > 0.95


def test_encoding_is_decoding_turned_round(make_policy):
    adapter = make_policy().adapter
    pixels = to_pixels([picture(seed=seed) for seed in range(4)], *adapter.image_size)
    error = (adapter.decode(adapter.encode_images(pixels)) - pixels).square().mean()
    assert error < 0.1 * pixels.var()


@pytest.mark.parametrize("method", ["diffusion_dpo", "sft", "ram", "dgpo"])
def test_an_iteration_samples_nothing(method, folder, tmp_path):
    metrics, _ = run(tmp_path / "run", f"method={method}", f"data.pairs={folder}", *OFFLINE)
    assert metrics["nfe/rollout"] == 0 < metrics["nfe/train"]
    # two rows of the set: winners of 1 or .8, losers of 0 or .3
    assert metrics["reward"] in ([1.0, 0.9] if method == "sft" else [0.5, pytest.approx((1.0 + 1.1) / 4)])
    if method == "diffusion_dpo":
        assert metrics["reward_gap"] > 0.4


def test_a_reward_can_order_the_pairs_anew(folder, tmp_path):
    darker = [f"data.pairs={folder}", "rewards={'fake_rewards:dark': 1}"]
    labels, dark = (
        run(tmp_path / name, "method=diffusion_dpo", "optimizer.learning_rate=1e-3", *settings)[1]
        for name, settings in (("a", [f"data.pairs={folder}", *OFFLINE]), ("b", darker))
    )
    start = trainer_of(tmp_path / "c", "method=diffusion_dpo", *darker).updater.parameters
    steps = [torch.cat([(w[name] - start[name]).flatten() for name in start]) for w in (labels, dark)]
    assert torch.dot(*steps) < -0.5 * steps[0].norm() * steps[1].norm(), "black pictures win now"


def test_fine_tuning_fits_its_images(tmp_path):
    losses = []
    many = ["iterations=10", "optimizer.learning_rate=3e-4", "rollout.num_prompts=4", "method.num_draws=4"]
    write_pairs(tmp_path / "black", [Pair("a red circle", Image.new("RGB", (32, 32)))] * 4)
    trainer = trainer_of(tmp_path, "method=sft", f"data.pairs={tmp_path / 'black'}", *OFFLINE, *many, seen=losses)
    trainer.run()
    values = [metrics["policy_loss"] for metrics in losses]
    assert sum(values[-3:]) < 0.8 * sum(values[:3])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=flow_grpo", "data.pairs=x"], "method.name=flow_grpo learns from its own rollouts only"),
        (["method=spo", "data.pairs=x"], "method.name=spo learns from its own rollouts only"),
        (["method=sft"], "method.name=sft learns from a data set: set data.pairs"),
        (["method=ram", "rewards={preferred: 1}"], "reads the labels of a data set"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


def test_a_set_without_losers_is_for_fine_tuning_only(tmp_path):
    write_pairs(tmp_path / "images", [Pair("a red circle", picture())])
    settings = [f"data.pairs={tmp_path / 'images'}", *OFFLINE, f"output_dir={tmp_path / 'run'}"]
    check_files(load_config(None, ["method=sft", *settings]))
    with pytest.raises(ConfigError, match="has no losers, which method.name=apo needs"):
        check_files(load_config(None, ["method=apo", *settings]))
    with pytest.raises(ConfigError, match="nowhere"):
        check_files(load_config(None, ["method=sft", *settings[1:], "data.pairs=nowhere"]))


def test_built_pairs_are_what_the_reward_says(tmp_path):
    small = ["method=diffusion_nft", "rollout={num_inference_steps: 4, num_prompts: 3, group_size: 4, batch_size: 5}"]
    config = load_config(None, [*small, "rewards={'fake_rewards:dark': 1}"])
    assert write_pairs_of(config, tmp_path / "pairs", num_pairs=7, margin=0.01) == 7
    pairs = read_pairs(tmp_path / "pairs")
    for pair in pairs:
        winner, loser = (1 - np.asarray(image).mean() / 255 for image in pair.open())
        assert [winner, loser] == pytest.approx([pair.reward_w, pair.reward_l], abs=1e-6)
        assert winner - loser > 0.01
    assert {"category", "held_out"} <= set(pairs.prompt_set().columns)
    again = tmp_path / "again"
    write_pairs_of(config, again, num_pairs=7, margin=0.01)
    assert (again / "pairs.jsonl").read_bytes() == (tmp_path / "pairs" / "pairs.jsonl").read_bytes()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\ntwo squares\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no group differs by more than 2"):
        few = load_config(None, [*small, "rewards={'fake_rewards:dark': 1}", f"data.train={prompts}"])
        write_pairs_of(few, tmp_path / "none", num_pairs=1, margin=2)
