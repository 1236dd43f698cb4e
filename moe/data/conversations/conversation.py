"""A conversation, as chat templates take it, and where the text that one becomes is learned."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
ASSISTANT = "assistant"

Message = dict[str, Any]
"""`role`, `content` (text), and what else a record has: `tool_calls`, `name`, `reasoning_content`, ..."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools that are there to be called."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    """As the template takes them: functions by JSON schema."""
    num_given: int = 0
    """Messages at the beginning that are not learned, whoever says them."""
    arguments: Mapping[str, Any] | None = None
    """Arguments of the template that the record sets: `enable_thinking`, for one."""

    @property
    def first_answer(self) -> int:
        """Number of the first message that is learned; of all messages where none is."""
        return next(
            (at for at, each in enumerate(self.messages) if self.learns(at, each)), len(self.messages)
        )

    def learns(self, at: int, message: Message) -> bool:
        """Whether a message is an answer to learn; a `weight` of 0, as OpenAI's records have, leaves one out."""
        return at >= self.num_given and message["role"] == ASSISTANT and message.get("weight") != 0


@dataclass(frozen=True)
class Written:
    """Text of a conversation, or of it up to one of its answers."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Where the assistant speaks, by characters: begin and end of each stretch, in order."""
    by_marks: bool = False
    """Whether the template says so itself."""


NOTES = {
    "thoughts": "answers whose thoughts the template leaves out",
    "openings": "openings that are not learned, since the template cannot ask for one",
    "calls": "conversations whose calls of tools were put into a message each, since the template writes one a message",
}
"""Remarks on how conversations were written, by name."""


@dataclass(frozen=True)
class Rendering:
    """Rows of text that a conversation becomes: one, or one for each answer where a template writes earlier answers
    otherwise once more messages follow."""

    rows: tuple[Written, ...]
    notes: tuple[str, ...] = ()
    """Names of `NOTES`, each as often as it applies."""


class Unreadable(Exception):
    """A record, or a conversation, that cannot be learned from: the rule that it breaks, and the remedy."""

    def __init__(self, rule: str, remedy: str) -> None:
        super().__init__(rule, remedy)
        self.rule, self.remedy = rule, remedy
