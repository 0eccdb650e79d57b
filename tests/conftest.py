import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flowrl.core.prompts import PromptSet


@pytest.fixture(scope="session")
def shapes_path() -> str:
    return "shapes-sd3"


@pytest.fixture
def make_policy(shapes_path):
    """Builds a policy on the embedded model; one forward pass takes milliseconds."""
    from flowrl.pipelines.sd3 import SD3Adapter

    from flowrl.flow.policy import FlowPolicy

    def build(prompts=("a red circle", "three squares"), **options):
        adapter = SD3Adapter.load(shapes_path, max_sequence_length=0)
        return FlowPolicy(adapter, PromptSet(list(prompts), {}).prompts, **options)

    return build


class Float64(TorchFunctionMode):
    """Within it, every float32 that some code asks for is a float64; files are read as what they are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func not in (torch.asarray, torch.frombuffer, torch.Tensor.view):  # these only name what the bytes are
            args = [torch.float64 if value is torch.float32 else value for value in args]
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        if func is torch.Tensor.to and result.dtype is torch.float32:  # a loaded model goes to its device
            result = result.double()
        return result


@pytest.fixture
def exact():
    """Runs the test in float64; the value is how far two ways to the same number may lie apart there.

    Kernels add in another order on another processor, batch shape or number of threads. In the model here this makes
    at most eps 2.2e-16 x 512 terms of the longest sum x 40 layers in a row = 5e-12 of values near 1; the rest, 200, is
    for what multiplies it: 1 / std in a log-prob, the growth along a trajectory, Adam's division.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with Float64():
        yield 1e-9
    torch.set_default_dtype(default)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
