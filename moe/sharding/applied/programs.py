"""Programs of an applied module: the planned one, and those for the other mode and other batch sizes, which are created
on first use. The most recently used programs are kept."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from moe.sharding.applied.batch import batch_like
from moe.sharding.applied.callable_program import CallableProgram

Key = tuple[bool, tuple[Any, ...]]
"""(is training, shapes and dtypes of the batch's leaves)."""


class Programs:
    """All programs of an applied module, over the same shards of parameters."""

    def __init__(
        self,
        initial: CallableProgram,
        is_training: bool,
        make: Callable[[bool, tuple[Any, ...]], CallableProgram],
        max_programs: int,
    ) -> None:
        """`make` builds the program of a mode for a batch; it is a collective."""
        self.initial, self._is_training, self._make, self._max = initial, is_training, make, max_programs
        self._cache: OrderedDict[Key, CallableProgram] = OrderedDict()
        self._compile: dict[str, Any] | None = None

    def compile(self, options: dict[str, Any]) -> None:
        """Have every program compiled by `torch.compile`, with these options."""
        self._compile = options
        self._cache.clear()

    def program_of_plan(self, training: bool) -> CallableProgram:
        """The program of a mode for batches of the plan's size."""
        return self._program((training, self.initial.batch), self.initial.batch)

    def program_of_batch(self, training: bool, batch: Sequence[Any]) -> CallableProgram:
        """The program of a mode for a batch. Raises ValueError for one that differs from the plan's in more than
        sizes."""
        leaves = batch_like(batch, self.initial.batch, self.initial.batch_tree)
        return self._program((training, leaves), leaves)

    def _program(self, key: Key, leaves: tuple[Any, ...]) -> CallableProgram:
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        callable_program = self.initial
        if key != (self._is_training, self.initial.batch):
            callable_program = self._make(key[0], self._sample(leaves))
        self._cache[key] = callable_program = replace(callable_program, options=self._compile)
        while len(self._cache) > self._max:
            self._cache.popitem(last=False)
        return callable_program

    def _sample(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        tensors = [
            torch.empty(leaf[0], dtype=leaf[1], device="meta") if isinstance(leaf, tuple) else leaf for leaf in leaves
        ]
        return tuple(pytree.tree_unflatten(tensors, self.initial.batch_tree))
