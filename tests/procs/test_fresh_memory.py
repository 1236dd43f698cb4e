"""Pages that the system has to give a process for a block of memory that it has had before."""

import os
import subprocess
import sys

import pytest

from moe.train.environment import KEEP_FREED_MEMORY, children_keep_freed_memory
from service.run.driver import workers_environment
from tests.processes import DEADLINE_S

MIB = 1 << 20
BLOCKS = """
import resource, statistics, threading, torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for mib in (80, 40, 20):
        torch.empty(mib << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def blocks():
    print(int(statistics.median([faults() for turn in range(9)])))

thread = threading.Thread(target=blocks)
thread.start()
thread.join()
"""
"""In a thread, as Ray Train's workers train: prints the page faults of most turns. In one or two of them what is
allocated beside moves the blocks, and the heap grows by a huge page."""


def faults(environment: dict[str, str]) -> int:
    plain = {name: value for name, value in os.environ.items() if name not in KEEP_FREED_MEMORY}
    said = subprocess.run(
        [sys.executable, "-c", BLOCKS], env=plain | environment, timeout=DEADLINE_S, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    return int(said.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is set is glibc's")
def test_workers_on_cores_take_no_fresh_memory_for_a_block_they_had() -> None:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    in_workers, as_it_comes = faults(workers_environment(gpus_per_worker=0)), faults({})
    print(f"{as_it_comes} page faults a turn as it comes, {in_workers} in a worker")
    assert as_it_comes >= 80 * MIB // page_bytes
    assert in_workers < 100


def test_what_an_operator_sets_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert workers_environment(gpus_per_worker=0)["MALLOC_ARENA_MAX"] == "4"


def test_workers_with_gpus_leave_the_host_memory_as_it_is() -> None:
    assert not KEEP_FREED_MEMORY.keys() & workers_environment(gpus_per_worker=1).keys()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is set is glibc's")
def test_rates_are_measured_in_processes_that_keep_what_they_freed() -> None:
    before = dict(os.environ)
    with children_keep_freed_memory():
        assert faults({name: os.environ[name] for name in KEEP_FREED_MEMORY}) < 100
    assert dict(os.environ) == before
