"""What a config decides about the engine, the environment does not change."""

import logging

import pytest
import torch

from flowrl.build import build_accelerator
from flowrl.config import load_config


def build(**environment):
    patch = pytest.MonkeyPatch()
    for name, value in environment.items():
        patch.setenv(name, value)
    try:
        return build_accelerator(load_config(None, ["device=cpu"]))
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_DYNAMO_BACKEND", "eager"),
        ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "perhaps"),
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("ACCELERATE_TORCH_DEVICE", "meta"),
        ("ACCELERATE_USE_CPU", "perhaps"),
    ],
)
def test_the_environment_is_overruled_and_named_once(caplog, name, value):
    with caplog.at_level(logging.WARNING, "flowrl"):
        engine = build(**{name: value})
    found = engine.gradient_accumulation_steps, engine.state.dynamo_plugin.backend.value, engine.mixed_precision
    assert (*found, engine.device.type) == (1, "NO", "no", "cpu")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [f"{name}={value}"]


def test_a_gradient_is_not_divided():
    engine = build(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    weight = torch.tensor(3.0, requires_grad=True)
    engine.backward(weight * weight)
    assert weight.grad == 6


def test_what_asks_for_the_same_is_not_named(caplog):
    with caplog.at_level(logging.WARNING, "flowrl"):
        build(
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS="1",
            ACCELERATE_DYNAMO_BACKEND="NO",
            ACCELERATE_MIXED_PRECISION="no",
            ACCELERATE_USE_CPU="true",
            ACCELERATE_TORCH_DEVICE="cpu",
        )
        build(ACCELERATE_USE_CPU="False")
    assert not caplog.records


def test_how_a_run_is_launched_is_left_alone(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    assert build().state.debug


def test_the_device_of_an_earlier_run_is_not_kept():
    from accelerate import PartialState

    PartialState().device = torch.device("meta")
    assert build().device.type == "cpu"
