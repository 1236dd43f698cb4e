"""Messages to a process that generates text, and back: a line of JSON each."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from moe.spec.generation import GenerationSpec


class _GeneratorMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Load(_GeneratorMessage):
    """The first order: the model that the process is for."""

    storage: str
    """Storage of the job, whose newest whole checkpoint is loaded."""
    root: str | None
    """Folder that the storage lies in, below which no link is followed; the one above it when left out."""
    memory_bytes: int | None = None
    """Memory that the process may have for its data; any when left out."""


class TextRequest(_GeneratorMessage):
    """One text to generate."""

    number: int
    """Number of the text, which its answers repeat."""
    prompt: str
    spec: GenerationSpec


class Order(_GeneratorMessage):
    """A line of standard input. At its end the process ends, whatever it is doing: whoever gave orders is gone."""

    load: Load | None = None
    generate: TextRequest | None = None
    break_off: int | None = None
    """Number of a text that nobody wants any more."""


class GeneratorMessage(_GeneratorMessage):
    """A line of standard output."""

    kind: Literal["loaded", "begun", "text", "end", "refused", "failed"]
    """`begun`: the prompt is taken. `refused`: it is not, for `problems`. `failed`: for `words`, and where that was to
    load, the process ends."""
    number: int = 0
    text: str = ""
    reason: str = ""
    """Reason of an end: a `moe.records.Reason`, or `broken off`."""
    num_tokens: int = 0
    problems: tuple[dict[str, Any], ...] = ()
    words: str = ""
