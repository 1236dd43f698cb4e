"""Roles of a rendered conversation's text: which messages the template renders it for.

A message begins where the template's rendering of the messages before it ends, of these alone or with a made-up
question after them: templates may render an answer differently once more messages follow. Text before a first message
has no role, unless that is a system message. Messages that the template renders within those of other roles (a system
message as part of a user's) have no role either.
"""

import re
import secrets
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from moe.data.conversations.answers import TranscriptRenderer
from moe.data.conversations.conversation import ASSISTANT, Message, UnreadableRecord

_SYNONYMS = {"developer": "system", "function": "tool", "ipython": "tool", "environment": "tool"}
_QUESTION: Message = {"role": "user", "content": "x"}
_ANSWER: Message = {"role": ASSISTANT, "content": "y"}


class RoleSpan(NamedTuple):
    """Text of consecutive messages of one role."""

    begin: int
    """In characters."""
    end: int
    role: str


def role_spans(texts: TranscriptRenderer, text: str, num_messages: int) -> tuple[RoleSpan, ...]:
    """Role spans of a row, in order, where they are known exactly. `text`: the row, up to the end of its first
    `num_messages` messages."""
    messages = texts.messages[:num_messages]
    runs = _runs(messages)
    boundaries = [_begin(texts, text, start) for start, _, _ in runs] + [len(text)]
    known_boundaries = [boundary for boundary in boundaries if boundary is not None]
    ends = _content_ends(texts, text, messages[:-1] if messages[-1]["role"] == ASSISTANT else messages)
    if ends is None or known_boundaries != sorted(known_boundaries):
        return ()
    spans = []
    for (start, stop, role), (begin, end) in zip(runs, pairwise(boundaries), strict=True):
        if begin is None or end is None or begin == end:
            continue
        if all((start <= index < stop) == (begin < content_end <= end) for index, content_end in ends):
            spans.append(RoleSpan(begin, end, role))
    return tuple(spans)


def _runs(messages: Sequence[Message]) -> list[tuple[int, int, str]]:
    """(first message, the one after the last, role) of runs of messages of one role."""
    runs, start = list[tuple[int, int, str]](), 0
    for role, members in groupby(map(_role, messages)):
        stop = start + len(list(members))
        runs.append((start, stop, role))
        start = stop
    return runs


def _role(message: Message) -> str:
    return _SYNONYMS.get(message["role"], str(message["role"]))


def _begin(texts: TranscriptRenderer, text: str, index: int) -> int | None:
    """Offset in `text` at which message `index` begins; None if it is not known."""
    messages = texts.messages[:index]
    if _role(texts.messages[0]) == "system" and not messages:
        return 0
    for tail in dict.fromkeys(
        ["", texts.eos_token]
    ):  # some templates write it after the last message, whatever that is
        rendered_text = _render(texts, messages, tail) if messages else None
        if rendered_text is not None and text.startswith(rendered_text):
            return len(rendered_text)
        one = _render(texts, [*messages, _QUESTION], tail)
        if one is None:
            continue
        for between in ([], [_ANSWER]):  # some templates refuse two questions in a row
            earlier_text = _render(texts, [*messages, _QUESTION, *between], tail)
            longer_text = _render(texts, [*messages, _QUESTION, *between, _QUESTION], tail)
            if earlier_text is None or longer_text is None:
                continue
            question = longer_text.removeprefix(earlier_text)
            before = one.removesuffix(question)
            if len(before) < len(one) and longer_text.startswith(earlier_text) and text.startswith(before):
                return len(before)
    return None


def _render(texts: TranscriptRenderer, messages: Sequence[Message], tail: str) -> str | None:
    """Text of messages without `tail`; None if they cannot be rendered."""
    try:
        return texts.render(messages).removesuffix(tail)
    except UnreadableRecord:
        return None


def _content_ends(texts: TranscriptRenderer, text: str, messages: Sequence[Message]) -> list[tuple[int, int]] | None:
    """(message, offset in `text` of its content's end) wherever contents are rendered; None if they are not found."""
    if not messages:
        return []
    marker = f"said-{secrets.token_hex(8)}-"
    for tail in dict.fromkeys(["", texts.eos_token]):
        beginning, marked_text = (
            _render(texts, rendered_messages, tail)
            for rendered_messages in (messages, _mark_contents(messages, marker))
        )
        if beginning is None or marked_text is None or not text.startswith(beginning):
            continue
        pieces = re.split(rf"{marker}(\d+)-", marked_text)
        if "".join(pieces[::2]) == beginning:
            ends = accumulate(map(len, pieces[:-1:2]))
            return [(int(index), end) for index, end in zip(pieces[1::2], ends, strict=True)]
    return None


def _mark_contents(messages: Sequence[Message], marker: str) -> list[Message]:
    """The messages with a marker at the end of the content of each, before white space that a template may trim."""
    marked_messages = []
    for index, message in enumerate(messages):
        content = message["content"].rstrip()
        space = message["content"][len(content) :]
        marked_messages.append({**message, "content": f"{content}{marker}{index}-{space}"} if content else message)
    return marked_messages
