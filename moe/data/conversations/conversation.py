"""Conversations in the form that chat templates take, and rendered text with the spans to learn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
ASSISTANT = "assistant"
TOKEN_ROLES = ("system", "user", ASSISTANT, "tool")
"""Roles of tokens, which are stored as indices of these; others count as one of them."""
NO_ROLE = len(TOKEN_ROLES)
"""Index of tokens without a role."""

Message = dict[str, Any]
"""`role`, `content` (text), and other keys of the record: `tool_calls`, `name`, `reasoning_content`, ..."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools that may be called."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    """In the form that the template takes: JSON schemas of functions."""
    num_given: int = 0
    """Number of messages at the beginning that are not learned, regardless of their role."""
    arguments: Mapping[str, Any] | None = None
    """Template arguments that the record sets, such as `enable_thinking`."""
    has_role_spans: bool = False
    """Whether the spans of its messages are found too."""

    @property
    def first_answer(self) -> int:
        """Index of the first learned message; the number of messages if none is."""
        return next(
            (index for index, message in enumerate(self.messages) if self.learns(index, message)), len(self.messages)
        )

    def learns(self, index: int, message: Message) -> bool:
        """Whether a message is an answer to learn; a `weight` of 0, as in OpenAI's records, excludes it."""
        return index >= self.num_given and message["role"] == ASSISTANT and message.get("weight") != 0


@dataclass(frozen=True)
class RenderedText:
    """Rendered text of a conversation, or of its beginning up to one of its answers."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Learned spans, in order: begin and end of each, in characters."""
    by_marks: bool = False
    """Whether the template marks the spans itself."""
    role_spans: tuple[tuple[int, int, str], ...] | None = None
    """Spans of messages whose text is known: begin, end and role of `TOKEN_ROLES`; None for conversations without
    `has_role_spans`."""


NOTES = {
    "thoughts": "answers whose thoughts the chat template drops",
    "contents": "answers whose text the chat template drops or changes",
    "openings": "opening answers not learned, since the chat template cannot render a prompt for them",
    "calls": "conversations whose tool calls were split into one message per call, as the chat template requires",
}
"""Remarks on rendered conversations, by name."""


@dataclass(frozen=True)
class Rendering:
    """Rows of a conversation: one, or one for each answer if the template renders earlier answers differently when more
    messages follow."""

    rows: tuple[RenderedText, ...]
    notes: tuple[str, ...] = ()
    """Keys of `NOTES`, each as often as it applies."""


class UnreadableRecord(Exception):
    """A record, or a conversation, that cannot be learned from: the rule that it breaks, and the remedy."""

    def __init__(self, rule: str, remedy: str) -> None:
        super().__init__(rule, remedy)
        self.rule, self.remedy = rule, remedy
