"""Promise 1 with DeepEP's interface: a stand-in for it, by plain all-to-alls, gives the losses, gradients and routing
of one process; where it fails, the plain all-to-all takes its place with one reason."""

import warnings
from functools import cache
from typing import Any

import pytest
import torch

from moe.dispatch import LocalDispatcher, deepep
from moe.parallel import Layout
from tests.parity import deep_ep_stand_in
from tests.parity.combinations import ROUTERS, Model, assert_ranks_same, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Shape, run, state_of
from tests.refusals import expect_problem

NUM_STEPS = 2
MODEL = language_model("GQA with windows, sinks and biases", router="softmax_topk")
CALLS_OF_THE_CHECK = ["get_dispatch_layout", "dispatch", "combine"]
LAYOUTS = (
    Degrees(expert=2), Degrees(expert=4, tensor=2), Degrees(expert=2, data=2, fsdp=2), Degrees(expert=4, max_rows=200),
    Degrees(expert=2, recompute="full"),
)  # fmt: skip


def run_with_stand_in(spec: Model, degrees: Degrees, shape: Shape) -> tuple[list[dict[str, Any]], list[str]]:
    """(records of a run in float64, names of DeepEP's calls). The limits to GPUs and bfloat16 are lifted."""
    supported, deepep.why_unsupported = deepep.why_unsupported, lambda *_arguments: None
    try:
        with deep_ep_stand_in.installed() as calls:
            return run(spec, train_of(), degrees, shape, NUM_STEPS), calls
    finally:
        deepep.why_unsupported = supported


@cache
def reference(spec: Model, shape: Shape) -> list[dict[str, Any]]:
    return run(spec, train_of(), Degrees(), shape, NUM_STEPS)


def check(ranks: Pools, degrees: Degrees, spec: Model, shape: Shape) -> list[str]:
    """Compare a run; return the calls of rank 0."""
    answers = ranks[degrees.workers].run(run_with_stand_in, spec, degrees, shape)
    assert_ranks_same([records for records, _ in answers], reference(spec, shape), 1e-10)
    return answers[0][1]


@pytest.mark.sample(3)
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router(ranks: Pools, router: str) -> None:
    number = list(ROUTERS).index(router)
    spec = language_model(list(ATTENTIONS)[number % len(ATTENTIONS)], **ROUTERS[router])
    calls = check(ranks, LAYOUTS[number % len(LAYOUTS)], spec, Shape())
    names = {"get_dispatch_layout", "dispatch", "combine", "dispatch with a handle"}
    assert set(calls) == names if "expert choice" not in router else calls == CALLS_OF_THE_CHECK


def test_more_rows_than_a_rank_may_receive_are_exchanged_in_chunks(ranks: Pools) -> None:
    assert check(ranks, Degrees(expert=4, max_rows=9), MODEL, Shape()) == CALLS_OF_THE_CHECK


def test_ranks_without_tokens(ranks: Pools) -> None:
    """One token group for two data ranks."""
    check(ranks, Degrees(expert=4, tensor=2), MODEL, Shape(groups=1, rows=1, source=2, target=1))


def dispatchers(fault: float = 0.0, *, lifts_limits: bool = True) -> tuple[list[str], list[str], list[str]]:
    """(kinds of the layers' dispatchers, warnings, DeepEP's calls) at the start of a run on two ranks."""
    supported = deepep.why_unsupported
    if lifts_limits:
        deepep.why_unsupported = lambda *_arguments: None
    layout = Layout.build(Degrees(expert=2).plan(8))
    try:
        with deep_ep_stand_in.installed(fault) as calls, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = state_of(MODEL, train_of(), layout)
    finally:
        deepep.why_unsupported = supported
        layout.close()
    messages = [str(warning.message) for warning in caught if "DeepEP" in str(warning.message)]
    return [type(layer.dispatch).__name__ for layer in state.moe_layers.local_layers.values()], messages, calls


def test_a_deepep_that_computes_otherwise_is_not_used_for_one_reason(ranks: Pools) -> None:
    for kinds, messages, calls in ranks[2].run(dispatchers, 0.5):
        assert kinds == ["AllToAllDispatcher"] * 2
        assert len(messages) == 1
        assert "sums differ" in messages[0]
        assert calls == CALLS_OF_THE_CHECK


def test_a_device_that_deepep_does_not_support_is_named_once(ranks: Pools) -> None:
    for kinds, messages, calls in ranks[2].run(dispatchers_of_a_cpu):
        assert kinds == ["AllToAllDispatcher"] * 2
        assert messages == ["DeepEP is not used: it requires NVIDIA GPUs"]
        assert not calls


def dispatchers_of_a_cpu() -> tuple[list[str], list[str], list[str]]:
    return dispatchers(lifts_limits=False)


def test_flat_dispatch_is_no_deepep() -> None:
    with deep_ep_stand_in.installed() as calls:
        chosen = deepep.DeepEP(Layout.single(), torch.bfloat16, "flat")
        plain = LocalDispatcher()
        assert chosen.dispatcher(plain, 16, 2, "layer") is plain
    assert not calls


def test_deepep_that_is_required_must_be_installed() -> None:
    with expect_problem("not_installed", "parallel.dispatch", "deepep"):
        deepep.DeepEP(Layout.single(), torch.bfloat16, "deepep")


@pytest.mark.parametrize(
    ("capability", "dtype", "row_bytes", "per_token", "parts", "reason"),
    [
        ((8, 0), torch.bfloat16, 4096, 8, 1, "capability 8.0 is below"),
        ((9, 0), torch.float32, 4096, 8, 1, "not torch.float32"),
        ((10, 0), torch.bfloat16, 4098, 8, 1, "4098 bytes"),
        ((9, 0), torch.bfloat16, 4096, 33, 1, "33 experts"),
        ((9, 0), torch.bfloat16, 4096, 8, 2, "over 2 ranks"),
        ((9, 0), torch.bfloat16, 4096, 8, 1, None),
    ],
)
def test_limits_of_deepep(
    capability: tuple[int, int], dtype: torch.dtype, row_bytes: int, per_token: int, parts: int, reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    answer = deepep.why_unsupported(torch.device("cuda", 0), dtype, row_bytes, per_token, parts)
    assert answer is None if reason is None else reason in str(answer)
