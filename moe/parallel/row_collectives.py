"""Reduce-scatter and all-gather of rows, one for each rank of a process group.

On CPUs both are all-to-alls: gloo's reduce-scatter sums all rows on all ranks, and its all-gather takes three times as
long as an all-to-all of the same bytes.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel.collective import all_gather_single, collective, reduce_scatter_single


def reduce_scatter(rows: Tensor, group: dist.ProcessGroup, name: str) -> Callable[[], Tensor]:
    """Begin to sum `rows` `[ranks, n]` over a group. The result waits, and returns this rank's row of the sums `[n]`.
    `rows` must not be written before. Raises CollectiveError, which calls the collective `name`, in both."""
    on_cpu = rows.device.type == "cpu"
    output = torch.empty_like(rows if on_cpu else rows[0])
    with collective(name):
        if on_cpu:
            work = dist.all_to_all_single(output, rows, group=group, async_op=True)
        else:
            work = reduce_scatter_single(output, rows.view(-1), group=group, async_op=True)
    assert work is not None

    def wait() -> Tensor:
        with collective(name):
            work.wait()
        # The rows stay in memory until here: the collective reads them.
        return output.sum(0) if rows.device.type == "cpu" else output

    return wait


def all_gather(row: Tensor, group: dist.ProcessGroup, name: str) -> Tensor:
    """Rows of all ranks of a group `[ranks, n]`, from this rank's `[n]`. Raises CollectiveError, which calls the
    collective `name`."""
    num_ranks = dist.get_world_size(group)
    rows = row.new_empty(num_ranks, len(row))
    with collective(name):
        if row.device.type == "cpu":
            dist.all_to_all_single(rows, row.expand(num_ranks, -1).contiguous(), group=group)
        else:
            all_gather_single(rows.view(-1), row, group=group)
    return rows
