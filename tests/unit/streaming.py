"""Streams of generated text, collected."""

from typing import Any

from moe.records import Ending


def collect_stream(generator: Any, prompt: str, spec: Any = None) -> tuple[list[str], Ending]:
    """Return the pieces of a text that a generator streams, and how it ended."""
    pieces, stream = list[str](), generator.stream(prompt, spec)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as over:
            return pieces, over.value
