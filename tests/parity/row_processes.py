"""Processes that run rows side by side, each with its ranks on a core of its own."""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context, parent_process
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from threading import Thread

import torch

from tests.parity.findings import Findings, read_or_run
from tests.parity.gloo_ranks import Pools
from tests.parity.grid import row_of

TIMEOUT_S = 3600
"""A grid takes hours beside other work: a training that is slow must not count as one that differs."""


def row_processes(num_processes: int) -> ProcessPoolExecutor:
    """Pool of processes for `run_row`, which take the cores in turn."""
    context, cores = get_context("spawn"), sorted(os.sched_getaffinity(0))
    cores_in_turn = context.SimpleQueue()
    for number in range(num_processes):
        cores_in_turn.put(cores[number % len(cores)])
    return ProcessPoolExecutor(num_processes, context, _stay_on_a_core, (cores_in_turn,))


def run_row(index: int, commit: str, path: Path) -> Findings:
    """The row in the file if it is of this commit, else row `index` of the grid, run and stored there."""
    return read_or_run(path, commit, partial(row_of, _ranks(), index))


def _stay_on_a_core(cores: "SimpleQueue[int]") -> None:
    """Keep this process and its ranks on one core. Ranks of small models mostly wait for one another: on one core the
    next one runs at once, without waking another core, and all cores are busy with other rows."""
    os.sched_setaffinity(0, {cores.get()})
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process once the one that records its rows has been killed; otherwise it would run the next ones."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@cache
def _ranks() -> Pools:
    """Ranks of this process, which stay for all of its rows."""
    return Pools(TIMEOUT_S)
