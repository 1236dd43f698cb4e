"""Bytes that kernels move, counted in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils._python_dispatch import _disable_current_modes


@dataclass
class MovedBytes:
    """Bytes of one kernel's launches."""

    requested: int = 0
    """Of all loads and stores."""
    distinct: int = 0
    """Of the memory that each launch reads, and of that which it writes: what it moves if caches hold the rest."""


@dataclass
class _Launch:
    """Accesses of a launch: arrays of addresses, by (whether they are written, bytes of an element)."""

    accesses: dict[tuple[bool, int], list[Any]] = field(default_factory=dict)

    def add(self, pointers: Any, mask: Any, itemsize: int, *, writes: bool) -> None:
        addresses = np.broadcast_to(pointers, np.shape(mask))[np.asarray(mask, dtype=bool)]
        self.accesses.setdefault((writes, itemsize), []).append(addresses)

    def add_to(self, total: MovedBytes) -> None:
        for (_, itemsize), parts in self.accesses.items():
            addresses = np.concatenate(parts)
            total.requested += itemsize * addresses.size
            total.distinct += itemsize * np.unique(addresses).size


@contextmanager
def count_moved_bytes() -> Iterator[dict[str, MovedBytes]]:
    """Bytes moved within the context, by kernel."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    run, load, store = (
        GridExecutor.__call__,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )
    total: dict[str, MovedBytes] = {}
    current = _Launch()

    def counted_run(executor: Any, *arguments: Any, **keywords: Any) -> None:
        current.accesses.clear()
        with _disable_current_modes():  # do not count the interpreter's own operations
            run(executor, *arguments, **keywords)
        current.add_to(total.setdefault(executor.fn.__name__, MovedBytes()))

    def counted_load(builder: Any, pointers: Any, mask: Any, *arguments: Any) -> Any:
        result = load(builder, pointers, mask, *arguments)
        current.add(pointers.data, mask.data, result.data.dtype.itemsize, writes=False)
        return result

    def counted_store(builder: Any, pointers: Any, value: Any, mask: Any, *arguments: Any) -> Any:
        current.add(pointers.data, mask.data, value.data.dtype.itemsize, writes=True)
        return store(builder, pointers, value, mask, *arguments)

    GridExecutor.__call__ = counted_run  # type: ignore[method-assign]
    InterpreterBuilder.create_masked_load = counted_load  # type: ignore[method-assign]
    InterpreterBuilder.create_masked_store = counted_store  # type: ignore[method-assign]
    try:
        yield total
    finally:
        GridExecutor.__call__ = run  # type: ignore[method-assign]
        InterpreterBuilder.create_masked_load = load  # type: ignore[method-assign]
        InterpreterBuilder.create_masked_store = store  # type: ignore[method-assign]
