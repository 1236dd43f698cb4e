"""Rows of a conversation, and their learned spans.

A span is the text that an answer adds, or what the template marks. If a template renders earlier answers differently
once more messages follow (it drops thoughts, or changes the closing token), each answer gets its own row, with the text
before it as the model sees it when it generates that answer.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from moe.data.conversations.answers import AnswerSpan, TranscriptRenderer, common_length
from moe.data.conversations.conversation import (
    ASSISTANT,
    Conversation,
    Message,
    RenderedText,
    Rendering,
    UnreadableRecord,
)
from moe.data.conversations.jinja_template import JinjaTemplate
from moe.data.conversations.roles import RoleSpan, role_spans
from moe.data.conversations.thoughts import split_thoughts, with_thoughts
from moe.data.conversations.tool_calls import CallForms


class RowWriter:
    """Renders conversations by a template, each answer with the token that ends it."""

    def __init__(self, template: JinjaTemplate, ends: Sequence[str] = ()) -> None:
        """`ends`: texts of the tokens that stop generation."""
        self._template = template
        alternatives = "|".join(re.escape(end) for end in sorted(ends, key=len, reverse=True) if end)
        self._end = re.compile(rf"\s*(?:{alternatives})") if alternatives else None
        self._ends = tuple(end for end in ends if end)
        self._forms: CallForms | None = None
        self._renders_end: bool | None = None

    def rendering(self, conversation: Conversation) -> Rendering:
        """Rows of a conversation. Raises UnreadableRecord."""
        template_conversation = self._normalize(conversation)
        texts = TranscriptRenderer(self._template, template_conversation)
        notes = ["calls"] if len(template_conversation.messages) > len(conversation.messages) else []
        if self._template.has_marks:
            answers = _marked_answers(texts)
            marked_rows = self._separate_marked_rows(texts, answers) or (self._by_marks(texts, answers),)
            for answer in answers:
                notes += _missing_text_notes(texts.messages[answer.message_index], answer, answer.message_index, texts)
            return Rendering(marked_rows, tuple(notes))
        rows, growth_notes = self._by_growth(texts)
        return Rendering(rows, (*notes, *growth_notes))

    def render_prompt(self, conversation: Conversation) -> RenderedText:
        """The text of a conversation with the generation prompt. Raises UnreadableRecord."""
        texts = TranscriptRenderer(self._template, self._normalize(conversation))
        return RenderedText(texts.first(len(texts.messages), asks=True), ())

    def _normalize(self, conversation: Conversation) -> Conversation:
        """The conversation with thoughts and calls in the form that the template reads."""
        messages = tuple(with_thoughts(message) for message in conversation.messages)
        conversation = replace(conversation, messages=messages)
        if not any(message.get("tool_calls") for message in messages):
            return conversation
        if self._forms is None:
            self._forms = CallForms.from_template(lambda messages: self._template.render(messages).text)
        return self._forms.apply(conversation)

    def _by_growth(self, texts: TranscriptRenderer) -> tuple[tuple[RenderedText, ...], list[str]]:
        transcript, notes = texts.first(len(texts.messages)), list[str]()
        rows: list[list[AnswerSpan]] = []
        refusal: UnreadableRecord | None = None
        for index, message in enumerate(texts.messages):
            if not texts.conversation.learns(index, message):
                continue
            try:
                answer = texts.answer(index)
            except UnreadableRecord as error:
                if not _is_opening(texts.messages[:index]):
                    raise
                refusal = refusal or error
                notes.append("openings")
                continue
            if answer.begin == len(answer.text):
                continue
            notes += _missing_text_notes(message, answer, index, texts)
            _add(rows, answer)
        if not rows:
            raise refusal or UnreadableRecord("renders nothing for a conversation's answers", "correct the template")
        texts_of_rows = [row[-1].text for row in rows]
        if transcript.startswith(texts_of_rows[-1]):
            texts_of_rows[-1] = transcript
        return tuple(self._row(texts, row, text) for row, text in zip(rows, texts_of_rows, strict=True)), notes

    def _row(self, texts: TranscriptRenderer, answers: Sequence[AnswerSpan], text: str) -> RenderedText:
        spans = []
        for answer in answers:
            begin, end = answer.begin, len(answer.text)
            text, end = self._with_end(texts, answer.message_index, text, begin, end)
            spans.append((begin, end))
        return RenderedText(text, tuple(spans), role_spans=_role_spans(texts, text, answers[-1].message_index))

    def _with_end(
        self, texts: TranscriptRenderer, answer_index: int | None, text: str, begin: int, end: int
    ) -> tuple[str, int]:
        """The text, and the end of its span from `begin`, extended over the token that stops generation. If the text
        ends with the span, that token is taken from what the template renders after the answer, and appended."""
        if self._end is None or text[begin:end].rstrip().endswith(self._ends):
            return text, end
        if match := self._end.match(text, end):
            return text, match.end()
        if end < len(text) or answer_index is None or not self._ends_behind():
            return text, end
        for following in texts.follows(answer_index):
            if match := self._end.match(following):
                return text + match[0], end + match.end()
        return text, end

    def _ends_behind(self) -> bool:
        """Whether the template renders a token that stops generation after an answer, found by a probe conversation."""
        if self._renders_end is None:
            assert self._end is not None
            question, answer = {"role": "user", "content": "x"}, {"role": ASSISTANT, "content": "y"}
            texts = TranscriptRenderer(self._template, Conversation((question, answer)))
            try:
                self._renders_end = any(self._end.match(following) for following in texts.follows(1))
            except UnreadableRecord:
                self._renders_end = True
        return self._renders_end

    def _separate_marked_rows(
        self, texts: TranscriptRenderer, answers: Sequence[AnswerSpan]
    ) -> tuple[RenderedText, ...]:
        """Rows of marked answers, if the template renders an earlier one differently once more messages follow; empty
        if one row holds all of them."""
        conversation, transcript = texts.conversation, texts.first(len(texts.messages))
        rows: list[list[AnswerSpan]] = []
        for answer in answers:
            _add(rows, answer)
        if not rows:
            return ()
        if len(rows) == 1 and transcript.startswith(rows[0][-1].text):
            return ()
        written_rows = []
        for row in rows:
            text, spans = row[-1].text, []
            for answer in row:
                marked_text = self._render_marked(conversation, answer.message_index + 1)
                answer_spans = [span for span in marked_text.spans if span[0] < span[1] and span[1] > answer.begin]
                for begin, end in answer_spans:
                    text, end = self._with_end(texts, answer.message_index, text, begin, end)
                    spans.append((begin, end))
            if spans:
                row_roles = _role_spans(texts, text, row[-1].message_index)
                written_rows.append(RenderedText(text, tuple(spans), by_marks=True, role_spans=row_roles))
        return tuple(written_rows)

    def _by_marks(self, texts: TranscriptRenderer, marked_answers: Sequence[AnswerSpan]) -> RenderedText:
        conversation = texts.conversation
        marked_text = self._render_marked(conversation, len(conversation.messages))
        answers = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        learn_flags = [conversation.learns(index, conversation.messages[index]) for index in answers]
        spans = marked_text.spans
        if len(spans) == len(answers):
            spans = tuple(span for span, is_learned in zip(spans, learn_flags, strict=True) if is_learned)
        elif not all(learn_flags) and marked_answers:
            spans = tuple(span for span in spans if any(_overlaps(span, answer) for answer in marked_answers))
        elif not all(learn_flags):
            spans = self._behind_given(conversation, marked_text, learn_flags, answers)
        spans = tuple((begin, end) for begin, end in spans if begin < end)
        if not spans:
            raise UnreadableRecord(
                "marks nothing in a conversation with answers", "wrap the answers in {% generation %} marks"
            )
        text, closed_spans, last = marked_text.text, [], len(conversation.messages) - 1
        for begin, end in spans:
            text, end = self._with_end(texts, last if last in answers else None, text, begin, end)
            closed_spans.append((begin, end))
        return RenderedText(text, tuple(closed_spans), by_marks=True, role_spans=_role_spans(texts, text, last))

    def _behind_given(
        self, conversation: Conversation, marked_text: RenderedText, learn_flags: Sequence[bool], answers: Sequence[int]
    ) -> tuple[tuple[int, int], ...]:
        """Marked spans after the first `num_given` messages, of a template that does not mark each answer once."""
        num_given = conversation.num_given
        prefix = self._render_marked(conversation, num_given).text if num_given else ""
        is_after = all(learn_flags[place] for place, index in enumerate(answers) if index >= num_given)
        if not num_given or not is_after or not marked_text.text.startswith(prefix):
            rule = f"marks {len(marked_text.spans)} spans for {len(answers)} answers, some of which must not be learned"
            raise UnreadableRecord(rule, "mark each answer once")
        return tuple((begin, end) for begin, end in marked_text.spans if begin >= len(prefix))

    def _render_marked(self, conversation: Conversation, number: int) -> RenderedText:
        return self._template.render(conversation.messages[:number], conversation.tools, conversation.arguments)


def _marked_answers(texts: TranscriptRenderer) -> list[AnswerSpan]:
    """Learned answers for a template with generation marks; empty if the template cannot render some prefix of the
    conversation."""
    answers = list[AnswerSpan]()
    for index, message in enumerate(texts.messages):
        if not texts.conversation.learns(index, message):
            continue
        try:
            text, before = texts.first(index + 1), texts.first(index, asks=True) if index else ""
        except UnreadableRecord:
            return []
        answers.append(AnswerSpan(index, text, common_length(before, text)))
    return answers


def _role_spans(texts: TranscriptRenderer, text: str, last_index: int) -> tuple[RoleSpan, ...] | None:
    """Role spans of a row that ends with message `last_index`, or with all messages; None if they are not wanted."""
    if not texts.conversation.has_role_spans:
        return None
    num_messages = len(texts.messages)
    return role_spans(texts, text, num_messages if text.startswith(texts.first(num_messages)) else last_index + 1)


def _overlaps(span: tuple[int, int], answer: AnswerSpan) -> bool:
    """Whether a span overlaps the text of an answer."""
    return span[0] < len(answer.text) and answer.begin < span[1]


def _add(rows: list[list[AnswerSpan]], answer: AnswerSpan) -> None:
    """Append an answer to the last row if that is a prefix of its text, else to a new row."""
    before = rows[-1][-1].text if rows else None
    if before is not None and answer.begin >= len(before) and answer.text.startswith(before):
        rows[-1].append(answer)
    else:
        rows.append([answer])


def _is_opening(before: Sequence[Message]) -> bool:
    """Whether no message so far could be answered."""
    return all(message["role"] in ("system", "developer", "assistant") for message in before)


def _missing_text_notes(message: Message, answer: AnswerSpan, index: int, texts: TranscriptRenderer) -> list[str]:
    """Notes on what the template drops from an answer. Raises UnreadableRecord if that is a tool call or all of the
    text."""
    answer_text, notes = answer.text[answer.begin :], list[str]()
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    for name in names:
        if answer_text.count(name) < names.count(name):
            rule = f"drops a call of the tool {name!r:.60} from an answer (messages[{index}])"
            raise UnreadableRecord(
                rule, "remove the record, or name a template that renders tool calls by data.chat_template"
            )
    thoughts, content = split_thoughts(message)
    if thoughts.strip() and thoughts.strip() not in answer_text:
        notes.append("thoughts")
    if content.strip() and content.strip() not in answer_text:
        if not names and texts.drops(index):
            raise UnreadableRecord(
                f"drops the text of an answer (messages[{index}])", "name another one by data.chat_template"
            )
        notes.append("contents")
    return notes
