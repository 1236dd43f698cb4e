"""Items of a stream, several at a time."""

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import TypeVar

T = TypeVar("T")


def chunks(items: Iterable[T], size_of: Callable[[T], int], max_size: int, max_items: float = inf) -> Iterator[list[T]]:
    """Yield lists of consecutive items. A list ends with the item that brings it to `max_size` or `max_items`."""
    chunk, size = list[T](), 0
    for item in items:
        chunk.append(item)
        size += size_of(item)
        if size >= max_size or len(chunk) >= max_items:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
