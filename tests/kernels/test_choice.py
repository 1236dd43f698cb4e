"""Whether a layer is computed by the kernels: checked on the device, and measured."""

from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from moe.dispatch import dispatcher, fused, measurement
from moe.experts import FUSED, Cost, LocalExperts, stored_or_measured
from moe.kernels import adamw, check, norm, support
from moe.kernels.configs import Configs
from moe.kernels.experts import FusedComputation
from moe.layers import MoELayer
from moe.routing import Choices
from moe.spec import MoESpec
from tests.kernels.cases import DEVICE, MEDIUM, SMALL
from tests.kernels.enabled import kernels_everywhere

EVERYWHERE = torch.device(DEVICE)
REAL_CANDIDATES = Configs.candidates


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Configs, "for_device", lambda device, dtype: MEDIUM)
    monkeypatch.setattr(norm, "MAX_PARTS", 8)


def test_kernels_agree_with_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Configs, "for_device", lambda device, dtype: SMALL)
    assert 0 < check.kernel_error(EVERYWHERE) < support.MAX_ERROR / 3


def test_routing_by_kernels_agrees_with_the_routers() -> None:
    assert check.routing_error(EVERYWHERE) < 1e-5


def test_norms_and_rotations_agree_with_plain_operations() -> None:
    assert check.norm_error(EVERYWHERE) < 1e-2
    assert check.rotary_error(EVERYWHERE) < 1e-2


def test_updates_agree_with_adamw_of_torch() -> None:
    assert check.optimizer_error(EVERYWHERE) < support._MAX_UPDATE_ERROR / 3


@pytest.mark.parametrize("fault", ["no clipping", "no decay", "no copies", "no skipping", "one moment"])
def test_wrong_updates_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_adamw = adamw.launch_adamw

    def wrong(tensors: Any, blocks: Any, factors: Any, gradient_factor: Any, found_inf: Any) -> None:
        match fault:
            case "no clipping":
                gradient_factor = None
            case "no decay":
                factors = replace(factors, decay=1.0)
            case "no skipping":
                found_inf = None
            case "no copies":
                tensors = replace(tensors, narrow_copies=[None] * len(tensors.weights))
            case _:
                factors = replace(factors, gradient_weight2=1.1 * factors.gradient_weight2)
        launch_adamw(tensors, blocks, factors, gradient_factor, found_inf)

    monkeypatch.setattr(adamw, "launch_adamw", wrong)
    assert check.optimizer_error(EVERYWHERE) > support._MAX_UPDATE_ERROR


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", get_args(support.KernelKind))
def test_the_check_may_come_first_in_a_pass_without_gradients(kind: support.KernelKind) -> None:
    with torch.inference_mode():
        assert support._failure_of(EVERYWHERE, kind) is None


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


@pytest.mark.slow
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


CANDIDATES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("product", (32, 16, 16, 4, 2, False)), ("product", (16, 32, 16, 4, 2, False)),
    ("product", (32, 32, 16, 4, 2, False)), ("weight_gradient", (32, 32, 16, 4, 2, False)),
    ("hidden_gradients", (16, 32, 16, 4, 2, True)),
)  # fmt: skip


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Configs, "candidates", lambda device, dtype: iter(CANDIDATES))


def tune_with(
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[tuple[str, tuple[int, ...]], float | Exception],
    shape: tuple[int, int] = (16, 16),
) -> tuple[Any, float]:
    """Result of autotuning if the defaults take 10 s and each candidate changes that by `seconds`, or raises."""

    def layer_seconds(w_in: Tensor, num_rows: int, ways: Any) -> list[float]:
        changes = [[seconds[item] for item in way[FUSED].config_overrides.items()] for way in ways]
        for change in changes[-1]:
            if isinstance(change, Exception):
                raise change
        return [10.0 + sum(change) for change in changes]

    monkeypatch.setattr(measurement, "_layer_seconds", layer_seconds)
    return measurement._autotune(torch.ones(2, *shape, dtype=torch.bfloat16, device=DEVICE), 8, 10.0)


@pytest.mark.usefixtures("candidates")
def test_the_fastest_configuration_of_each_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "tuned_kernel_error", lambda device, overrides: 0.0)
    changes = dict(zip(CANDIDATES, (-1.0, -3.0, OutOfResources(300, 200, "shared memory"), -2.0, 1.0), strict=True))
    tiles, seconds = tune_with(monkeypatch, changes)
    assert tiles == dict([CANDIDATES[1], CANDIDATES[3]])
    assert seconds == 5.0


@pytest.mark.usefixtures("candidates")
def test_noise_and_wrong_results_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tune_with(monkeypatch, dict.fromkeys(CANDIDATES, -0.05)) == ({}, 10.0)
    monkeypatch.setattr(check, "tuned_kernel_error", lambda device, overrides: 0.5)
    assert tune_with(monkeypatch, dict.fromkeys(CANDIDATES, -5.0)) == ({}, 10.0)


@pytest.mark.usefixtures("candidates")
def test_candidates_with_tma_are_for_weights_that_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "tuned_kernel_error", lambda device, overrides: 0.0)
    changes: dict[Any, float | Exception] = {
        candidate: float(candidate != CANDIDATES[-1]) - 0.5 for candidate in CANDIDATES
    }
    assert tune_with(monkeypatch, changes) == (dict([CANDIDATES[-1]]), 9.5)
    assert tune_with(monkeypatch, changes, shape=(20, 16)) == ({}, 10.0)  # of which it loads `w_in`
    assert tune_with(monkeypatch, changes, shape=(16, 20)) == ({}, 10.0)  # of which it loads `w_out`


@pytest.mark.usefixtures("candidates")
def test_autotuning_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_MAX_TUNING_S", -1.0)
    assert tune_with(monkeypatch, {}) == ({}, 10.0)


@pytest.mark.usefixtures("candidates")
def test_measured_configurations_are_those_that_layers_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also as read from the machine's cache, with the right results."""
    tiles = dict(CANDIDATES)
    measured = {"segments": Cost(1.0, 1.0), FUSED: Cost(0.0, 0.5, config_overrides=tiles)}
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
    assert launched["first_products"] == astuple(MEDIUM.by_kernel["first_products"])


@pytest.mark.usefixtures("candidates")
@pytest.mark.parametrize("fields", [{"expert_bias": True}, {"activation": "swiglu_clamped"}, {}], ids=str)
def test_configurations_are_used_for_experts_like_those_measured(fields: dict[str, Any]) -> None:
    spec = MoESpec(
        **{"num_experts": 4, "model_dim": 16, "hidden_dim": 16, "group_tokens": 32, "router": "softmax_topk",
           "activation": "swiglu", **fields}
    )  # fmt: skip
    experts = MoELayer(spec).to(DEVICE).experts
    experts.costs = {FUSED: Cost(0.0, 0.5, config_overrides=dict(CANDIDATES))}
    choices, x = torch.zeros(5, 1, dtype=torch.int64, device=DEVICE), torch.ones(5, 16, device=DEVICE)
    configs = fused._computation_of(choices, choices == 0, x, experts).configs
    is_overridden = astuple(configs.by_kernel["product"]) == dict(CANDIDATES)["product"]
    assert is_overridden == (not fields)


def test_candidates_are_distinct_and_differ_from_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for major in (8, 9, 10, 12):
        properties = SimpleNamespace(major=major, multi_processor_count=100)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        candidates = list(REAL_CANDIDATES(torch.device("cuda"), torch.bfloat16))
        defaults = Configs.for_capability(major, 100).by_kernel
        assert {kernel for kernel, _ in candidates} == {*defaults}
        assert len({*candidates, *((kernel, astuple(config)) for kernel, config in defaults.items())}) == len(
            candidates
        ) + len(defaults)
        assert not list(REAL_CANDIDATES(torch.device("cuda"), torch.float32))
    assert not list(REAL_CANDIDATES(torch.device("cpu"), torch.bfloat16))


@pytest.mark.usefixtures("candidates")
def test_configurations_of_other_gpus_dtypes_and_releases_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = {"product": (32, 16, 16, 4, 2, False), "weight_gradient": (32, 32, 16, 4, 2), "no kernel": (1,)}
    assert Configs.valid_overrides(overrides, EVERYWHERE, torch.bfloat16) == {"product": (32, 16, 16, 4, 2, False)}
    monkeypatch.setattr(Configs, "candidates", REAL_CANDIDATES)
    assert Configs.valid_overrides(overrides, torch.device("cpu"), torch.bfloat16) == {}
