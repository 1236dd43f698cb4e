"""Answers of a conversation, each after the generation prompt that the model sees when it generates that answer.

Most templates render an answer right after their generation prompt. If the prompt opens a thought (`<think>`), or has
more text than the template renders before an answer, the answer is rewritten to continue the prompt.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe.data.conversations.conversation import ASSISTANT, Conversation, Message, UnreadableRecord
from moe.data.conversations.jinja_template import JinjaTemplate
from moe.data.conversations.thoughts import split_thoughts, without_thoughts

_OPENED = re.compile(r"<((?:\w+:)?(?:think|thought|reason)\w*)>(\s*)$")
"""Open thought at the end of a prompt."""
_EMPTY = re.compile(r"\s*<((?:\w+:)?(?:think|thought|reason)\w*)>(\s*)</\1>")
"""Empty thought at the beginning of an answer."""
_PROBE: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class AnswerSpan:
    """An answer with all of the text before it."""

    message_index: int
    """Index of its message."""
    text: str
    """Text up to the end of the answer."""
    begin: int
    """Offset of the answer in `text`, in characters."""


class TranscriptRenderer:
    """Rendered texts of one conversation; each prefix is rendered once."""

    def __init__(self, template: JinjaTemplate, conversation: Conversation) -> None:
        self.conversation, self.messages = conversation, conversation.messages
        self._template = template
        self._first = dict[tuple[int, bool], str]()

    @property
    def eos_token(self) -> str:
        """The variable of this name in the template; empty if there is none."""
        return self._template.eos_token

    def first(self, number: int, *, asks: bool = False) -> str:
        """Text of the first `number` messages; with `asks`, and the generation prompt. Raises UnreadableRecord."""
        if (number, asks) not in self._first:
            self._first[number, asks] = self.render(self.messages[:number], asks=asks)
        return self._first[number, asks]

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """Text of any messages, with the tools and arguments of this conversation. Raises UnreadableRecord."""
        tools, arguments = self.conversation.tools, self.conversation.arguments
        return self._template.render(messages, tools, arguments, asks=asks).text

    def answer(self, index: int) -> AnswerSpan:
        """The answer in message `index`. Raises UnreadableRecord if the template cannot render a prompt for it, or if
        the answer cannot be separated from its prompt."""
        transcript = self.first(index + 1)
        if index == 0:
            return AnswerSpan(index, transcript, self._begin_of_opening(transcript))
        prompt = self.first(index, asks=True)
        if transcript.startswith(prompt):
            answer = _with_own_thoughts(self.messages[index], prompt, transcript[len(prompt) :])
            return AnswerSpan(index, prompt + answer, len(prompt))
        text = self._continue_prompt(index, prompt)
        if text is None:
            rule = (
                f"renders different text before an answer than its generation prompt (messages[{index}], "
                f"{_describe_divergence(prompt, transcript)}), so the assistant's text cannot be located"
            )
            raise UnreadableRecord(
                rule, ("mark the answers with {% generation %} in a template, and name it by data.chat_template")
            )
        return AnswerSpan(index, text, len(prompt))

    def follows(self, index: int) -> list[str]:
        """Texts that the template may render after the answer in message `index`: for the message that follows, and for
        a made-up one of the next speaker."""
        message = self.messages[index]
        next_message: Message = dict(_PROBE)
        if calls := message.get("tool_calls"):
            name = calls[0]["function"]["name"]
            next_message = {"role": "tool", "content": "x", "name": name, "tool_call_id": calls[0].get("id", "")}
        continuations = []
        for follower in (*self.messages[index + 1 : index + 2], next_message):
            earlier_messages = self.messages[:index]
            silent = [without_thoughts(earlier) for earlier in (*earlier_messages, message)]
            for messages in ([*earlier_messages, message], [*earlier_messages, silent[-1]], silent):
                try:
                    text, longer_text = self.render(messages), self.render([*messages, follower])
                except UnreadableRecord:
                    continue
                if longer_text.startswith(text):
                    continuations.append(longer_text[len(text) :])
                    break
        return continuations

    def drops(self, index: int) -> bool:
        """Whether the template drops the answer in message `index`, regardless of its text."""
        return self._head(index) is None

    def _continue_prompt(self, index: int, prompt: str) -> str | None:
        """`prompt` followed by the answer; None if the answer cannot be found. Thoughts are dropped unless
        the prompt opens one."""
        message, asking, head = self.messages[index], self._asking(), self._head(index)
        opening = _OPENED.search(prompt)
        if opening is None and head is not None and asking and prompt.endswith(asking) and asking in head:
            # The template renders the messages before it differently once the answer is there.
            place, transcript = head.rindex(asking), self.first(index + 1)
            before, question = head[: place + len(asking)], self.messages[index - 1]["content"].strip()
            is_own = not question or head.rfind(question) < place
            if is_own and transcript.startswith(before):
                return prompt + transcript[len(before) :]
        plain = self.render([*self.messages[:index], without_thoughts(message)])
        if opening is None and plain.startswith(prompt):
            return plain
        answer = None if head is None else _text_after(head, plain)
        if head is None or answer is None:
            return None
        if opening is None:
            if prompt.startswith(head) or prompt.rstrip() == head.rstrip():
                return prompt + answer
            text_between = _space_after(self.messages[index - 1]["content"].strip(), prompt, head)
            return None if text_between is None else prompt + text_between + answer
        prompt_before, close, space = prompt[: opening.start()], f"</{opening[1]}>", opening[2]
        if not head.startswith(prompt_before):
            return None
        text_between, closes, gap = head[len(prompt_before) :].partition(close)
        if text_between.strip() and not closes:
            return None
        thoughts, _ = split_thoughts(message)
        thoughts = thoughts.strip("\n") if space else thoughts
        return prompt + thoughts + space + close + (gap if closes else 2 * space) + answer

    def _head(self, index: int) -> str | None:
        """Text that the template renders before the content of message `index`; None if it drops the content."""
        marker = f"said-{secrets.token_hex(8)}"
        text = self.render([*self.messages[:index], {"role": ASSISTANT, "content": marker}])
        head, has_marker, _ = text.partition(marker)
        return head if has_marker else None

    def _begin_of_opening(self, text: str) -> int:
        """Offset of an answer that opens the conversation. No prompt can be rendered for it, since templates look at
        the first message."""
        message = self.messages[0]
        if asks := self._asking():
            place = text.find(asks)
            if place >= 0:
                return place + len(asks)
        else:  # the text of a repeated message is what one message adds
            repeated_text = self._render_or_empty([message, message])
            length = len(repeated_text) - len(text)
            if length > 0 and repeated_text == text + text[len(text) - length :]:
                return len(text) - length
        content = message["content"]
        variant: dict[str, Any] = {
            **without_thoughts(message),
            "content": ("b" if content[:1] == "a" else "a") + content,
        }
        return common_length(text, self._render_or_empty([variant]))

    def _asking(self) -> str:
        """Generation prompt after a user message; empty if there is none."""
        plain, prompt = self._render_or_empty([_PROBE]), self._render_or_empty([_PROBE], asks=True)
        return prompt[len(plain) :] if plain and prompt.startswith(plain) else ""

    def _render_or_empty(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        try:
            return self.render(messages, asks=asks)
        except UnreadableRecord:
            return ""


def _with_own_thoughts(message: Message, prompt: str, answer: str) -> str:
    """`answer`, which follows `prompt`, with its message's thoughts in place of an empty thought at its
    beginning. Kimi K2's template drops the thoughts of an answer without tool calls, although its prompt leaves
    thinking on; DeepSeek-V3.1's immediately closes the thought that its prompt opens."""
    thoughts = split_thoughts(message)[0].strip("\n")
    if not thoughts.strip():
        return answer
    if opening := _OPENED.search(prompt):
        before, closes, after = answer.partition(f"</{opening[1]}>")
        return thoughts + (before or opening[2]) + closes + after if closes and not before.strip() else answer
    empty = _EMPTY.match(answer)
    if empty is None or f"<{empty[1]}>" in answer[empty.end() :]:
        return answer
    half = empty[2][: len(empty[2]) // 2]
    return answer[: empty.start(2)] + half + thoughts + half + answer[empty.end(2) :]


def _space_after(content: str, prompt: str, head: str) -> str | None:
    """White space by which `head`, the text before an answer, exceeds `prompt` after the message `content`;
    None if they differ in more than that. The text before that message may differ: Mistral's templates render the
    system prompt only in a generation prompt."""
    if not content or content not in prompt or content not in head:
        return None
    ends, begins = prompt.rpartition(content)[2], head.rpartition(content)[2]
    if ends.rstrip() != begins.rstrip():
        return None
    return begins[len(ends) :] if begins.startswith(ends) else ""


def _text_after(head: str, text: str) -> str | None:
    for beginning in (head, head.rstrip()):
        if text.startswith(beginning):
            return text[len(beginning) :]
    return None


def common_length(first: str, second: str) -> int:
    """Length of the common prefix, in characters."""
    return next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _describe_divergence(prompt: str, transcript: str) -> str:
    """Description of where two texts diverge."""
    index = common_length(prompt, transcript)
    return f"at character {index}: {transcript[index : index + 20]!r} instead of {prompt[index : index + 20]!r}"
