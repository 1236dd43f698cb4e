"""A chat template compiled in jinja's sandbox, with the names that transformers defines: special tokens such as
`bos_token`, `messages`, `tools`, `documents`, `add_generation_prompt`, `raise_exception`, `strftime_now`, `tojson` and
loop controls."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moe.data.conversations.conversation import Message, RenderedText, UnreadableRecord
from moe.data.conversations.generation_marks import GenerationMarks

MAX_CHARS = 1 << 24
"""Bound on the text of one conversation."""
SHORTER = "split it into several conversations, or correct the template"


class _TemplateRefusal(Exception):
    """A template's own refusal."""


class JinjaTemplate:
    """A template, with its variables other than the messages."""

    def __init__(self, source: str, variables: Mapping[str, Any], date: str | None) -> None:
        """Raises UnreadableRecord for an invalid source."""
        self._variables, self._date = dict(variables), date
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMarks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = self._strftime
        self._needs_parts: bool | None = None
        self._marks: GenerationMarks = environment.extensions[GenerationMarks.identifier]  # type: ignore[assignment]
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            position = f", at line {line}" if line else ""
            raise UnreadableRecord(f"is not a valid template: {_error_text(error)}{position}", "correct it") from None

    @property
    def has_marks(self) -> bool:
        """Whether the template marks the assistant's text by `{% generation %}`."""
        return self._marks.is_used

    @property
    def eos_token(self) -> str:
        """The variable of this name; empty if there is none."""
        return str(self._variables.get("eos_token") or "")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        asks: bool = False,
    ) -> RenderedText:
        """Rendered messages, with the marked spans. `asks`: append the generation prompt. Raises UnreadableRecord."""
        if self._needs_parts is None:
            self._needs_parts = self._renders_only_parts()
        context = {
            "documents": None,
            **self._variables,
            **(arguments or {}),
            "messages": [_in_parts(message) for message in messages] if self._needs_parts else list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": asks,
        }
        try:
            text = self._template.render(context)
        except _TemplateRefusal as error:
            raise UnreadableRecord(f"refuses it: {error}", "correct the record, or omit it") from None
        except UnreadableRecord:
            raise
        except MemoryError:
            raise UnreadableRecord("exceeds a template's memory limit", "correct it") from None
        except Exception as error:  # an expression may raise anything
            raise UnreadableRecord(f"fails: {_error_text(error)}", "correct the template, or the record") from None
        if len(text) > MAX_CHARS:
            raise UnreadableRecord(f"renders more than {MAX_CHARS} characters", SHORTER)
        return self._marks.strip_marks(text) if self.has_marks else RenderedText(text, ())

    def _renders_only_parts(self) -> bool:
        """Whether the template renders a message's content only if it is a list of parts, as templates of some vision
        models do; determined by a probe message."""
        self._needs_parts = False
        probe = {"role": "user", "content": "probe"}
        try:
            is_dropped = probe["content"] not in self.render([probe]).text
            return is_dropped and probe["content"] in self.render([_in_parts(probe)]).text
        except UnreadableRecord:
            return False

    def _strftime(self, form: str) -> str:
        if self._date is None:
            raise UnreadableRecord("uses the date, but data.date is not set", "set data.date")
        return datetime.datetime.fromisoformat(self._date).strftime(form)


def _in_parts(message: Message) -> Message:
    """The message with its content as a list of one text part."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _to_json(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False,
             ensure_ascii: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> NoReturn:
    raise _TemplateRefusal(str(message)[:200])


def _error_text(error: BaseException) -> str:
    message = str(error).strip() or type(error).__name__
    return message[:200]
