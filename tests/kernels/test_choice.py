"""Whether a layer is computed by the kernels: checked on the device, and measured."""

from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from moe.dispatch import dispatcher, measurement
from moe.experts import FUSED, Cost, LocalExperts, stored_or_measured
from moe.kernels import check, norm, support
from moe.kernels.configs import Configs
from moe.kernels.experts import FusedComputation
from moe.layers import MoELayer
from moe.routing import Choices
from moe.spec import MoESpec
from tests.kernels.cases import DEVICE, SMALL
from tests.kernels.enabled import kernels_everywhere

EVERYWHERE = torch.device(DEVICE)
OTHERS = Configs.others


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Configs, "for_device", lambda device, dtype: SMALL)
    monkeypatch.setattr(norm, "MAX_PARTS", 8)


def test_kernels_agree_with_plain_products() -> None:
    assert 0 < check.kernel_error(EVERYWHERE) < support.MAX_ERROR / 3


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
    assert check.kernel_error(EVERYWHERE) > support.MAX_ERROR


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


OTHER_TILES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("product", (32, 16, 16, 4, 2)), ("product", (16, 32, 16, 4, 2)), ("product", (32, 32, 16, 4, 2)),
    ("weight_gradient", (32, 32, 16, 4, 2)), ("hidden_gradients", (16, 32, 16, 4, 2)),
)  # fmt: skip


@pytest.fixture
def other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Configs, "others", lambda device, dtype: iter(OTHER_TILES))


def tune_with(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[str, tuple[int, ...]], float | Exception]
) -> tuple[Any, float]:
    """Tiles and seconds, if the default tiles take 10 s and these change that by as much, or fail."""

    def layer_seconds(w_in: Tensor, num_rows: int, ways: Any) -> list[float]:
        changes = [seconds[item] for item in ways[0][FUSED].tiles.items()]
        for change in changes:
            if isinstance(change, Exception):
                raise change
        return [10.0 + sum(changes)]

    monkeypatch.setattr(measurement, "_layer_seconds", layer_seconds)
    return measurement._tune(torch.ones(2, 16, 16, dtype=torch.bfloat16, device=DEVICE), 8, 10.0)


@pytest.mark.usefixtures("other_tiles")
def test_the_fastest_tiles_of_each_kernel_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = dict(zip(OTHER_TILES, (-1.0, -3.0, OutOfResources(300, 200, "shared memory"), -2.0, 1.0), strict=True))
    tiles, seconds = tune_with(monkeypatch, changes)
    assert tiles == dict([OTHER_TILES[1], OTHER_TILES[3]])
    assert seconds == 5.0


@pytest.mark.usefixtures("other_tiles")
def test_noise_and_tiles_with_wrong_results_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tune_with(monkeypatch, dict.fromkeys(OTHER_TILES, -0.05)) == ({}, 10.0)
    monkeypatch.setattr(check, "kernel_error", lambda device, tiles: 0.5)
    assert tune_with(monkeypatch, dict.fromkeys(OTHER_TILES, -5.0)) == ({}, 10.0)


@pytest.mark.usefixtures("other_tiles")
def test_tuning_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_MAX_TUNING_S", -1.0)
    assert tune_with(monkeypatch, {}) == ({}, 10.0)


def test_measured_tiles_are_those_that_layers_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also as read from the machine's cache, with the right results."""
    tiles = dict(OTHER_TILES)
    measured = {"segments": Cost(1.0, 1.0), FUSED: Cost(0.0, 0.5, tiles=tiles)}
    w_in = torch.ones(2, 16, 16, dtype=torch.bfloat16)
    costs = [stored_or_measured(w_in, tmp_path, lambda _: measured) for _ in range(2)]
    launched, launch_tiles = {}, FusedComputation.launch_tiles

    def spy(self: FusedComputation, kernel: Any, *arguments: Any, **keywords: Any) -> None:
        launched[kernel.__name__] = astuple(self.configs.for_kernel(kernel))
        launch_tiles(self, kernel, *arguments, **keywords)

    monkeypatch.setattr(FusedComputation, "launch_tiles", spy)
    layer = MoELayer(
        MoESpec(num_experts=4, model_dim=24, hidden_dim=40, group_tokens=32, router="softmax_topk", top_k=2,
                activation="swiglu")
    ).to(DEVICE)  # fmt: skip
    x = torch.randn(32, 24, device=DEVICE)
    by_rows, _ = layer(x)
    layer.experts.costs = costs[1]
    with kernels_everywhere():
        by_kernels, _ = layer(x)
    torch.testing.assert_close(by_kernels, by_rows, rtol=1e-4, atol=1e-5)
    assert launched["product"] == tiles["product"]
    assert launched["first_products"] == astuple(SMALL.by_kernel["first_products"])


def test_other_tiles_are_for_kernels_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each differs from the default, and from all others of its kernel."""
    for major in (8, 9, 10, 12):
        properties = SimpleNamespace(major=major, multi_processor_count=100)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        others = list(OTHERS(torch.device("cuda"), torch.bfloat16))
        defaults = Configs.for_capability(major, 100).by_kernel
        assert {kernel for kernel, _ in others} == {*defaults}
        assert len({*others, *((kernel, astuple(config)) for kernel, config in defaults.items())}) == len(others) + len(
            defaults
        )
        assert not list(OTHERS(torch.device("cuda"), torch.float32))
    assert not list(OTHERS(torch.device("cpu"), torch.bfloat16))
