"""What `sharding.plan` and `ShardingPlan.load` are given and cannot use: told in words."""

import random
import re
from collections import UserDict
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.spec import ProblemCode, SpecError
from tests import refusals
from tests.grid import seeds
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import cores
from tests.sharding.refused import BATCH, MESH, Plain, refused

GIVEN: dict[str, tuple[dict[str, Any], ProblemCode, str, Any]] = {
    "negative sizes": ({"mesh": {"a": -2, "b": -2}}, "out_of_range", "mesh", {"a": -2, "b": -2}),
    "a size of none": ({"mesh": {"a": 0, "b": 4}}, "out_of_range", "mesh", {"a": 0, "b": 4}),
    "a size that is no whole number": ({"mesh": {"a": 2.0, "b": 2.0}}, "wrong_type", "mesh", {"a": 2.0, "b": 2.0}),
    "an axis without a name": ({"mesh": {0: 2, 1: 2}}, "wrong_type", "mesh", {0: 2, 1: 2}),
    "an axis with an empty name": ({"mesh": {"": 4}}, "out_of_range", "mesh", {"": 4}),
    "four axes": ({"mesh": {"a": 1, "b": 2, "c": 2, "d": 1}}, "out_of_range", "mesh", ANY),
    "no axis": ({"mesh": {}}, "out_of_range", "mesh", {}),
    "sizes without names": ({"mesh": (2, 2)}, "wrong_type", "mesh", (2, 2)),
    "too many devices": ({"mesh": {"a": 8}}, "mismatch", "mesh", {"a": 8}),
    "a list of hints": ({"hints": [sharding.Split(0)]}, "wrong_type", "hints", "list"),
    "a hint of a number": ({"hints": {0: sharding.Split(0)}}, "wrong_type", "hints[0]", "int"),
    "a hint that is none": ({"hints": {"inputs": "S(0)"}}, "wrong_type", "hints['inputs']", "S(0)"),
    "a cluster of plain data": ({"cluster": {"num_nodes": 1}}, "wrong_type", "cluster", "dict"),
    "no cluster file": ({"cluster": "no.yaml"}, "unreadable", "cluster", "no.yaml"),
    "text for a number": ({"micro_batches": "2"}, "wrong_type", "micro_batches", "2"),
    "no micro-batch": ({"micro_batches": 0}, "out_of_range", "micro_batches", 0),
    "no slots": ({"optimizer_slots": None}, "wrong_type", "optimizer_slots", None),
    "fewer slots than none": ({"optimizer_slots": -1}, "out_of_range", "optimizer_slots", -1),
    "recomputation of a layer": ({"recompute": "first"}, "wrong_type", "recompute", "first"),
    "a loss that is a tensor": ({"loss": torch.ones(())}, "wrong_type", "loss", "Tensor"),
    "text for a list": ({"replicate": "polar"}, "wrong_type", "replicate", "polar"),
}  # fmt: skip


@pytest.mark.parametrize("which", GIVEN)
def test_arguments_that_cannot_be_are_told(which: str) -> None:
    options, code, path, value = GIVEN[which]
    with refusals.refused(code, path, value):
        sharding.plan(Plain(), BATCH, **{"cluster": cores(4), "mesh": MESH} | options)


@pytest.mark.parametrize(
    "value", [np.zeros(2), UserDict(y=torch.ones(2)), {1, 2}, object()], ids=lambda value: type(value).__name__
)
def test_values_of_a_sample_that_no_graph_takes_are_told(value: Any) -> None:
    with refusals.refused("wrong_type", "inputs.1", type(value).__name__):
        sharding.plan(Plain(), (*BATCH, value), cores(1))


@pytest.mark.parametrize("model", [lambda x: x.sum(), Plain], ids=["a function", "a class"])
def test_what_is_no_module_is_told(model: Any) -> None:
    told = r"^model \(='(function|Plain)'\) must be an nn.Module; call its class, or put the function into one's"
    with pytest.raises(SpecError, match=told):
        sharding.plan(model, BATCH, cores(1))


@pytest.mark.parametrize(
    ("options", "code", "path"),
    [
        ({"max_programs": 0}, "out_of_range", "max_programs"),
        ({"max_programs": "2"}, "wrong_type", "max_programs"),
        ({"batch": "own"}, "not_a_choice", "batch"),
    ],
    ids=["no program", "text for a number", "another batch"],
)
def test_arguments_of_apply_that_cannot_be_are_told(options: dict[str, Any], code: ProblemCode, path: str) -> None:
    module = nn.Linear(2, 1)
    plan = sharding.plan(module, (torch.zeros(2, 2),), cores(1), loss=mean_square, mesh={"a": 1})
    with refusals.refused(code, path, options[path]):
        sharding.apply(module, plan, loss=mean_square, **options)


@pytest.mark.parametrize(
    ("content", "code", "path"),
    [
        (None, "unreadable", "plan.json"),
        (b"{", "invalid_syntax", "plan.json"),
        (b"[" * 100_000, "invalid_syntax", "plan.json"),
        (b"\xff", "invalid_encoding", "plan.json"),
        (b"[1]", "corrupt", "plan"),
        (b"{}", "wrong_version", "plan.version"),
        (b'{"version": 1}', "corrupt", "plan"),
        (b'{"version": 1, "mesh": [], "hints": []}', "corrupt", "plan"),
    ],
    ids=["none", "syntax", "depth", "encoding", "a list", "nothing", "no keys", "a list of hints"],
)
def test_a_file_that_is_no_plan_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, code: ProblemCode, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("plan.json").write_bytes(content)
    with refusals.refused(code, path):
        sharding.ShardingPlan.load("plan.json")


def refused_here() -> str:
    with pytest.raises(SpecError) as error:
        sharding.plan(Plain(), BATCH, cores(2), {"first.weight": torch.float32})  # type: ignore[dict-item]
    return str(error.value)


def test_all_ranks_are_told_of_a_value_that_is_no_plain_data(ranks: Pools) -> None:
    first, second = ranks[2].run(refused_here)
    assert first == second
    assert "hints['first.weight'] (='torch.float32') is no hint" in first


# no room

ROOM = 1_500_000  # bytes, for four layers that take 4.2 MB with gradients and Adam's state


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, device="meta") for _ in range(4)))


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def test_a_mesh_without_room_is_told_the_smallest_longer_one_that_has() -> None:
    batch = (torch.empty(16, 256),)
    message = refused(layers(), batch, cluster=cores(2, ROOM), mesh={"a": 2, "b": 1}, loss=mean_square)
    assert message == (
        "cluster (='2 x cpu') has no room for the model: no plan fits in 1.33 MiB a device; "
        "use 4 devices (2 x 2) and mesh={'a': 4, 'b': 1}, the smallest cluster of this kind that has room"
    )
    sharding.plan(layers(), batch, cores(4, ROOM), mesh={"a": 4, "b": 1}, loss=mean_square)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 12))
def test_no_smaller_cluster_has_room_than_the_one_that_is_named(seed: int) -> None:
    draw = random.Random(seed)
    width, nodes, each = draw.choice([8, 12, 100, 256]), draw.choice([1, 2]), draw.choice([1, 1, 2, 3])
    module = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(3)))
    batch = (torch.empty(16, width),)
    whole = sum(parameter.numel() * 16 for parameter in module.parameters())  # with gradients and Adam's state
    room = int(whole / (nodes * each) * draw.uniform(0.2, 0.9))
    kind = cores(each, room)
    mesh = draw.choice([None, {"a": nodes * each}, {"a": nodes, "b": each}])

    def has_room(num_devices: int) -> bool:
        times = num_devices // (nodes * each)
        longer = [None] if mesh is None else [{**mesh, axis: size * times} for axis, size in mesh.items()]
        for one in longer:
            try:
                sharding.plan(module, batch, kind.sized_for(num_devices), mesh=one, loss=mean_square)
                return True
            except SpecError:
                continue
        return False

    message = refused(module, batch, cluster=kind.sized_for(nodes * each), mesh=mesh, loss=mean_square)
    step = each if mesh is None else nodes * each
    tried = [nodes * each + step * more for more in range(8)]
    smallest = next(filter(has_room, tried), None)
    if smallest is None:
        assert not any(f"; use {devices} devices" in message for devices in tried)
    else:
        assert f"; use {smallest} devices (" in message


@pytest.mark.parametrize(
    ("given", "told"),
    [({"mesh": {"a": 3}}, "must have sizes that multiply to all devices (=2)"),
     ({"recompute": True}, "recompute (=True) needs blocks"),
     ({"hints": {f"{at}.weight": sharding.Split(0, axis=f"axis{at}") for at in range(3)}}, "name more than two mesh")],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_told_also_where_there_is_no_room(given: dict[str, Any], told: str) -> None:
    cluster = cores(2, ROOM // 2)
    message = refused(layers(), (torch.empty(16, 256),), cluster=cluster, loss=mean_square, **{"mesh": None} | given)
    assert told in message


@pytest.mark.slow
def test_more_devices_may_have_less_room() -> None:
    """Five or seven cut no side of eight rows, where six do by two axes: between too few and enough is no search."""
    module = nn.Sequential(*(nn.Linear(8, 8, device="meta") for _ in range(2)))
    given = {"loss": mean_square, "micro_batches": 1, "recompute": False}
    message = refused(module, (torch.empty(8, 8),), cluster=cores(1, 1100).sized_for(4), mesh=None, **given)
    assert "; use 6 devices (6 x 1), the smallest cluster" in message


@pytest.mark.slow
def test_beyond_the_next_eight_a_cluster_is_named_below_which_there_is_no_room() -> None:
    """Values of layers take the memory, so that parameters say little of how many devices are needed."""
    module = nn.Sequential(*(nn.Linear(8, 8, device="meta") for _ in range(12)))
    batch, given = (torch.empty(4096, 8),), {"loss": mean_square, "micro_batches": 1, "recompute": False}
    kind = cores(1, 4096 * 8 * 4 + 120_000)
    message = refused(module, batch, cluster=kind, mesh=None, **given)
    named, less = map(int, re.findall(r"(?:use|room:) (\d+) devices", message))
    assert less == named - 1 > 1 + 8
    sharding.plan(module, batch, kind.sized_for(named), **given)
    assert "has no room" in refused(module, batch, cluster=kind.sized_for(less), mesh=None, **given)


@pytest.mark.slow
def test_a_batch_that_takes_all_memory_is_told() -> None:
    message = refused(layers(), (torch.empty(2048, 256),), cluster=cores(4, ROOM), loss=mean_square)
    assert "the batch, which lies whole on each device, takes 2 MiB of its 1.43 MiB; use a smaller batch" in message


def test_hints_without_room_are_told_with_their_values() -> None:
    hints = {"0.weight": sharding.Replicate(), "1.weight": sharding.Split(0), "2.weight": sharding.Replicate()}
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False, device="meta") for _ in range(3)))
    with refusals.refused_for([("does_not_fit", f"hints['{at}.weight']", "Replicate()") for at in (0, 2)]):
        sharding.plan(module, (torch.empty(8, 64),), cores(4, 140_000), hints, mean_square, mesh={"a": 4})
    for name in ("0.weight", "2.weight"):
        rest = {other: hint for other, hint in hints.items() if other != name}
        sharding.plan(module, (torch.empty(8, 64),), cores(4, 140_000), rest, mean_square, mesh={"a": 4})
