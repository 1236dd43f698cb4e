"""Conversations written by a chat template, in a process with little memory and time: an expression of a template can
take all there is of both. `python -m moe.data.conversations.rendering` is that process.

The template is jinja's, in its sandbox, with what transformers gives one: `bos_token` and its kin, `messages`, `tools`,
`add_generation_prompt`, `raise_exception`, `strftime_now`, `tojson` and loop controls.
"""

import datetime
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moe.data.conversations.conversation import Conversation, Unreadable, Written
from moe.data.conversations.marks import GenerationMarks
from moe.data.limited import take_limits

MAX_CHARS = 1 << 24
"""Bound on the text of one conversation."""
_SHORTER = "cut it into several conversations, or correct the template"


class _Refused(Exception):
    """A template's own refusal."""


class _TooLong(BaseException):
    """The time of a conversation is up. No template's own `except`, nor jinja's, takes it."""


class Renderer:
    """A template, and what it is told beside the messages."""

    def __init__(self, source: str, variables: Mapping[str, str], date: str | None) -> None:
        """Raises Unreadable for a source that is no template."""
        self._variables, self._date = dict(variables), date
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMarks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = self._strftime
        self._marks: GenerationMarks = environment.extensions[GenerationMarks.identifier]  # type: ignore[assignment]
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            where = f", at line {line}" if line else ""
            raise Unreadable(f"is no template: {_told(error)}{where}", "correct it") from None

    @property
    def has_marks(self) -> bool:
        """Whether the template says itself what the assistant generates."""
        return self._marks.is_used

    def written(self, conversation: Conversation) -> Written:
        """The text of a conversation, and what of it is learned: by the template's marks where it has them, else what
        the text grows by with each answer. Raises Unreadable."""
        return self._by_marks(conversation) if self.has_marks else self._by_growth(conversation)

    def asked(self, conversation: Conversation) -> Written:
        """The text of a conversation that an answer is to follow. Raises Unreadable."""
        text = self._rendered(conversation, len(conversation.messages), asks=True)
        return Written(self._marks.found(text).text, ())

    def _by_marks(self, conversation: Conversation) -> Written:
        marked = self._marks.found(self._rendered(conversation, len(conversation.messages)))
        answers = [at for at, each in enumerate(conversation.messages) if each["role"] == "assistant"]
        learned = [conversation.learns(at, conversation.messages[at]) for at in answers]
        spans = marked.spans
        if len(spans) == len(answers):
            spans = tuple(span for span, is_learned in zip(spans, learned, strict=True) if is_learned)
        elif not all(learned):
            spans = self._behind_given(conversation, marked, learned, answers)
        spans = tuple((begin, end) for begin, end in spans if begin < end)
        if not spans:
            raise Unreadable(
                "marks nothing of a conversation with answers", "put them between generation marks"
            )
        return Written(marked.text, spans, by_marks=True)

    def _behind_given(
        self, conversation: Conversation, marked: Written, learned: Sequence[bool], answers: Sequence[int]
    ) -> tuple[tuple[int, int], ...]:
        """Stretches behind the given messages, of a template that does not mark each answer once."""
        given = self._marks.found(self._rendered(conversation, conversation.num_given)).text
        is_after = all(learned[place] for place, at in enumerate(answers) if at >= conversation.num_given)
        if not conversation.num_given or not is_after or not marked.text.startswith(given):
            rule = f"marks {len(marked.spans)} stretches of {len(answers)} answers, of which some are not to be learned"
            raise Unreadable(rule, "mark each answer once")
        return tuple((begin, end) for begin, end in marked.spans if begin >= len(given))

    def _by_growth(self, conversation: Conversation) -> Written:
        messages = conversation.messages
        whole, spans, before = self._rendered(conversation, len(messages)), [], ""
        for at, message in enumerate(messages):
            if not conversation.learns(at, message):
                continue
            asked = self._rendered(conversation, at, asks=True)
            answered = whole if at + 1 == len(messages) else self._rendered(conversation, at + 1)
            for shorter, longer, what in (
                (before, asked, "the messages up to an earlier answer"),
                (asked, answered, "the messages before it, with what asks for an answer"),
                (answered, whole, "the messages up to it"),
            ):
                if not longer.startswith(shorter):
                    rule = (
                        f"writes {what} otherwise where more follow (messages[{at}], {_parting(shorter, longer)}), so "
                        "that what the assistant says cannot be told by what the text grows by"
                    )
                    raise Unreadable(rule, "put generation marks around it in the template")
            if len(answered) > len(asked):
                spans.append((len(asked), len(answered)))
            before = answered
        if not spans:
            raise Unreadable("writes nothing for the answers of a conversation", "correct the template")
        return Written(whole, tuple(spans))

    def _rendered(self, conversation: Conversation, num_messages: int, *, asks: bool = False) -> str:
        try:
            text = self._template.render(
                **self._variables,
                messages=list(conversation.messages[:num_messages]),
                tools=None if conversation.tools is None else list(conversation.tools),
                documents=None,
                add_generation_prompt=asks,
            )
        except _Refused as error:
            raise Unreadable(f"refuses it: {error}", "correct the record, or leave it out") from None
        except Unreadable:
            raise
        except MemoryError:
            raise Unreadable("takes more memory than a template may", "correct it") from None
        except Exception as error:  # whatever an expression of it does
            raise Unreadable(f"fails: {_told(error)}", "correct the template, or the record") from None
        if len(text) > MAX_CHARS:
            raise Unreadable(f"writes more than {MAX_CHARS} characters", _SHORTER)
        return text

    def _strftime(self, form: str) -> str:
        if self._date is None:
            raise Unreadable("asks for the date, and data.date has none", "write data.date")
        return datetime.datetime.fromisoformat(self._date).strftime(form)


def _to_json(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False,
             ensure_ascii: bool = False) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: object) -> NoReturn:
    raise _Refused(str(message)[:200])


def _parting(shorter: str, longer: str) -> str:
    """Where two texts part, in words."""
    at = next((at for at, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    return f"at character {at}: {shorter[at : at + 20]!r} there, {longer[at : at + 20]!r} here"


def _told(error: BaseException) -> str:
    said = str(error).strip() or type(error).__name__
    return said[:200]


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise _TooLong


def _answers(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        renderer = Renderer(given["template"], given["variables"], given["date"])
    except Unreadable as error:
        return [{"rule": error.rule, "remedy": error.remedy, "is_template": True}]
    found: list[dict[str, Any]] = []
    for each in given["conversations"]:
        tools = None if each["tools"] is None else tuple(each["tools"])
        signal.setitimer(signal.ITIMER_VIRTUAL, given["seconds_each"])
        try:
            write = renderer.asked if given["asks"] else renderer.written
            written = write(Conversation(tuple(each["messages"]), tools, each["num_given"]))
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            found.append({"text": written.text, "spans": written.spans, "by_marks": written.by_marks})
        except Unreadable as error:
            found.append({"rule": error.rule, "remedy": error.remedy})
            break
        except _TooLong:
            found.append(
                {"rule": f"takes longer than {given['seconds_each']:g} s for it", "remedy": _SHORTER}
            )
            break
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return found


def described(conversations: Sequence[Conversation]) -> list[dict[str, Any]]:
    """Conversations as the process is given them."""
    return [
        {"messages": each.messages, "tools": each.tools, "num_given": each.num_given}
        for each in conversations
    ]


def _main() -> None:
    take_limits()
    signal.signal(signal.SIGVTALRM, _interrupt)
    sys.stdout.write(json.dumps(_answers(json.loads(sys.stdin.buffer.read()))))


if __name__ == "__main__":
    _main()
