import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

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


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
