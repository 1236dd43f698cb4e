"""Environment variables that limit a process's memory, set before it starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

KEEP_FREED_MEMORY = {
    # glibc maps each block of 32 MiB or more separately and unmaps it when freed, so the kernel zeroes the pages of
    # gradients and activations every step. These settings keep freed blocks for reuse.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 60),
    # Only the first arena can grow to the size of a model; training's thread would use another one.
    "MALLOC_ARENA_MAX": "1",
    # The heap requests huge pages (glibc 2.35): 512 times fewer page mappings. torch's own option
    # (THP_MEM_ALLOC_ENABLE) aligns each block to 2 MiB, so a block does not fit into the hole of a freed one.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""For training on CPUs. Processes keep their peak memory, which the planner counts. Only glibc reads these settings."""


@contextmanager
def children_keep_freed_memory() -> Iterator[None]:
    """Set `KEEP_FREED_MEMORY` for processes started in the context, unless set already."""
    missing = KEEP_FREED_MEMORY.keys() - os.environ.keys()
    os.environ |= {name: KEEP_FREED_MEMORY[name] for name in missing}
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
