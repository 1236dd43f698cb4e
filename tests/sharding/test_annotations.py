"""Annotations: nothing on one device; placements, and parts done by hand, on several."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe import sharding
from moe.sharding.applied.dtensors import local
from moe.sharding.hints.hints import of_plain
from moe.spec import SpecError
from tests.parity.gloo_ranks import Pools
from tests.refusals import refused
from tests.sharding.on_ranks import Built, cores, differences
from tests.sharding.refused import lines_of

line_of = lines_of(__file__)


def local_rows(x: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A gather by indices that only the user knows to stay within the part (the paper's own example)."""
    own = rows % x.shape[0]
    return x.index_select(0, own) @ weight, x.sum().view(1)


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.weight = nn.Linear(6, 8), nn.Parameter(torch.randn(8, 5))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        part = sharding.manual(
            local_rows,
            [sharding.Split(0), sharding.Split(0), sharding.Replicate()],
            [sharding.Split(0), sharding.Partial("all")],
        )
        y, total = part(torch.tanh(self.before(x)), rows, self.weight)
        return (y**2).mean() + total.sum() * 0.1


def by_hand() -> Built:
    torch.manual_seed(0)
    rows = torch.tensor([1, 0, 1, 1, 0, 1, 0, 0])
    world = dist.get_world_size() if dist.is_initialized() else 1
    return ByHand().double(), (torch.randn(8, 6).double(), rows % (8 // world))


def parts_by_hand() -> list[str]:
    """What each rank computes by hand, against the same computed of the whole with rows moved into its part."""
    world = dist.get_world_size()
    module, (x, rows) = by_hand()
    plan = sharding.plan(module, (x, rows), cores(world), mesh={"all": world})
    applied = sharding.apply(module, plan)
    found = applied(x, rows)
    found.backward()
    size = 8 // world
    hidden = torch.tanh(module.before(x))
    y = hidden.index_select(0, rows + torch.arange(8) // size * size) @ module.weight
    expected = (y**2).mean() + hidden.sum() * 0.1
    expected.backward()
    wrong = [] if torch.allclose(found, expected, atol=1e-12) else [f"{found} for {expected}"]
    for name, shard in applied.shards().items():
        here, whole = local(applied.get_parameter(name).grad), module.get_parameter(name).grad
        cut = tuple(slice(at, at + n) for at, n in zip(shard.offsets, here.shape, strict=True))
        if not torch.allclose(here, whole[cut], atol=1e-12):
            wrong.append(name)
    sharding.close(applied)
    return wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_ranks", [2, 1, 4])
def test_a_part_done_by_hand_is_mixed_with_the_rest(ranks: Pools, num_ranks: int):
    assert ranks[num_ranks].run(parts_by_hand) == [[]] * num_ranks


class Annotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = sharding.split(x, 0, axis="data")
        hidden = sharding.shard(torch.relu(self.first(x)), {"data": 0, "model": 1})
        return sharding.replicate(self.second(hidden)).square().mean()


def annotated() -> Built:
    torch.manual_seed(1)
    return Annotated().double(), (torch.randn(5, 6).double(),)


def annotated_on_ranks(mesh: dict[str, int]) -> tuple[list[str], dict[str, str]]:
    wrong, plan = differences(annotated, mesh)
    return wrong, plan.annotated


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{"data": 2, "model": 2}, {"data": 2, "model": 1}, {"data": 1, "model": 4}], ids=str)
def test_annotated_tensors_lie_as_asked(ranks: Pools, mesh: dict[str, int]):
    for wrong, places in ranks[math.prod(mesh.values())].run(annotated_on_ranks, mesh):
        assert wrong == []
        found = [placements for place, placements in places.items() if "[5, 8]" in place]
        wanted = ["S(0)" if mesh["data"] > 1 else "R", "S(1)" if mesh["model"] > 1 else "R"]
        assert found[0] == " ".join(wanted)


def test_on_one_device_annotations_change_nothing():
    x = torch.randn(3, 4)
    assert sharding.split(x, 0) is x
    assert sharding.replicate(x) is x
    assert sharding.shard(x, {"data": 0}) is x


HINTS = {
    "matches no tensor; did you mean first.weight": {"frist.weight": sharding.Split(0)},
    r"contradicts hints\['first.\*'\]": {"first.*": sharding.Split(0), "*.weight": sharding.Replicate()},
    "must split a dimension of a tensor that has 2; use one from 0 to 1": {"first.weight": sharding.Split(2)},
    "must name an axis of the mesh": {"first.weight": sharding.Split(0, axis="expert")},
}


@pytest.mark.parametrize("said", HINTS, ids=str)
def test_hints_that_cannot_be_are_refused_in_words(said: str):
    module, sample = annotated()
    with pytest.raises(SpecError, match=said):
        sharding.plan(module, sample, cores(4), HINTS[said], mesh={"data": 2, "model": 2})


ARRAYS = {
    "rows over both axes": (np.arange(4).reshape(4, 1), "S(0) S(0)"),
    "rows over data, columns over model": (np.arange(4).reshape(2, 2), "S(0) S(1)"),
    "columns over data, rows over model": (np.arange(4).reshape(2, 2).T, "S(1) S(0)"),
    "columns over both": (np.arange(4).reshape(1, 4), "S(1) S(1)"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("ids", ARRAYS, ids=str)
def test_the_papers_array_of_devices_says_the_axes_of_each_dimension(ids: str):
    array, placements = ARRAYS[ids]
    module, sample = annotated()
    hint = sharding.Devices(tuple(map(tuple, array.tolist())))
    plan = sharding.plan(module, sample, cores(4), {"first.weight": hint}, mesh={"data": 2, "model": 2})
    assert plan.parameters["first.weight"] == placements


@pytest.mark.parametrize("array", [[[0, 1, 2]], [[0, 2], [2, 1]], [0, 1, 2, 3], [[0, 1], [2]]], ids=str)
def test_an_array_that_the_mesh_cannot_have_is_refused(array: list):
    module, sample = annotated()
    hint = sharding.Devices(tuple(tuple(row) if isinstance(row, list) else row for row in array))
    with refused("invalid_value", "hints['first.weight']"):
        sharding.plan(module, sample, cores(4), {"first.weight": hint}, mesh={"data": 2, "model": 2})


def devices(array: Any) -> sharding.Devices:
    ids = np.asarray(array).tolist()
    return sharding.Devices(tuple(tuple(row) if isinstance(row, list) else row for row in ids))


def test_arrays_that_order_devices_differently_are_refused_with_both_names() -> None:
    module, sample = annotated()
    hints = {"first.weight": devices([[3, 2], [1, 0]]), "second.weight": devices([[0, 1], [2, 3]])}
    with refused("invalid_value", "hints['second.weight']", "[[0 1]\n [2 3]]"):
        sharding.plan(module, sample, cores(4), hints, mesh={"data": 2, "model": 2})


class Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def ordered() -> Built:
    torch.manual_seed(2)
    return Ordered().double(), (torch.randn(9, 6).double(),)


def slices_in_any_order(array: list[Any], num_axes: int) -> tuple[list[str], Any, tuple[int, ...]]:
    """What differs from one device, and this rank's part of the weight, which an array places."""
    mesh = dict(zip("abc", np.asarray(array).shape, strict=False)) if num_axes > 1 else {"a": 4}
    hints = {"layers.0.weight": devices(array), "layers.2.weight": sharding.Split(0)}
    wrong, plan = differences(ordered, mesh, hints)
    module, _ = ordered()
    applied = sharding.apply(module, plan)
    mine = applied.shards()["layers.0.weight"]
    for name, parameter in applied.named_parameters():
        if not torch.equal(parameter.full_tensor(), module.get_parameter(name).detach()):
            wrong.append(f"{name} gathered by torch")
    sharding.close(applied)
    return wrong, mine.offsets, plan.devices


def of_squares(y: Tensor) -> Tensor:
    return y.square().mean()


ORDERS = {
    "a block in any order": ([[2, 0], [1, 3]], 2),
    "rows backwards": ([[3], [2], [1], [0]], 1),
    "rows in any order": ([[1], [3], [0], [2]], 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", ORDERS)
def test_an_array_may_name_devices_in_any_order(ranks: Pools, which: str) -> None:
    array, num_axes = ORDERS[which]
    ids = np.asarray(array)
    sizes = [-(-size // cuts) for size, cuts in zip((7, 6), ids.shape, strict=True)]
    for rank, (wrong, offsets, order) in enumerate(ranks[4].run(slices_in_any_order, array, num_axes)):
        assert wrong == []
        (at,) = np.argwhere(ids == rank)
        assert offsets == tuple(min(size * place, whole) for size, place, whole in zip(sizes, at, (7, 6), strict=True))
        assert sorted(order) == [0, 1, 2, 3] != list(order)


def test_an_array_without_a_mesh_says_the_mesh() -> None:
    module = nn.Linear(6, 8)
    x = torch.zeros(4, 6)
    hints = {"weight": devices([[0, 1], [2, 3]])}
    plan = sharding.plan(module, (x,), cores(4), hints, of_squares)
    assert (plan.mesh, plan.parameters["weight"], plan.devices) == ({"axis0": 2, "axis1": 2}, "S(0) S(1)", ())
    again = sharding.ShardingPlan.from_json(plan.to_json())
    assert again.to_json() == plan.to_json()


def test_an_array_over_three_axes() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("egm,emh->egh", x, self.weight).square().mean()

    array = np.arange(8).reshape(2, 2, 2).transpose(2, 0, 1)[:, ::-1]
    hint = sharding.Devices(tuple(tuple(map(tuple, rows)) for rows in array.tolist()))
    plan = sharding.plan(Experts(), (torch.zeros(4, 4, 4),), cores(8), {"weight": hint}, search=False)
    assert plan.parameters["weight"] == "S(0) S(1) S(2)"
    assert np.array_equal(np.array(plan.devices).reshape(2, 2, 2), array)


def test_an_array_that_cuts_more_dimensions_than_a_mesh_has_axes_is_refused() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2, 2, 2, 2))
    module.forward = lambda x: (x * module.weight).sum()
    hints = {
        "weight": sharding.Devices(((((0, 1), (2, 3)), ((4, 5), (6, 7))), (((8, 9), (10, 11)), ((12, 13), (14, 15)))))
    }
    with refused("unsupported", "hints['weight']", "shape (2, 2, 2, 2)") as caught:
        sharding.plan(module, (torch.zeros(2, 2, 2, 2),), cores(16), hints)
    (problem,) = caught.value.problems
    assert (problem.path, problem.value) == ("hints['weight']", "shape (2, 2, 2, 2)")


def test_inputs_are_named_and_go_before_patterns() -> None:
    """Over two ranks, since one splits nothing."""
    module, batch = nn.Linear(4, 6), (torch.zeros(8, 4),)
    hints = {"*": sharding.Replicate(), "inputs": sharding.Split(0)}
    plan = sharding.plan(module, batch, cores(2), hints, torch.sum, mesh={"a": 2})
    assert plan.annotated == {"inputs.0 [8, 4]": "S(0)"}
    assert set(plan.parameters.values()) == {"R"}
    one_by_one = {**hints, "inputs.0": sharding.Split(1)}
    assert sharding.plan(module, batch, cores(2), one_by_one, torch.sum, mesh={"a": 2}).annotated == {
        "inputs.0 [8, 4]": "S(1)"
    }


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).square().mean()


def placement_of_tied(hints: dict[str, Any]) -> str:
    plan = sharding.plan(Tied(), (torch.zeros(4, dtype=torch.int64),), cores(2), hints, mesh={"a": 2})
    return plan.parameters["table.weight"]


@pytest.mark.parametrize(
    "hints",
    [
        {"head.weight": sharding.Split(1)},
        {"head.*": sharding.Split(1)},
        {"optimizer.head.weight": sharding.Split(1), "head.weight": sharding.Split(1)},
        {"table.*": sharding.Replicate(), "head.weight": sharding.Split(1)},
        {"head.weight": sharding.Split(1), "*": sharding.Replicate()},
        {"head.weight": sharding.Split(1), "table.weight": sharding.Split(1)},
    ],
    ids=str,
)
def test_a_tied_parameter_goes_by_any_of_its_names(hints: dict[str, Any]) -> None:
    assert placement_of_tied(hints) == "S(1)"


def test_hints_of_both_names_of_one_tensor_that_contradict_are_told() -> None:
    with refused("conflict", "hints['head.weight']", "Split(1)"):
        placement_of_tied({"table.weight": sharding.Split(0), "head.weight": sharding.Split(1)})
    with refused("conflict", "hints['head.*']", "Split(1)"):
        placement_of_tied({"table.*": sharding.Split(0), "head.*": sharding.Split(1)})


def test_the_papers_number_of_partitions_is_told_with_its_line() -> None:
    with pytest.raises(SpecError) as error:
        sharding.split(torch.zeros(4, 4), 0, 16)  # type: ignore[arg-type]  # partitions
    assert str(error.value) == (
        f"{line_of('partitions')} (=16) is the third argument of sharding.split, which names a mesh axis; "
        "omit it, since the plan decides the number of parts, or give axis='data'"
    )


@pytest.mark.parametrize("annotate", [
    lambda x: sharding.split(x, 0.5), lambda x: sharding.shard(x, {"a": "0"}), lambda x: sharding.shard(x, 3),
])  # fmt: skip
def test_an_annotation_of_no_placement_is_told_with_its_line(annotate: Any) -> None:
    with pytest.raises(
        SpecError, match=r"^tests/sharding/test_annotations.py:\d+ \((Split.dim|Shard.dims|sharding.shard)"
    ):
        annotate(torch.zeros(4, 4))


def test_plain_data_of_no_hint_is_told_with_its_path() -> None:
    with refused("wrong_type", "model.hints.first", {"split": True}):
        of_plain({"split": True}, "model.hints.first")


class Manual(nn.Module):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(6, 8), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.layer(x)).square().mean()  # a part


ROWS = sharding.Split(0)
MANUAL: dict[str, tuple[tuple[Any, Any], str]] = {
    "a dimension that is not there": (([sharding.Split(5)], [ROWS]), "must split a dimension of a tensor that has 2"),
    "one of a result": (([ROWS], [sharding.Split(2)]), "(out_placements[0] of same."),
    "one of a partial result": (([ROWS], [sharding.Partial("a", dims={"b": 3})]), "tensor that has 2"),
    "an axis that is not there": (([ROWS], [sharding.Partial("c")]), "must name an axis of the mesh (=a, b)"),
    "a size that does not go": (([sharding.Split(1)], [ROWS]), "(=5) must be divisible by the ranks"),
    "too few": (([], [ROWS]), "is given 1 tensors, and in_placements has 0; give a placement for each"),
    "too many": (([ROWS], [ROWS, ROWS]), "gives 1 tensors, and out_placements has 2; give a placement for each"),
}  # fmt: skip


def same(x: Tensor) -> Tensor:
    return x * 1


@pytest.mark.slow
@pytest.mark.parametrize("which", MANUAL)
def test_a_manual_part_that_cannot_be_is_told_with_the_line_that_enters_it(which: str) -> None:
    placements, told = MANUAL[which]
    with pytest.raises(SpecError) as error:
        sharding.plan(Manual(sharding.manual(same, *placements)), (torch.zeros(5, 6),), cores(4), mesh={"a": 2, "b": 2})
    assert str(error.value).startswith(f"{line_of('a part')} (")
    assert told in str(error.value)


@pytest.mark.parametrize("given", [sharding.Split(0), [0], "S(0)"], ids=str)
def test_placements_of_a_manual_part_that_are_none_are_told(given: Any) -> None:
    with pytest.raises(SpecError) as error:
        sharding.manual(same, given, [ROWS])  # no placements
    assert str(error.value).startswith(f"{line_of('no placements')} (")
    assert "is given as in_placements, which must be a list of placements" in str(error.value)


@pytest.mark.parametrize("make", [
    lambda: sharding.Split(0, axis=16), lambda: sharding.Shard({"data": "0"}), lambda: sharding.Shard([0]),
    lambda: sharding.Partial("data", "mean"), lambda: sharding.Partial("data", dims={"data": 0.5}),
])  # fmt: skip
def test_a_hint_of_no_placement_is_told_when_it_is_made(make: Any) -> None:
    with pytest.raises(SpecError, match=r"^(Split|Shard|Partial)\.(axis|dims|combine) \(="):
        make()


@pytest.mark.parametrize("dim", [0.5, "0", True], ids=str)
def test_a_split_of_what_is_no_number(dim: object):
    with refused("wrong_type", "Split.dim"):
        sharding.Split(dim)  # type: ignore[arg-type]
