"""The chat template of a model, or of a job."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from moe.data.conversations.conversation import Conversation, RenderedText, Rendering, UnreadableRecord
from moe.data.limited_process import LimitedProcessError, run_limited
from moe.data.special_tokens import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, contents_by_role, json_object
from moe.spec import SpecError, spec_error

_TOOL_USE = "additional_chat_templates.tool_use.jinja"
CHAT_TEMPLATE = "chat_template.jinja"
TRAINING_TEMPLATE, ARGUMENTS = "chat_template.training.jinja", "chat_template.arguments.json"
"""Files that a job adds to those of its model's folder: its own template, and template arguments."""
TEMPLATE_FILES = (
    TRAINING_TEMPLATE, CHAT_TEMPLATE, "chat_template.json", TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, _TOOL_USE, ARGUMENTS,
)  # fmt: skip
"""Files that determine how conversations are rendered: of the first four, the first that has a template."""
PLACE = "model.from"
TIMEOUT_S, MEMORY_BYTES = 120.0, 1 << 30
"""Limits of a process that renders conversations."""
SECONDS_EACH = 20.0
"""CPU time for one conversation."""
_DEFAULT, _TOOLS = "default", "tool_use"
_BATCH = 1000
"""Prompts rendered by one process."""
_SHORTER = "split it into several conversations, or correct the template"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, with its variables."""

    sources: Mapping[str, str]
    """By name: `default`, and possibly `tool_use` for conversations with tools."""
    variables: Mapping[str, Any]
    """Special tokens such as `bos_token`, and arguments of the template."""
    date: str | None = None
    """Today's date, in ISO format."""
    ends: tuple[str, ...] = ()
    """Texts of the tokens that stop generation."""
    place: str = PLACE
    """Path in the spec, for errors."""

    @classmethod
    def of_files(
        cls, files: Mapping[str, bytes], date: str | None = None, ends: tuple[str, ...] = ()
    ) -> "ChatTemplate":
        """Template in a folder's files, or the one that a job adds. Raises SpecError if there is none."""
        config = json_object(files, TOKENIZER_CONFIG)
        sources: dict[str, str] = {}
        place = PLACE
        if TRAINING_TEMPLATE in files:
            sources, place = ({_DEFAULT: files[TRAINING_TEMPLATE].decode("utf-8", "replace")}, "data.chat_template")
        elif CHAT_TEMPLATE in files:
            sources = {_DEFAULT: files[CHAT_TEMPLATE].decode("utf-8", "replace")}
            if (tools := files.get(_TOOL_USE)) is not None:
                sources[_TOOLS] = tools.decode("utf-8", "replace")
        else:
            for raw_templates in (
                json_object(files, "chat_template.json").get("chat_template"),
                config.get("chat_template"),
            ):
                sources = sources or _sources(raw_templates)
        if not sources:
            rule = "has no chat template"
            raise spec_error("missing", PLACE, None, rule, "name one by data.chat_template, or use corpus documents")
        tokens = contents_by_role({**json_object(files, SPECIAL_TOKENS_MAP), **config})
        variables = {role: content for role, content in tokens.items() if content}
        return cls(sources, {**variables, **json_object(files, ARGUMENTS)}, date, ends, place)

    def render_rows(self, conversations: Sequence[Conversation]) -> Iterator[Rendering | UnreadableRecord]:
        """Rows of each conversation, in order, up to the first failure, which is yielded as UnreadableRecord. Rendered
        in a limited process. Raises SpecError for an invalid template."""
        for name, chunk in groupby(conversations, self._name):
            for outcome in self._answers(name, list(chunk)):
                yield outcome
                if isinstance(outcome, UnreadableRecord):
                    return

    def render_prompt(self, text: str) -> str:
        """A user's message with the generation prompt. Raises SpecError if the template fails."""
        (prompt,) = self.render_prompts([Conversation(({"role": "user", "content": text},))])
        return prompt

    def render_prompts(self, conversations: Sequence[Conversation]) -> list[str]:
        """Conversations with the generation prompt. Raises SpecError if the template fails."""
        prompts = list[str]()
        for first in range(0, len(conversations), _BATCH):
            for outcome in self._answers(_DEFAULT, conversations[first : first + _BATCH], asks=True):
                if isinstance(outcome, UnreadableRecord):
                    rule = f"is invalid: the model's chat template {outcome.rule}"
                    raise spec_error("unsupported", "chat", None, rule, "correct the template, or omit chat")
                prompts.append(outcome.rows[0].text)
        return prompts

    def _name(self, conversation: Conversation) -> str:
        return _TOOLS if conversation.tools is not None and _TOOLS in self.sources else _DEFAULT

    def _answers(
        self, name: str, conversations: Sequence[Conversation], *, asks: bool = False, deadline: float | None = None
    ) -> Iterator[Rendering | UnreadableRecord]:
        """Renderings by a limited process. If it dies, each half is retried by another process until `deadline`, to
        find the conversation that causes it."""
        from moe.data.conversations.rendering import to_json

        request = {
            "template": self.sources[name], "variables": self.variables, "date": self.date,
            "conversations": to_json(conversations), "seconds_each": SECONDS_EACH,
            "asks": asks, "ends": self.ends,
        }  # fmt: skip
        began = time.monotonic()
        deadline = deadline or began + 2 * TIMEOUT_S
        try:
            answer = run_limited("moe.data.conversations.rendering", json.dumps(request, default=str).encode(),
                               timeout_s=min(TIMEOUT_S, deadline - began), memory_bytes=MEMORY_BYTES)  # fmt: skip
        except (LimitedProcessError, RecursionError) as error:
            if len(conversations) == 1 or time.monotonic() >= deadline - 1:
                subject = "this conversation" + f" or one of the {len(conversations) - 1} after it" * (
                    len(conversations) > 1
                )
                yield UnreadableRecord(f"{error}, rendering {subject}", _SHORTER)
                return
            middle = len(conversations) // 2
            for half in (conversations[:middle], conversations[middle:]):
                for outcome in self._answers(name, half, asks=asks, deadline=deadline):
                    yield outcome
                    if isinstance(outcome, UnreadableRecord):
                        return
            return
        for fields in json.loads(answer):
            if fields.get("is_template"):
                path = PLACE + "/chat_template" if self.place == PLACE else self.place
                raise spec_error("invalid_syntax", path, None, fields["rule"], fields["remedy"])
            if "rule" in fields:
                yield UnreadableRecord(fields["rule"], fields["remedy"])
            elif "rows" in fields:
                yield Rendering(tuple(map(_row, fields["rows"])), tuple(fields["notes"]))


def has_template(files: Mapping[str, bytes]) -> bool:
    """Whether a folder's files have a chat template."""
    with suppress(SpecError):
        ChatTemplate.of_files(files)
        return True
    return False


def _row(fields: Mapping[str, Any]) -> RenderedText:
    role_spans = fields["role_spans"]
    return RenderedText(
        fields["text"],
        tuple((begin, end) for begin, end in fields["spans"]),
        fields["by_marks"],
        None if role_spans is None else tuple((begin, end, role) for begin, end, role in role_spans),
    )


def _sources(value: Any) -> dict[str, str]:
    """Templates in a tokenizer's config: one, or several by name."""
    if isinstance(value, str):
        return {_DEFAULT: value}
    sources = {}
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
            sources[str(entry.get("name"))] = entry["template"]
    return sources if _DEFAULT in sources else {}
