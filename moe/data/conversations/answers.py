"""Text of a conversation up to one of its answers, as the model sees it when it is asked for that answer, and the
answer itself.

Most templates write the answer behind what they ask with. Where one asks with an opened thought (`<think>`), or with
more than it writes before an answer, the answer goes on from what it asks with.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe.data.conversations.conversation import ASSISTANT, Conversation, Message, Unreadable
from moe.data.conversations.jinja_template import JinjaTemplate
from moe.data.conversations.thoughts import parted, without_thoughts

_OPENED = re.compile(r"<((?:\w+:)?(?:think|thought|reason)\w*)>(\s*)$")
"""Thought that a prompt ends within."""
_EMPTY = re.compile(r"\s*<((?:\w+:)?(?:think|thought|reason)\w*)>(\s*)</\1>")
"""Thought of nothing that an answer begins with."""
_PROBE: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class Answer:
    """An answer, behind all that comes before it."""

    at: int
    """Number of its message."""
    text: str
    """All up to the end of the answer."""
    begin: int
    """Where the answer begins, by characters."""


class Texts:
    """Texts of one conversation, each rendered once."""

    def __init__(self, template: JinjaTemplate, conversation: Conversation) -> None:
        self.conversation, self.messages = conversation, conversation.messages
        self._template = template
        self._first = dict[tuple[int, bool], str]()

    def first(self, number: int, *, asks: bool = False) -> str:
        """Text of the first so many messages. Raises Unreadable."""
        if (number, asks) not in self._first:
            self._first[number, asks] = self.of(self.messages[:number], asks=asks)
        return self._first[number, asks]

    def of(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """Text of other messages in the same place. Raises Unreadable."""
        given = self.conversation
        return self._template.render(messages, given.tools, given.arguments, asks=asks).text

    def answer(self, at: int) -> Answer:
        """The answer that is message `at`. Raises Unreadable where the template cannot ask for it, or writes it so
        that it cannot be told from what asks for it."""
        answered = self.first(at + 1)
        if at == 0:
            return Answer(at, answered, self._begin_of_opening(answered))
        asked = self.first(at, asks=True)
        if answered.startswith(asked):
            said = _with_own_thoughts(self.messages[at], answered[len(asked) :])
            return Answer(at, asked + said, len(asked))
        text = self._going_on(at, asked)
        if text is None:
            rule = (
                f"writes what asks for an answer otherwise before one (messages[{at}], {_parting(asked, answered)}), "
                "so that what the assistant says cannot be told by what the text grows by"
            )
            raise Unreadable(
                rule, "put generation marks around it in a template, and name that by data.chat_template"
            )
        return Answer(at, text, len(asked))

    def follows(self, at: int) -> list[str]:
        """What the template may write behind the answer that is message `at`: for the message that follows, and for one
        of whoever has the next word."""
        message = self.messages[at]
        next_word: Message = dict(_PROBE)
        if calls := message.get("tool_calls"):
            name = calls[0]["function"]["name"]
            next_word = {"role": "tool", "content": "x", "name": name, "tool_call_id": calls[0].get("id", "")}
        continuations = []
        for follower in (*self.messages[at + 1 : at + 2], next_word):
            before_it = self.messages[:at]
            silent = [without_thoughts(earlier) for earlier in (*before_it, message)]
            for messages in ([*before_it, message], [*before_it, silent[-1]], silent):
                try:
                    before, after = self.of(messages), self.of([*messages, follower])
                except Unreadable:
                    continue
                if after.startswith(before):
                    continuations.append(after[len(before) :])
                    break
        return continuations

    def _going_on(self, at: int, asked: str) -> str | None:
        """What asks for an answer, with the answer behind it; None where none can be told. The thoughts are left out
        unless it asks for some."""
        message, asking, head = self.messages[at], self._asking(), self._head(at)
        opened = _OPENED.search(asked)
        if opened is None and head is not None and asking and asked.endswith(asking) and asking in head:
            # The messages before it are written otherwise once the answer is there.
            place, answered = head.rindex(asking), self.first(at + 1)
            before, asked_in = head[: place + len(asking)], self.messages[at - 1]["content"].strip()
            is_own = not asked_in or head.rfind(asked_in) < place
            if is_own and answered.startswith(before):
                return asked + answered[len(before) :]
        plain = self.of([*self.messages[:at], without_thoughts(message)])
        if opened is None and plain.startswith(asked):
            return plain
        said = None if head is None else _behind(head, plain)
        if head is None or said is None:
            return None
        if opened is None:
            if asked.startswith(head) or asked.rstrip() == head.rstrip():
                return asked + said
            between = _written_behind(self.messages[at - 1]["content"].strip(), asked, head)
            return None if between is None else asked + between + said
        asked_before, close, space = asked[: opened.start()], f"</{opened[1]}>", opened[2]
        if not head.startswith(asked_before):
            return None
        between, closes, gap = head[len(asked_before) :].partition(close)
        if between.strip() and not closes:
            return None
        thoughts, _ = parted(message)
        thoughts = thoughts.strip("\n") if space else thoughts
        return asked + thoughts + space + close + (gap if closes else 2 * space) + said

    def _head(self, at: int) -> str | None:
        """What the template writes up to where message `at` begins to speak."""
        sign = f"said-{secrets.token_hex(8)}"
        head, has_sign, _ = self.of([*self.messages[:at], {"role": ASSISTANT, "content": sign}]).partition(
            sign
        )
        return head if has_sign else None

    def _begin_of_opening(self, text: str) -> int:
        """Where an answer begins that nobody has asked for: nothing can be rendered before it, since templates look at
        the first message."""
        message = self.messages[0]
        if asks := self._asking():
            place = text.find(asks)
            if place >= 0:
                return place + len(asks)
        else:  # it grows by all that is written for it
            twice = self._tried([message, message])
            length = len(twice) - len(text)
            if length > 0 and twice == text + text[len(text) - length :]:
                return len(text) - length
        content = message["content"]
        other: dict[str, Any] = {
            **without_thoughts(message),
            "content": ("b" if content[:1] == "a" else "a") + content,
        }
        return common_length(text, self._tried([other]))

    def _asking(self) -> str:
        """What asks for an answer, behind a message of a user."""
        plain, asked = self._tried([_PROBE]), self._tried([_PROBE], asks=True)
        return asked[len(plain) :] if plain and asked.startswith(plain) else ""

    def _tried(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        try:
            return self.of(messages, asks=asks)
        except Unreadable:
            return ""


def _with_own_thoughts(message: Message, said: str) -> str:
    """An answer with the thoughts of its message in the place of the empty ones that it begins with: Kimi K2's template
    leaves out those of an answer that calls no tool, though it does not ask for one without."""
    thoughts = parted(message)[0].strip("\n")
    empty = _EMPTY.match(said)
    if empty is None or not thoughts.strip() or f"<{empty[1]}>" in said[empty.end() :]:
        return said
    half = empty[2][: len(empty[2]) // 2]
    return said[: empty.start(2)] + half + thoughts + half + said[empty.end(2) :]


def _written_behind(content: str, asked: str, head: str) -> str | None:
    """What the beginning of an answer, `head`, has more than what asks for it behind the message before, where that is
    white space; None of others. What comes before that message may differ: Mistral's templates write the system prompt
    only to ask."""
    if not content or content not in asked or content not in head:
        return None
    ends, begins = asked.rpartition(content)[2], head.rpartition(content)[2]
    if ends.rstrip() != begins.rstrip():
        return None
    return begins[len(ends) :] if begins.startswith(ends) else ""


def _behind(head: str, text: str) -> str | None:
    for beginning in (head, head.rstrip()):
        if text.startswith(beginning):
            return text[len(beginning) :]
    return None


def common_length(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _parting(one: str, other: str) -> str:
    """Where two texts part, in words."""
    at = common_length(one, other)
    return f"at character {at}: {one[at : at + 20]!r} there, {other[at : at + 20]!r} here"
