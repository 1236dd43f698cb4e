"""Arguments that `sharding.plan`, `sharding.apply` and `ShardingPlan.load` refuse, and models that do not fit."""

import random
import re
from collections import UserDict
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from torch import nn

from moe import sharding
from moe.spec import ProblemCode, SpecError
from tests import refusals
from tests.grid import seeds
from tests.parity.gloo_ranks import Pools
from tests.sharding.modules import mean_square
from tests.sharding.on_ranks import cores
from tests.sharding.refused import BATCH, Plain, planning_problems

SPLIT = sharding.Split(0)
ARGUMENTS: dict[str, tuple[dict[str, Any], ProblemCode, str, Any]] = {
    "negative sizes": ({"mesh": {"a": -2, "b": -2}}, "out_of_range", "mesh", {"a": -2, "b": -2}),
    "a size of zero": ({"mesh": {"a": 0, "b": 4}}, "out_of_range", "mesh", {"a": 0, "b": 4}),
    "fractional sizes": ({"mesh": {"a": 2.0, "b": 2.0}}, "wrong_type", "mesh", {"a": 2.0, "b": 2.0}),
    "an axis without a name": ({"mesh": {0: 2, 1: 2}}, "wrong_type", "mesh", {0: 2, 1: 2}),
    "an axis with an empty name": ({"mesh": {"": 4}}, "out_of_range", "mesh", {"": 4}),
    "four axes": ({"mesh": {"a": 1, "b": 2, "c": 2, "d": 1}}, "out_of_range", "mesh", ANY),
    "no axis": ({"mesh": {}}, "out_of_range", "mesh", {}),
    "sizes without names": ({"mesh": (2, 2)}, "wrong_type", "mesh", (2, 2)),
    "too many devices": ({"mesh": {"a": 8}}, "mismatch", "mesh", {"a": 8}),
    "a list of hints": ({"hints": [SPLIT]}, "wrong_type", "hints", "list"),
    "a number with a hint": ({"hints": {0: SPLIT}}, "wrong_type", "hints[0]", "int"),
    "a string as a hint": ({"hints": {"inputs": "S(0)"}}, "wrong_type", "hints['inputs']", "S(0)"),
    "a number as a hint": ({"hints": {"first.weight": 0}}, "wrong_type", "hints['first.weight']", 0),
    "an unknown parameter": ({"hints": {"frist.weight": SPLIT}}, "not_found", "hints['frist.weight']", "Split(0)"),
    "contradicting hints": (
        {"hints": {"first.*": SPLIT, "*.weight": sharding.Replicate()}},
        "conflict", "hints['*.weight']", "Replicate()",
    ),
    "an unknown dimension": (
        {"hints": {"first.*": sharding.Split(1)}}, "out_of_range", "hints['first.*'] (first.bias)", "Split(1)"
    ),
    "an unknown axis": (
        {"hints": {"first.weight": sharding.Split(0, axis="expert")}},
        "not_a_choice", "hints['first.weight']", "Split(0, axis='expert')",
    ),
    "a dict as the cluster": ({"cluster": {"num_nodes": 1}}, "wrong_type", "cluster", "dict"),
    "no cluster file": ({"cluster": "no.yaml"}, "unreadable", "cluster", "no.yaml"),
    "a string of micro-batches": ({"micro_batches": "2"}, "wrong_type", "micro_batches", "2"),
    "no micro-batch": ({"micro_batches": 0}, "out_of_range", "micro_batches", 0),
    "no slots": ({"optimizer_slots": None}, "wrong_type", "optimizer_slots", None),
    "negative slots": ({"optimizer_slots": -1}, "out_of_range", "optimizer_slots", -1),
    "recomputation of a layer": ({"recompute": "first"}, "wrong_type", "recompute", "first"),
    "a tensor as the loss": ({"loss": torch.ones(())}, "wrong_type", "loss", "Tensor"),
    "a string of operators": ({"replicate": "polar"}, "wrong_type", "replicate", "polar"),
}  # fmt: skip


@pytest.mark.sample(13)
@pytest.mark.parametrize("case", ARGUMENTS)
def test_invalid_arguments_of_plan_are_refused(case: str) -> None:
    options, code, path, value = ARGUMENTS[case]
    refusals.check(planning_problems(Plain(), **options), [(code, path, value)])


@pytest.mark.parametrize(
    "value", [np.zeros(2), UserDict(y=torch.ones(2)), {1, 2}, object()], ids=lambda value: type(value).__name__
)
def test_sample_values_of_other_types_are_refused(value: Any) -> None:
    refusals.check(planning_problems(Plain(), (*BATCH, value)), [("wrong_type", "inputs.1", type(value).__name__)])


def test_unknown_keys_of_a_cluster_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("num_nodes: 1\ndevices_per_node: 4\ndevise: h100\n")
    refusals.check(planning_problems(Plain(), cluster=path), [("unknown_key", "cluster.devise", "h100")])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "code"),
    [({"max_programs": 0}, "out_of_range"), ({"max_programs": "2"}, "wrong_type"), ({"batch": "own"}, "not_a_choice")],
    ids=str,
)
def test_invalid_arguments_of_apply_are_refused(options: dict[str, Any], code: ProblemCode) -> None:
    module = nn.Linear(2, 1)
    plan = sharding.plan(module, (torch.zeros(2, 2),), cores(1), loss=mean_square, mesh={"a": 1})
    ((path, value),) = options.items()
    with refusals.expect_problem(code, path, value):
        sharding.apply(module, plan, loss=mean_square, **options)


FILES: dict[str, tuple[bytes | None, ProblemCode, str]] = {
    "no file": (None, "unreadable", "plan.json"),
    "syntax": (b"{", "invalid_syntax", "plan.json"),
    "depth": (b"[" * 100_000, "invalid_syntax", "plan.json"),
    "encoding": (b"\xff", "invalid_encoding", "plan.json"),
    "a list": (b"[1]", "corrupt", "plan"),
    "no version": (b"{}", "wrong_version", "plan.version"),
    "no keys": (b'{"version": 1}', "corrupt", "plan"),
    "a list of hints": (b'{"version": 1, "mesh": [], "hints": []}', "corrupt", "plan"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_not_plans_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    content, code, path = FILES[case]
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("plan.json").write_bytes(content)
    with refusals.expect_problem(code, path):
        sharding.ShardingPlan.load("plan.json")


def problems_as_dicts() -> list[dict[str, Any]]:
    return [
        problem.to_dict()
        for problem in planning_problems(Plain(), hints={"first.weight": torch.float32}, cluster=cores(2))
    ]


def test_all_ranks_raise_a_problem_whose_value_is_not_plain_data(ranks: Pools) -> None:
    first, second = ranks[2].run(problems_as_dicts)
    assert first == second
    refusals.check(first, [("wrong_type", "hints['first.weight']", ANY)])


# Models that do not fit

MEMORY_BYTES = 1_500_000
"""For four layers that take 4.2 MB with gradients and Adam's state."""


def layers() -> nn.Module:
    return square_layers(4, 256)


def square_layers(depth: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(depth)))


@pytest.mark.slow
def test_a_mesh_without_enough_memory_names_the_smallest_longer_one() -> None:
    batch = (torch.empty(16, 256),)
    problems = planning_problems(
        layers(), batch, cluster=cores(2, MEMORY_BYTES), mesh={"a": 2, "b": 1}, loss=mean_square
    )
    refusals.check(problems, [("does_not_fit", "cluster", "2 x cpu")])
    assert problems[0].remedy.startswith("use 4 devices (2 x 2) and mesh={'a': 4, 'b': 1}")
    sharding.plan(layers(), batch, cores(4, MEMORY_BYTES), mesh={"a": 4, "b": 1}, loss=mean_square)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 12))
def test_no_cluster_smaller_than_the_named_one_fits(seed: int) -> None:
    draw = random.Random(seed)
    width, num_nodes, per_node = draw.choice([8, 12, 100, 256]), draw.choice([1, 2]), draw.choice([1, 1, 2, 3])
    num_devices, module, batch = num_nodes * per_node, square_layers(3, width), (torch.empty(16, width),)
    total_bytes = sum(parameter.numel() * 16 for parameter in module.parameters())  # with gradients and Adam's state
    kind = cores(per_node, int(total_bytes / num_devices * draw.uniform(0.2, 0.9)))
    mesh = draw.choice([None, {"a": num_devices}, {"a": num_nodes, "b": per_node}])

    def fits(num_larger: int) -> bool:
        times = num_larger // num_devices
        longer = [None] if mesh is None else [{**mesh, axis: size * times} for axis, size in mesh.items()]
        for larger_mesh in longer:
            try:
                sharding.plan(module, batch, kind.sized_for(num_larger), mesh=larger_mesh, loss=mean_square)
                return True
            except SpecError:
                continue
        return False

    (problem,) = planning_problems(module, batch, cluster=kind.sized_for(num_devices), mesh=mesh, loss=mean_square)
    step = per_node if mesh is None else num_devices
    device_counts = [num_devices + step * count for count in range(8)]
    smallest = next(filter(fits, device_counts), None)
    if smallest is None:
        assert not any(problem.remedy.startswith(f"use {devices} devices") for devices in device_counts)
    else:
        assert problem.remedy.startswith(f"use {smallest} devices (")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "code", "path", "value"),
    [({"mesh": {"a": 3}}, "mismatch", "mesh", {"a": 3}),
     ({"recompute": True}, "requires", "recompute", True),
     ({"hints": {f"{index}.weight": sharding.Split(0, axis=f"axis{index}") for index in range(3)}},
      "missing", "hints", "axis0, axis1, axis2")],
)  # fmt: skip
def test_invalid_requests_are_named_before_missing_memory(
    options: dict[str, Any], code: ProblemCode, path: str, value: Any
) -> None:
    options = {"cluster": cores(2, MEMORY_BYTES // 2), "loss": mean_square, "mesh": None, **options}
    refusals.check(planning_problems(layers(), (torch.empty(16, 256),), **options), [(code, path, value)])


OPTIONS = {"loss": mean_square, "micro_batches": 1, "recompute": False}


@pytest.mark.slow
def test_more_devices_may_fit_less() -> None:
    """Six devices split eight rows over two axes, five or seven over none: sizes below eight are tried one by one."""
    cluster = cores(1, 1100).sized_for(4)
    (problem,) = planning_problems(square_layers(2, 8), (torch.empty(8, 8),), cluster=cluster, mesh=None, **OPTIONS)
    assert problem.remedy.startswith("use 6 devices (6 x 1)")


@pytest.mark.slow
def test_beyond_eight_more_devices_one_device_less_does_not_fit() -> None:
    """Activations take the memory, so that parameters say little about the number of devices."""
    module, batch, kind = square_layers(12, 8), (torch.empty(4096, 8),), cores(1, 4096 * 8 * 4 + 120_000)
    (problem,) = planning_problems(module, batch, cluster=kind, mesh=None, **OPTIONS)
    num_devices, num_fewer = map(int, re.findall(r"(\d+) devices", problem.remedy))
    assert num_fewer == num_devices - 1 > 1 + 8
    sharding.plan(module, batch, kind.sized_for(num_devices), **OPTIONS)
    (problem,) = planning_problems(module, batch, cluster=kind.sized_for(num_fewer), mesh=None, **OPTIONS)
    assert problem.code == "does_not_fit"


@pytest.mark.slow
def test_a_batch_larger_than_a_device_is_refused() -> None:
    problems = planning_problems(layers(), (torch.empty(2048, 256),), cluster=cores(4, MEMORY_BYTES), loss=mean_square)
    refusals.check(problems, [("does_not_fit", "cluster", "4 x cpu")])
    assert problems[0].remedy == "use a smaller batch"


@pytest.mark.slow
def test_hints_that_leave_no_fitting_plan_are_named() -> None:
    hints = {"0.weight": sharding.Replicate(), "1.weight": SPLIT, "2.weight": sharding.Replicate()}
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False, device="meta") for _ in range(3)))
    options = {"cluster": cores(4, 140_000), "loss": mean_square, "mesh": {"a": 4}}
    problems = planning_problems(module, (torch.empty(8, 64),), hints, **options)
    refusals.check(problems, [("does_not_fit", f"hints['{index}.weight']", "Replicate()") for index in (0, 2)])
    for name in ("0.weight", "2.weight"):
        rest = {hint_name: hint for hint_name, hint in hints.items() if hint_name != name}
        sharding.plan(module, (torch.empty(8, 64),), hints=rest, **options)
