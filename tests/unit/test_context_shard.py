"""Positions of context ranks: every position once, in balance, as runs of consecutive ones."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.parallel import ContextShard


@dataclass
class _Group:
    """A process group's size and this rank, on which alone positions depend."""

    num_ranks: int
    number: int

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.number


def shards_of(num_positions: int, num_ranks: int) -> list[ContextShard]:
    groups: list[Any] = [_Group(num_ranks, rank) for rank in range(num_ranks)]
    return [ContextShard(num_positions, group) for group in groups]


sizes = st.tuples(st.integers(1, 70), st.integers(2, 9))


@given(sizes)
def test_every_position_is_on_one_rank(size: tuple[int, int]) -> None:
    positions = torch.cat([shard.positions("cpu") for shard in shards_of(*size)])
    assert torch.equal(positions.sort().values, torch.arange(size[0]))


@given(sizes)
def test_a_rank_has_one_or_two_runs_of_its_positions_in_order(size: tuple[int, int]) -> None:
    for shard in shards_of(*size):
        positions = shard.positions("cpu")
        assert len(positions) == shard.num_local <= 2 * shard.chunks.chunk_size
        assert 1 <= len(shard.runs) <= 2
        runs = shard.local_slices()
        assert [run for run, _ in runs] == list(shard.runs)
        for run, own in runs:
            assert positions[own].tolist() == list(run)
        assert all(run for run in shard.runs) or shard.num_local == 0
        assert torch.equal(positions, positions.sort().values)


@given(st.integers(1, 12), st.integers(2, 9))
def test_causal_attention_costs_every_rank_the_same_if_chunks_are_full(chunk: int, num_ranks: int) -> None:
    costs = [int((shard.positions("cpu") + 1).sum()) for shard in shards_of(2 * num_ranks * chunk, num_ranks)]
    assert len(set(costs)) == 1


@given(sizes, st.integers(0, 3))
def test_rows_are_cut_at_the_positions_along_any_dimension(size: tuple[int, int], num_rows: int) -> None:
    for shard in shards_of(*size):
        positions, rows = shard.positions("cpu"), torch.randn(num_rows, size[0], 2)
        assert torch.equal(shard.take(rows), rows[:, positions])
        assert torch.equal(shard.take(rows.transpose(0, 1), dim=0), rows.transpose(0, 1)[positions])
