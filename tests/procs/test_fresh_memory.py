"""Pages that the system has to give a process for a block of memory that it has had before."""

import os
import subprocess
import sys

import pytest

from moe.train.environment import KEEP_FREED_MEMORY, children_keep_freed_memory
from service.run.driver import workers_environment
from tests.processes import DEADLINE_S

FEW_FAULTS = 10
"""Less than the huge pages of any of these blocks."""
BLOCKS = """
import resource, threading, torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for mib in (80, 40, 48):
        torch.empty(mib << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def blocks():
    print(min(faults() for turn in range(40)))

thread = threading.Thread(target=blocks)
thread.start()
thread.join()
"""
"""In a thread, as Ray Train's workers train: prints the page faults of the turn that took fewest. A heap has its size
after some turns, eleven at most as seen: what is allocated beside takes from the hole that a block left, and the block
has another place next time, until there is one for all."""


def faults(environment: dict[str, str]) -> int:
    plain = {name: value for name, value in os.environ.items() if name not in KEEP_FREED_MEMORY}
    said = subprocess.run(
        [sys.executable, "-c", BLOCKS], env=plain | environment, timeout=DEADLINE_S, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    return int(said.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is set is glibc's")
def test_workers_on_cores_take_no_fresh_memory_for_a_block_they_had() -> None:
    in_workers, as_it_comes = faults(workers_environment(gpus_per_worker=0)), faults({})
    print(f"{as_it_comes} page faults a turn as it comes, {in_workers} in a worker")
    assert in_workers < FEW_FAULTS < as_it_comes


def test_what_an_operator_sets_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert workers_environment(gpus_per_worker=0)["MALLOC_ARENA_MAX"] == "4"


def test_workers_with_gpus_leave_the_host_memory_as_it_is() -> None:
    assert not KEEP_FREED_MEMORY.keys() & workers_environment(gpus_per_worker=1).keys()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is set is glibc's")
def test_rates_are_measured_in_processes_that_keep_what_they_freed() -> None:
    before = dict(os.environ)
    with children_keep_freed_memory():
        assert faults({name: os.environ[name] for name in KEEP_FREED_MEMORY}) < FEW_FAULTS
    assert dict(os.environ) == before
