"""Corpora of conversations: supervised chat tuning, preference pairs (DPO) and labelled answers (KTO)."""

import datetime
import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue

from moe.spec.bad_records import BadRecordsFields
from moe.spec.base import NonNegative, Place, Text
from moe.spec.data_files import FilesFields
from moe.spec.errors import RuleError
from moe.spec.sequences import SequencesFields


def _day(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise RuleError("invalid_value", "must be a date", "write it as 2026-11-26") from None


_MAX_ARGUMENTS_CHARS = 10_000
Day = Annotated[str, AfterValidator(_day)]


RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Template variables that conversations fill in."""
Argument = Annotated[Text, Field(max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _own_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    for name in arguments:
        if name in RESERVED:
            raise RuleError("not_allowed", f"must not set {name!r}, which comes from the conversations", "omit it")
    if any("\ud800" <= character <= "\udfff" for character in json.dumps(arguments, ensure_ascii=False)):
        raise RuleError("invalid_encoding", "must be valid UTF-8", "remove its lone surrogates")
    if len(json.dumps(arguments)) > _MAX_ARGUMENTS_CHARS:
        raise RuleError("too_large", f"must have at most {_MAX_ARGUMENTS_CHARS:,} characters", "shorten them")
    return arguments


CONVERSATIONS = "conversations"
"""Name of the only source in reports."""


class _ConversationsSpec(BadRecordsFields, FilesFields, SequencesFields):
    """Fields of every corpus of conversations.

    Conversations are rendered by the chat template of the model's folder, with the loss on assistant turns. Each is
    placed in a single sequence, and truncated at its end if too long.
    """

    held_out: NonNegative = Field(default=0.01, lt=0.5)
    """Fraction of conversations held out for evaluation, by a hash of the messages before the first answer, so that all
    answers to a prompt are in the same set."""
    date: Day | None = None
    """Today's date, for templates that use it. Default: the day of submission, which is stored here."""
    chat_template: Place | None = None
    """fsspec URL, under the same roots, of a Jinja chat template to use instead of the folder's. The loss is on text in
    `{% generation %}` blocks, if it has any. Exports keep the folder's template, if there is one."""
    template_arguments: Annotated[dict[Argument, JsonValue], AfterValidator(_own_arguments)] = Field(
        default={}, max_length=32
    )
    """Template arguments in addition to the messages, such as `{enable_thinking: false}`; a record's
    `chat_template_kwargs` override them."""

    @property
    def held_out_sets(self) -> tuple[str, ...]:
        """Names of the held-out sets."""
        return (CONVERSATIONS,) if self.held_out else ()


class ChatSpec(_ConversationsSpec):
    """Conversations: `messages` with `role` and `content`, and optional `tools`; ShareGPT's `conversations` with `from`
    and `value`; Alpaca's `instruction`, `input` and `output`; or `prompt` and `completion`."""

    corpus: Literal["chat"]


class PreferenceSpec(_ConversationsSpec):
    """Preference pairs: `chosen` and `rejected`, each a text, a message or messages, after `prompt`, `messages`,
    ShareGPT's `conversations` or Alpaca's `instruction`, or each a whole conversation.

    The loss is `train.preference_loss`.
    """

    corpus: Literal["preference"]


class UnpairedPreferenceSpec(_ConversationsSpec):
    """Answers with a label: `prompt` and `completion`, or another form of a conversation, and `label` (or `kto_tag`),
    true for a desirable answer and false for an undesirable one. Or pairs, each of which becomes two records.

    The loss is `train.preference_loss`: `kto` or `apo_zero_unpaired`.
    """

    corpus: Literal["unpaired_preference"]


ConversationsSpec = ChatSpec | PreferenceSpec | UnpairedPreferenceSpec
"""Corpora rendered by a chat template."""
