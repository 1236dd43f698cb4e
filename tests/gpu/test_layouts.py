"""Layouts of up to four ranks over NCCL train as one process on a CPU.

Ranks share GPUs if there are too few, which NCCL allows since 2.30; `make test-gpu` preloads such a release.
"""

import ctypes
import os
from collections.abc import Iterator
from itertools import chain, cycle, islice

import pytest
import torch

from tests.kernels.runs import clip_recorded_gradients
from tests.parity.combinations import (
    LAYOUTS,
    OPTIONS,
    ROUTERS,
    assert_same,
    model_of,
    run_on,
    train_of,
    train_with,
    with_option,
)
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]

MAX_RANKS, NUM_STEPS = 4, 2
MODELS = ("translation", *ATTENTIONS)
FIRST_SHARING_NCCL = 23000
"""NCCL 2.30, as `ncclGetVersion` returns it."""

if torch.cuda.is_available() and torch.cuda.device_count() < MAX_RANKS:
    # Before the ranks' processes start. Kernels of ranks that share a GPU must fit on it together.
    os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}


def cases() -> Iterator[tuple[Degrees, str, str, str]]:
    """(layout, option, router, model): every layout with two options, each with one router and one model."""
    options, routers, models = cycle(OPTIONS), cycle(ROUTERS), cycle(MODELS)
    for degrees in chain.from_iterable(LAYOUTS.values()):
        for option in islice(options, 2):
            if degrees.workers <= MAX_RANKS and with_option(degrees, option) is not None:
                yield degrees, option, next(routers), next(models)


def skip_reason(num_ranks: int) -> str | None:
    """Why the GPUs cannot hold so many ranks; None if they can."""
    num_gpus, version = torch.cuda.device_count(), ctypes.c_int()
    if num_ranks <= num_gpus:
        return None
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))  # of the library that is loaded
    if version.value >= FIRST_SHARING_NCCL:
        return None
    return (
        f"needs {num_ranks} GPUs ({num_gpus} available) or NCCL 2.30 or later, which lets ranks share a GPU "
        f"(found {version.value})"
    )


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_layouts_over_nccl_train_as_one_process_on_a_cpu(ranks: Pools, case: tuple[Degrees, str, str, str]) -> None:
    degrees, option, router, model = case
    if (reason := skip_reason(degrees.workers)) is not None:
        pytest.skip(reason)
    fields = ROUTERS[router]
    spec = model_of(**fields) if model == "translation" else language_model(model, **fields)
    layout, inputs = with_option(degrees, option), (spec, train_with(option), Shape(), NUM_STEPS)
    assert layout is not None
    over_nccl = run_on(ranks, layout, *inputs, False, False, None, "cuda")
    assert_same(over_nccl, run_on(ranks, Degrees(), *inputs), 1e-8)


@pytest.mark.parametrize("degrees", [Degrees(expert=2), Degrees(data=2, fsdp=2, expert_fsdp=2)], ids=str)
def test_layouts_with_kernels_train_as_one_process_on_a_cpu(ranks: Pools, degrees: Degrees) -> None:
    """In float32, whose norms, routing and updates are computed by kernels."""
    if (reason := skip_reason(degrees.workers)) is not None:
        pytest.skip(reason)
    inputs = (language_model(MODELS[1]), train_of("float32"), Shape(), NUM_STEPS)
    over_nccl = run_on(ranks, degrees, *inputs, False, False, None, "cuda")
    clip_recorded_gradients(over_nccl, inputs[1])
    assert_same(over_nccl, run_on(ranks, Degrees(), *inputs), 1e-3)
