"""Places of ranks on the two meshes, with pipeline stages, and FSDP over data and context ranks."""

from math import gcd, prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.parallel.mesh import DENSE_AXES, EXPERT_AXES, STAGE_AXES, Layout, mesh_sizes, ranks_along

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, int]:
    """Degrees of both meshes over the same ranks."""
    pipeline, per_stage = draw(SIZES), draw(st.sampled_from([1, 2, 4, 6, 12]))
    degrees = {"pipeline": pipeline}

    def divisor(number: int) -> int:
        return draw(st.sampled_from([size for size in range(1, number + 1) if number % size == 0]))

    left = per_stage
    for axis in draw(st.permutations(EXPERT_AXES[1:]))[:-1]:
        degrees[axis] = divisor(left)
        left //= degrees[axis]
    degrees[next(axis for axis in EXPERT_AXES if axis not in degrees)] = left
    degrees["tensor"] = divisor(per_stage)
    degrees["context"] = divisor(per_stage // degrees["tensor"])
    degrees["fsdp"] = divisor(per_stage // degrees["tensor"])
    data_ranks = per_stage // degrees["tensor"] // degrees["context"]
    degrees["data_replica"] = data_ranks * gcd(degrees["fsdp"], degrees["context"]) // degrees["fsdp"]
    return degrees


def every_rank(degrees: dict[str, int]) -> list[Layout]:
    sizes = mesh_sizes(degrees)
    world_size = prod(sizes[axis] for axis in DENSE_AXES)
    return [Layout(rank, world_size, torch.device("cpu"), degrees) for rank in range(world_size)]


@given(meshes())
def test_a_rank_is_where_its_indices_say(degrees: dict[str, int]) -> None:
    for axes in (DENSE_AXES, EXPERT_AXES):
        places = {tuple(layout.index(axis) for axis in axes): layout.rank for layout in every_rank(degrees)}
        assert sorted(places) == list(places), "the last axis runs fastest"
        assert len(places) == prod(mesh_sizes(degrees)[axis] for axis in axes)


@given(meshes(), st.data())
def test_ranks_along_axes_differ_in_these_alone(degrees: dict[str, int], data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([DENSE_AXES, EXPERT_AXES]))
    axes = tuple(axis for axis in mesh if data.draw(st.booleans())) or (mesh[-1],)
    ranks, sets = every_rank(degrees), ranks_along(axes, degrees)
    assert sorted(rank for rank_set in sets for rank in rank_set) == list(range(len(ranks)))
    for rank_set in sets:
        coordinates = {tuple(ranks[rank].index(axis) for axis in mesh if axis not in axes) for rank in rank_set}
        assert len(coordinates) == 1
        assert len(rank_set) == prod(mesh_sizes(degrees)[axis] for axis in axes)


@given(meshes(), st.data())
def test_copies_are_the_ranks_of_a_stage_with_the_same_part(degrees: dict[str, int], data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([STAGE_AXES, EXPERT_AXES[1:]]))
    axes = [axis for axis in mesh if data.draw(st.booleans())]
    ranks = every_rank(degrees)
    for layout in ranks[:3]:
        place = [layout.index(axis) for axis in ("pipeline", *axes)]
        copies = [candidate for candidate in ranks if [candidate.index(axis) for axis in ("pipeline", *axes)] == place]
        assert layout.copies(*axes) == len(copies)


@given(meshes())
def test_fsdp_shards_over_neighbours_in_the_order_of_their_parts(degrees: dict[str, int]) -> None:
    ranks, tensor = every_rank(degrees), degrees["tensor"]
    for rank_set in ranks_along(("fsdp",), degrees):
        assert len(rank_set) == degrees["fsdp"] == ranks[0].degree("fsdp")
        assert [ranks[rank].index("fsdp") for rank in rank_set] == list(range(degrees["fsdp"]))
        if degrees["context"] % degrees["fsdp"] == 0 or degrees["fsdp"] % degrees["context"] == 0:
            assert rank_set == list(range(rank_set[0], rank_set[0] + tensor * degrees["fsdp"], tensor))
    for rank_set in ranks_along(("context",), degrees):
        assert [ranks[rank].index("context") for rank in rank_set] == list(range(degrees["context"]))


@given(meshes(), st.integers(0, 40))
def test_every_stage_has_all_groups_once(degrees: dict[str, int], num_groups: int) -> None:
    groups_by_rows: dict[tuple[int, ...], list[int]] = {}
    for layout in every_rank(degrees):
        of_the_same_rows = tuple(layout.index(axis) for axis in ("pipeline", "context", "tensor"))
        groups_by_rows.setdefault(of_the_same_rows, []).extend(layout.local_groups(num_groups))
    assert all(groups == list(range(num_groups)) for groups in groups_by_rows.values())
