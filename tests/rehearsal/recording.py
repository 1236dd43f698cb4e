"""Graphs of the rehearsal device, with the limits of CUDA graphs.

Operations that are recorded count as not computed: memory from before is as it was, and results are undefined until the
first replay. Replays repeat each operation on the same memory, with the same numbers of the host.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

Signature = list[tuple[Any, ...]]
"""Of each operation, its name and arguments, with shapes, strides and dtypes in place of tensors."""


class Recording:
    """A graph. While it is `current`, operations are added to it."""

    current: Optional["Recording"] = None

    def __init__(self) -> None:
        self.signature: Signature = []
        self._operations: list[Callable[[], object]] = []
        self._results: dict[int, Tensor] = {}
        """Tensors in memory that operations allocated, by address, which no other tensor gets as long as this lives."""
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """(Memory from before, its values), by address."""

    def __enter__(self) -> "Recording":
        assert Recording.current is None
        Recording.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Recording.current = None
        for memory, values in self._before.values():
            memory.copy_(values)
        for result in self._results.values():
            result.fill_(float("nan") if result.is_floating_point() else 0)
        self._before.clear()

    def run(self, func: Any, arguments: Any, keywords: dict[str, Any], *, allocates_only: bool = False) -> Any:
        """Run an operator and record it, unless it only allocates memory or makes a view."""
        operands = _tensors_of((arguments, keywords))
        self.signature.append((func._schema.name, *_describe((arguments, keywords))))
        self.begin_write(_written(func, arguments, keywords))
        result = func(*arguments, **keywords)
        addresses = {_address(operand) for operand in operands}
        new_results = [value for value in _tensors_of(result) if _address(value) not in addresses]
        self._results |= {_address(value): value for value in new_results}
        if allocates_only:
            return result
        if new_results:
            assert len(new_results) == len(_tensors_of(result)), f"{func} returns views and values"
            self._operations.append(partial(_overwrite, new_results, partial(func, *arguments, **keywords)))
        elif func._schema.is_mutable:
            self._operations.append(partial(func, *arguments, **keywords))
        return result

    def launch(self, name: str, kernel: "partial[object]") -> None:
        """Launch a kernel that may write to its operands, and record it."""
        self.signature.append((name, *_describe((kernel.args[1:], kernel.keywords))))
        self.begin_write(_tensors_of(kernel.args))
        kernel()
        self._operations.append(kernel)

    def begin_write(self, tensors: Iterable[Tensor]) -> None:
        """Keep the values of memory from before."""
        for tensor in tensors:
            address = _address(tensor)
            if address and address not in self._results and address not in self._before:
                memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._before[address] = memory, memory.clone()

    @torch.no_grad()
    def replay(self) -> None:
        for operation in self._operations:
            operation()


def _overwrite(results: list[Tensor], operation: Callable[[], object]) -> None:
    for result, value in zip(results, _tensors_of(operation()), strict=True):
        result.copy_(value)


def _written(func: Any, arguments: Any, keywords: dict[str, Any]) -> list[Tensor]:
    """Operands that an operator writes to."""
    return _tensors_of(
        [
            arguments[index] if index < len(arguments) else keywords.get(argument.name)
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )


def _describe(value: Any) -> list[Any]:
    return [
        (part.shape, part.stride(), part.dtype) if isinstance(part, Tensor) else part for part in tree_flatten(value)[0]
    ]


def _tensors_of(value: Any) -> list[Tensor]:
    return [part for part in tree_flatten(value)[0] if isinstance(part, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
