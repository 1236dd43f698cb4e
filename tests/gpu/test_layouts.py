"""Layouts of up to four ranks over NCCL train as one process on a CPU.

Ranks share GPUs where there are fewer, which NCCL allows since 2.30; `make test-gpu` preloads such a release.
"""

import os
from collections.abc import Iterator
from itertools import cycle

import pytest
import torch

from tests.parity.combinations import LAYOUTS, OPTIONS, ROUTERS, assert_same, model_of, run_on, train_with, with_option
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Shape

# Before the ranks' processes start. Kernels of ranks that share a GPU must fit on it together.
os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]

MAX_RANKS, NUM_STEPS = 4, 2
MODELS = ("translation", *ATTENTIONS)
CASES = [
    (degrees, option, router, model)
    for (degrees, option), router, model in zip(
        [
            (degrees, option)
            for (degrees, option) in zip(
                [degrees for layouts in LAYOUTS.values() for degrees in layouts for _ in range(2)], cycle(OPTIONS)
            )
            if degrees.workers <= MAX_RANKS and with_option(degrees, option) is not None
        ],
        cycle(ROUTERS),
        cycle(MODELS),
    )
]
"""Every layout with two options, of a router and a model each."""


def why_too_few(num_ranks: int) -> str | None:
    """Why the GPUs cannot hold so many ranks; None if they can."""
    num_gpus = torch.cuda.device_count()
    if num_ranks <= num_gpus or torch.cuda.nccl.version() >= (2, 30):
        return None
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"needs {num_ranks} GPUs, of {num_gpus}, or NCCL 2.30, with which ranks share one, instead of {version}"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_over_nccl_train_as_one_process_on_a_cpu(ranks: Pools, case: tuple[Degrees, str, str, str]) -> None:
    degrees, option, router, model = case
    if (reason := why_too_few(degrees.workers)) is not None:
        pytest.skip(reason)
    fields = ROUTERS[router]
    spec = model_of(**fields) if model == "translation" else language_model(model, **fields)
    layout, inputs = with_option(degrees, option), (spec, train_with(option), Shape(), NUM_STEPS)
    assert layout is not None
    over_nccl = run_on(ranks, layout, *inputs, False, False, None, "cuda")
    assert_same(over_nccl, run_on(ranks, Degrees(), *inputs), 1e-8)
