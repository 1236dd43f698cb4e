"""Whether a layer is computed by the kernels: checked on the device, and measured."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moe.dispatch import dispatcher, measurement
from moe.experts import FUSED, Cost, LocalExperts
from moe.kernels import check, norm, support
from moe.kernels.configs import Configs
from moe.kernels.experts import FusedComputation
from moe.routing import Choices
from tests.kernels.cases import DEVICE, SMALL
from tests.kernels.enabled import kernels_everywhere

EVERYWHERE = torch.device(DEVICE)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Configs, "for_device", lambda device, dtype: SMALL)
    monkeypatch.setattr(norm, "MAX_PARTS", 8)


def test_kernels_agree_with_plain_products() -> None:
    assert 0 < check.kernel_error(EVERYWHERE) < support._MAX_ERROR / 3


def test_routing_by_kernels_agrees_with_the_routers() -> None:
    assert check.routing_error(EVERYWHERE) < 1e-5


def test_norms_and_rotations_agree_with_plain_operations() -> None:
    assert check.norm_error(EVERYWHERE) < 1e-2
    assert check.rotary_error(EVERYWHERE) < 1e-2


def test_updates_agree_with_adamw_of_torch() -> None:
    assert check.optimizer_error(EVERYWHERE) < 1e-2


@pytest.mark.parametrize("kind", get_args(support.KernelKind))
def test_the_check_may_come_first_in_a_pass_without_gradients(kind: support.KernelKind) -> None:
    with torch.inference_mode():
        assert support._why_not(EVERYWHERE, kind) is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["combine", "product", "accumulate"])
def test_wrong_kernels_are_noticed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(FusedComputation, method)

    def wrong(self: FusedComputation, first: Tensor, *arguments: object, **keywords: object) -> Tensor:
        halved = (first[0] / 2, first[1]) if isinstance(first, tuple) else first / 2
        return original(self, halved, *arguments, **keywords)

    monkeypatch.setattr(FusedComputation, method, wrong)
    assert check.kernel_error(EVERYWHERE) > support._MAX_ERROR


class _Device:
    """What torch says of a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", None)
        self.device = torch.device("cuda", capability[0])


def test_an_old_gpu_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    old = _Device(monkeypatch, (7, 5)).device
    with pytest.warns(UserWarning, match=r"7\.5 is below 8\.0"):
        assert not support.kernels_are_correct(old, "experts")
    for kind in get_args(support.KernelKind):
        assert not support.kernels_are_correct(old, kind)  # warnings are errors in tests


def test_kernels_that_do_not_compile_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(monkeypatch, (9, 9)).device

    def fail(device: torch.device) -> float:
        raise RuntimeError("ptxas exited")

    monkeypatch.setitem(check.CHECKS, "norms", fail)
    monkeypatch.setitem(check.CHECKS, "rotary", lambda device: 0.0)
    with pytest.warns(UserWarning, match="norms .* ptxas exited"):
        assert not support.kernels_are_correct(device, "norms")
    assert support.kernels_are_correct(device, "rotary")


def test_a_layer_is_timed_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, fused_computation = [], dispatcher.fused_computation

    def noted(x: Tensor, choices: Choices, experts: LocalExperts) -> Any:
        ways.append(fused_computation(x, choices, experts))
        return ways[-1]

    monkeypatch.setattr(dispatcher, "fused_computation", noted)
    w_in = torch.ones(2, 16, 16, dtype=torch.bfloat16, device=DEVICE)
    with kernels_everywhere():
        seconds = measurement._layer_seconds(w_in, 8, ({"segments": Cost(0.0, 1.0)}, {FUSED: Cost(0.0, 0.0)}))
    assert min(seconds) > 0
    assert [way is not None for way in ways] == [False, True] * (len(ways) // 2)
    assert len(ways) > 2
