"""Messages to and from a generator process: one line of JSON each."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from moe.spec.generation import GenerationSpec


class _GeneratorMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Load(_GeneratorMessage):
    """The first order: the model to load."""

    storage: str
    """Storage of the job, whose newest intact checkpoint is loaded."""
    root: str | None
    """Folder below which no link is followed; the storage's parent if None."""
    memory_bytes: int | None = None
    """Limit of the process's data memory; unlimited if None."""


class TextRequest(_GeneratorMessage):
    """One text to generate."""

    number: int
    """Number of the text, repeated in its messages."""
    prompt: str
    spec: GenerationSpec


class Order(_GeneratorMessage):
    """A line of standard input. The process exits at end of file."""

    load: Load | None = None
    generate: TextRequest | None = None
    break_off: int | None = None
    """Number of a text to cancel."""


class GeneratorMessage(_GeneratorMessage):
    """A line of standard output."""

    kind: Literal["loaded", "begun", "text", "end", "refused", "failed"]
    """`begun`: prompt accepted. `refused`: for `problems`. `failed`: for `words`; a failed load ends the process."""
    number: int = 0
    text: str = ""
    reason: str = ""
    """Reason of the end: a `moe.records.Reason`, or `cancelled`."""
    num_tokens: int = 0
    notes: tuple[str, ...] | None = None
    tokens: tuple[dict[str, Any], ...] | None = None
    """`moe.records.ScoredToken`s, if requested."""
    problems: tuple[dict[str, Any], ...] = ()
    words: str = ""
