"""Environment of a process that bounds its memory, before the process starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

KEEP_FREED_MEMORY = {
    # glibc maps each block of 32 MiB or more anew, and unmaps it when it is freed: the system then clears every page of
    # gradients and activations again in every step. These keep what was freed, for the next block of its size.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 60),
    # Only the first arena can be as large as a model, and training runs in a thread that has another one otherwise.
    "MALLOC_ARENA_MAX": "1",
    # The heap asks for huge pages (glibc 2.35): 512 times fewer to be mapped. torch's own request for them
    # (THP_MEM_ALLOC_ENABLE) aligns each block to 2 MiB, which finds no place in the hole that such a block left.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment of processes that train on a CPU. Memory that they have used once stays with them, as the planner
assumes. C libraries other than glibc ignore these variables."""


@contextmanager
def children_keep_freed_memory() -> Iterator[None]:
    """Processes that are started within see `KEEP_FREED_MEMORY`; what the environment already says stays."""
    missing = KEEP_FREED_MEMORY.keys() - os.environ.keys()
    os.environ |= {name: KEEP_FREED_MEMORY[name] for name in missing}
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
