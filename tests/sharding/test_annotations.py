"""Annotations and hints: no effect on one device; placements, and manual parts, on several."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe import sharding
from moe.sharding.hints.hints import hint_from_plain
from moe.spec import ProblemCode, SpecError
from tests.parity.gloo_ranks import Pools
from tests.refusals import check, expect_problem
from tests.sharding.modules import Function, mean_square, perceptron
from tests.sharding.on_ranks import Built, check_on_ranks, cores, differences, is_close, unlike
from tests.sharding.refused import lines_of, planning_problems

line_of = lines_of(__file__)
ROWS, REPLICATE = sharding.Split(0), sharding.Replicate()


def local_rows(x: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A gather by indices within the part, which only the user can know (the paper's own example)."""
    indices = rows % x.shape[0]
    return x.index_select(0, indices) @ weight, x.sum().view(1)


class Manual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.weight = nn.Linear(6, 8), nn.Parameter(torch.randn(8, 5))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        part = sharding.manual(local_rows, [ROWS, ROWS, REPLICATE], [ROWS, sharding.Partial("all")])
        y, total = part(torch.tanh(self.before(x)), rows, self.weight)
        return (y**2).mean() + total.sum() * 0.1


def manual_on_ranks() -> list[str]:
    """Differences from one device, where each rank's rows are moved into its part."""
    torch.manual_seed(0)
    world, module, x = dist.get_world_size(), Manual().double(), torch.randn(8, 6).double()
    rows = torch.tensor([1, 0, 1, 1, 0, 1, 0, 0]) % (8 // world)
    applied = sharding.apply(module, sharding.plan(module, (x, rows), cores(world), mesh={"all": world}))
    actual = applied(x, rows)
    actual.backward()
    hidden_states = torch.tanh(module.before(x))
    y = hidden_states.index_select(0, rows + torch.arange(8) // (8 // world) * (8 // world)) @ module.weight
    expected = (y**2).mean() + hidden_states.sum() * 0.1
    expected.backward()
    wrong = unlike(applied, module, ("gradient",), 1e-12) + ["loss"] * (not is_close(actual, expected, 1e-12))
    sharding.close(applied)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 1, 4])
def test_a_manual_part_is_combined_with_the_rest(ranks: Pools, num_ranks: int):
    assert ranks[num_ranks].run(manual_on_ranks) == [[]] * num_ranks


class AnnotatedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = sharding.split(x, 0, axis="data")
        hidden_states = sharding.shard(torch.relu(self.first(x)), {"data": 0, "model": 1})
        return sharding.replicate(self.second(hidden_states)).square().mean()


def annotated_layers() -> Built:
    torch.manual_seed(1)
    return AnnotatedLayers().double(), (torch.randn(5, 6).double(),)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{"data": 2, "model": 2}, {"data": 2, "model": 1}, {"data": 1, "model": 4}], ids=str)
def test_annotated_tensors_have_the_requested_placements(ranks: Pools, mesh: dict[str, int]):
    expected = " ".join(
        placement if mesh[axis] > 1 else "R" for axis, placement in (("data", "S(0)"), ("model", "S(1)"))
    )
    annotations = check_on_ranks(ranks, annotated_layers, mesh).annotated
    assert next(placements for label, placements in annotations.items() if "[5, 8]" in label) == expected


def test_annotations_have_no_effect_on_one_device():
    x = torch.randn(3, 4)
    assert sharding.split(x, 0) is x
    assert sharding.replicate(x) is x
    assert sharding.shard(x, {"data": 0}) is x


def devices(array: Any) -> sharding.Devices:
    def nested_tuple(ids: Any) -> Any:
        return tuple(map(nested_tuple, ids)) if isinstance(ids, list) else ids

    return sharding.Devices(nested_tuple(array.tolist() if isinstance(array, np.ndarray) else array))


def plan_annotated(hints: dict[str, Any]) -> sharding.ShardingPlan:
    return sharding.plan(*annotated_layers(), cores(4), hints, mesh={"data": 2, "model": 2})


ARRAYS = {
    "rows over both axes": (np.arange(4).reshape(4, 1), "S(0) S(0)"),
    "rows over data, columns over model": (np.arange(4).reshape(2, 2), "S(0) S(1)"),
    "columns over data, rows over model": (np.arange(4).reshape(2, 2).T, "S(1) S(0)"),
    "columns over both": (np.arange(4).reshape(1, 4), "S(1) S(1)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("ids", ARRAYS, ids=str)
def test_an_array_of_devices_gives_the_axes_of_each_dimension(ids: str):
    array, placements = ARRAYS[ids]
    assert plan_annotated({"first.weight": devices(array)}).parameters["first.weight"] == placements


@pytest.mark.parametrize("array", [[[0, 1, 2]], [[0, 2], [2, 1]], [0, 1, 2, 3], [[0, 1], [2]]], ids=str)
def test_arrays_that_do_not_match_the_mesh_are_refused(array: list):
    with expect_problem("invalid_value", "hints['first.weight']"):
        plan_annotated({"first.weight": devices(array)})


def test_arrays_that_order_devices_differently_are_refused_with_both_names() -> None:
    hints = {"first.weight": devices([[3, 2], [1, 0]]), "second.weight": devices([[0, 1], [2, 3]])}
    with expect_problem("invalid_value", "hints['second.weight']", "[[0 1]\n [2 3]]"):
        plan_annotated(hints)


def uneven_perceptron() -> Built:
    torch.manual_seed(2)
    return perceptron(6, 7, 5).double(), (torch.randn(9, 6).double(),)


def slices_in_any_order(array: list[Any], num_axes: int) -> tuple[list[str], Any, tuple[int, ...]]:
    """(differences from one device, offsets of this rank's shard of the weight, devices in the plan's order)"""
    mesh = dict(zip("abc", np.asarray(array).shape, strict=False)) if num_axes > 1 else {"a": 4}
    wrong, plan = differences(uneven_perceptron, mesh, {"layers.0.weight": devices(array), "layers.2.weight": ROWS})
    module, _ = uneven_perceptron()
    applied = sharding.apply(module, plan)
    for name, parameter in applied.named_parameters():
        if not torch.equal(parameter.full_tensor(), module.get_parameter(name).detach()):
            wrong.append(f"{name} gathered by torch")
    offsets = applied.shards()["layers.0.weight"].offsets
    sharding.close(applied)
    return wrong, offsets, plan.devices


ORDERS = {
    "a block in any order": ([[2, 0], [1, 3]], 2),
    "rows backwards": ([[3], [2], [1], [0]], 1),
    "rows in any order": ([[1], [3], [0], [2]], 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ORDERS)
def test_an_array_may_name_devices_in_any_order(ranks: Pools, case: str) -> None:
    array, num_axes = ORDERS[case]
    ids = np.asarray(array)
    sizes = [-(-size // cuts) for size, cuts in zip((7, 6), ids.shape, strict=True)]
    for rank, (wrong, offsets, order) in enumerate(ranks[4].run(slices_in_any_order, array, num_axes)):
        assert wrong == []
        (position,) = np.argwhere(ids == rank)
        assert offsets == tuple(
            min(size * index, full_size) for size, index, full_size in zip(sizes, position, (7, 6), strict=True)
        )
        assert sorted(order) == [0, 1, 2, 3] != list(order)


def test_an_array_without_a_mesh_gives_the_mesh() -> None:
    hints = {"weight": devices([[0, 1], [2, 3]])}
    plan = sharding.plan(nn.Linear(6, 8), (torch.zeros(4, 6),), cores(4), hints, mean_square)
    assert (plan.mesh, plan.parameters["weight"], plan.devices) == ({"axis0": 2, "axis1": 2}, "S(0) S(1)", ())
    assert sharding.ShardingPlan.from_json(plan.to_json()).to_json() == plan.to_json()


@pytest.mark.slow
def test_an_array_over_three_axes() -> None:
    experts = Function(lambda weight, x: torch.einsum("egm,emh->egh", x, weight).square().mean(), torch.zeros(4, 4, 4))
    array = np.arange(8).reshape(2, 2, 2).transpose(2, 0, 1)[:, ::-1]
    hints = {"operands.0": devices(array)}
    plan = sharding.plan(experts, (torch.zeros(4, 4, 4),), cores(8), hints, search=False)
    assert plan.parameters["operands.0"] == "S(0) S(1) S(2)"
    assert np.array_equal(np.array(plan.devices).reshape(2, 2, 2), array)


def test_an_array_that_splits_more_dimensions_than_a_mesh_has_axes_is_refused() -> None:
    module = Function(lambda weight, x: (x * weight).sum(), torch.zeros(2, 2, 2, 2))
    with expect_problem("unsupported", "hints['operands.0']", "shape (2, 2, 2, 2)"):
        hints = {"operands.0": devices(np.arange(16).reshape(2, 2, 2, 2))}
        sharding.plan(module, (torch.zeros(2, 2, 2, 2),), cores(16), hints)


def test_hints_name_inputs_and_precede_patterns() -> None:
    """On two ranks, because one splits nothing."""
    module, batch = nn.Linear(4, 6), (torch.zeros(8, 4),)
    hints = {"*": REPLICATE, "inputs": ROWS}
    plan = sharding.plan(module, batch, cores(2), hints, torch.sum, mesh={"a": 2})
    assert plan.annotated == {"inputs.0 [8, 4]": "S(0)"}
    assert set(plan.parameters.values()) == {"R"}
    by_number = {**hints, "inputs.0": sharding.Split(1)}
    plan = sharding.plan(module, batch, cores(2), by_number, torch.sum, mesh={"a": 2})
    assert plan.annotated == {"inputs.0 [8, 4]": "S(1)"}


class TiedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).square().mean()


def placement_of_tied(hints: dict[str, Any]) -> str:
    plan = sharding.plan(TiedLayers(), (torch.zeros(4, dtype=torch.int64),), cores(2), hints, mesh={"a": 2})
    return plan.parameters["table.weight"]


COLUMNS = sharding.Split(1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "hints",
    [
        {"head.weight": COLUMNS}, {"head.*": COLUMNS}, {"optimizer.head.weight": COLUMNS, "head.weight": COLUMNS},
        {"table.*": REPLICATE, "head.weight": COLUMNS}, {"head.weight": COLUMNS, "*": REPLICATE},
        {"head.weight": COLUMNS, "table.weight": COLUMNS},
    ],
    ids=str,
)  # fmt: skip
def test_a_tied_parameter_has_all_its_names(hints: dict[str, Any]) -> None:
    assert placement_of_tied(hints) == "S(1)"


def test_contradicting_hints_for_two_names_of_one_tensor_are_refused() -> None:
    with expect_problem("conflict", "hints['head.weight']", "Split(1)"):
        placement_of_tied({"table.weight": ROWS, "head.weight": COLUMNS})
    with expect_problem("conflict", "hints['head.*']", "Split(1)"):
        placement_of_tied({"table.*": ROWS, "head.*": COLUMNS})


def test_the_papers_number_of_partitions_is_refused_with_its_line() -> None:
    with pytest.raises(SpecError) as error:
        sharding.split(torch.zeros(4, 4), 0, 16)  # type: ignore[arg-type]  # partitions
    check(error.value.problems, [("wrong_type", line_of("partitions"), 16)])


X = torch.zeros(4, 4)
INVALID: dict[str, tuple[Any, ProblemCode, str, Any]] = {
    "split by a fraction": (lambda: sharding.split(X, 0.5), "wrong_type", "Split.dim", 0.5),  # split by a fraction
    "shard by a string": (lambda: sharding.shard(X, {"a": "0"}), "wrong_type", "Shard.dims", "0"),  # shard by a string
    "shard 3": (lambda: sharding.shard(X, 3), "wrong_type", "sharding.shard", {"devices": 3}),  # shard 3
    "Split of a fraction": (lambda: sharding.Split(0.5), "wrong_type", "Split.dim", 0.5),
    "Split of a string": (lambda: sharding.Split("0"), "wrong_type", "Split.dim", "0"),
    "Split of a truth value": (lambda: sharding.Split(True), "wrong_type", "Split.dim", True),
    "Split over a number": (lambda: sharding.Split(0, axis=16), "wrong_type", "Split.axis", 16),
    "Shard of a string": (lambda: sharding.Shard({"data": "0"}), "wrong_type", "Shard.dims", "0"),
    "Shard of a list": (lambda: sharding.Shard([0]), "wrong_type", "Shard.dims", [0]),
    "Partial by mean": (lambda: sharding.Partial("data", "mean"), "not_a_choice", "Partial.combine", "mean"),
    "Partial of a fraction": (
        lambda: sharding.Partial("data", dims={"data": 0.5}), "wrong_type", "Partial.dims", 0.5
    ),
    "plain data": (
        lambda: hint_from_plain({"split": True}, "model.hints.first"),
        "wrong_type", "model.hints.first", {"split": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_invalid_hints_are_refused_when_created(case: str) -> None:
    create, code, path, value = INVALID[case]
    if case.startswith(("split", "shard")):
        path = f"{line_of(case)} ({path})"
    with expect_problem(code, path, value):
        create()


class Part(nn.Module):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(6, 8), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.layer(x)).square().mean()  # a part


MANUAL: dict[str, tuple[Any, Any, ProblemCode, str, Any]] = {
    "an unknown dimension": ([sharding.Split(5)], [ROWS], "out_of_range", " (in_placements[0] of same.1)", "Split(5)"),
    "one of a result": ([ROWS], [sharding.Split(2)], "out_of_range", " (out_placements[0] of same.1)", "Split(2)"),
    "one of a partial result": (
        [ROWS], [sharding.Partial("a", dims={"b": 3})], "out_of_range", " (out_placements[0] of same.1)",
        "Shard({'b': 3})",
    ),
    "an unknown axis": ([ROWS], [sharding.Partial("c")], "not_a_choice", " (out_placements[0] of same.1)", "c"),
    "an odd size": ([sharding.Split(1)], [ROWS], "not_divisible", "", 5),
    "too few": ([], [ROWS], "mismatch", "", "same.0"),
    "too many": ([ROWS], [ROWS, ROWS], "mismatch", "", "same.0"),
}  # fmt: skip


def same(x: Tensor) -> Tensor:
    return x * 1


@pytest.mark.slow
@pytest.mark.parametrize("case", MANUAL)
def test_invalid_manual_parts_are_refused_with_the_calling_line(case: str) -> None:
    arguments, results, code, suffix, value = MANUAL[case]
    module = Part(sharding.manual(same, arguments, results))
    problems = planning_problems(module, (torch.zeros(5, 6),), mesh={"a": 2, "b": 2})
    check(problems, [(code, line_of("a part") + suffix, value)])


@pytest.mark.parametrize("placements", [ROWS, [0], "S(0)"], ids=str)
def test_invalid_placements_of_manual_parts_are_refused(placements: Any) -> None:
    with pytest.raises(SpecError) as error:
        sharding.manual(same, placements, [ROWS])  # no placements
    check(error.value.problems, [("wrong_type", line_of("no placements"), placements)])
