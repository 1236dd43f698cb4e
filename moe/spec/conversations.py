"""Corpora of conversations: supervised chat tuning, preference pairs (DPO) and labelled answers (KTO)."""

import datetime
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator

from moe.spec.bad_records import BadRecordsFields
from moe.spec.base import Column, NonNegative, Place, Text
from moe.spec.data_files import FilesFields, Format
from moe.spec.errors import RuleError, spec_error
from moe.spec.sequences import (
    MAX_SOURCES,
    SequencesFields,
    SourceFields,
    StreamSpec,
    check_format,
    check_names,
    names_of,
)


def _day(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise RuleError("invalid_value", "must be a date", "write it as 2026-11-26") from None


_MAX_ARGUMENTS_CHARS = 10_000
Packing = Literal["by_source", "together", "none"]
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
"""Name in reports of conversations that are named by `paths` or `dataset`."""


class ChatSourceSpec(SourceFields):
    """Conversations or documents of a mixture."""

    corpus: Literal["chat", "documents"] = "chat"
    """`documents` are plain texts, between the tokens that begin and end a document. All of their tokens are learned;
    those that do not fit a sequence are split."""
    format: Format | None = None
    """Format of `documents`, as in the corpus `documents`. Default: by the suffix of the paths; a dataset's own."""
    column: Column = "text"
    """JSON key, or column, with the text of `documents`."""

    @model_validator(mode="after")
    def _check_format(self) -> "ChatSourceSpec":
        if self.corpus == "documents":
            check_format(self.paths, self.format, self.column)
            return self
        for name in ("format", "column"):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                rule = "applies only to documents: conversations have known keys"
                raise spec_error("not_applicable", name, value, rule, "omit it, or set corpus: documents")
        return self


class PreferenceSourceSpec(SourceFields):
    """Preference pairs, or labelled answers, of a mixture."""


class _ConversationsSpec(BadRecordsFields, FilesFields, SequencesFields):
    """Fields of every corpus of conversations.

    Conversations are rendered by the chat template of the model's folder, with the loss on assistant turns. Each is
    placed in a single sequence, and truncated at its end if too long.
    """

    FILE_FIELDS: ClassVar[tuple[str, ...]] = ("paths", "dataset", "sources")

    sources: Any = None  # of a type for each corpus
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

    @model_validator(mode="after")
    def _check_sources(self) -> "_ConversationsSpec":
        check_names(self.sources or ())
        return self

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources in reports."""
        return (CONVERSATIONS,) if self.sources is None else names_of(self.sources)

    @property
    def source_weights(self) -> dict[str, float]:
        """Weights by source."""
        weights = [source.weight for source in self.sources or ()] or [1.0]
        return dict(zip(self.source_names, weights, strict=True))

    @property
    def held_out_sets(self) -> tuple[str, ...]:
        """Names of the held-out sets: one per source."""
        return self.source_names if self.held_out else ()


class ChatSpec(_ConversationsSpec):
    """Conversations: `messages` with `role` and `content`, and optional `tools`; ShareGPT's `conversations` with `from`
    and `value`; Alpaca's `instruction`, `input` and `output`; or `prompt` and `completion`."""

    corpus: Literal["chat"]
    sources: tuple[ChatSourceSpec, ...] | None = Field(default=None, min_length=1, max_length=MAX_SOURCES)
    """Instead of `paths`: several sources with weights, conversations or documents."""
    packing: Packing = "by_source"
    """Texts that share a sequence, without attending to each other: those of a source (`by_source`), any
    (`together`), or none, so that each has sequences of its own (`none`)."""
    stream: StreamSpec | None = None
    """Streaming of corpora that are too large to prepare, as in the corpus `documents`."""

    @model_validator(mode="after")
    def _check_mixture(self) -> "ChatSpec":
        sources = self.sources or ()
        if sources and all(source.corpus == "documents" for source in sources):
            raise spec_error("not_applicable", "sources", None, "has documents only", "use the corpus documents")
        if self.packing != "together":
            return self
        if len(sources) < 2:
            rule = "requires several sources"
            raise spec_error("requires", "packing", self.packing, rule, "omit it, or list sources")
        for index, source in enumerate(sources):
            if source.weight != 1:
                raise spec_error("not_applicable", f"sources[{index}].weight", source.weight,
                                 "does not apply with packing (='together'): a sequence of several sources has no "
                                 "weight of its own", "omit it, or use packing: by_source")  # fmt: skip
        return self


class PreferenceSpec(_ConversationsSpec):
    """Preference pairs: `chosen` and `rejected`, each a text, a message or messages, after `prompt`, `messages`,
    ShareGPT's `conversations` or Alpaca's `instruction`, or each a whole conversation.

    The loss is `train.preference_loss`.
    """

    corpus: Literal["preference"]
    sources: tuple[PreferenceSourceSpec, ...] | None = Field(default=None, min_length=1, max_length=MAX_SOURCES)
    """Instead of `paths`: several sources with weights."""


class UnpairedPreferenceSpec(_ConversationsSpec):
    """Answers with a label: `prompt` and `completion`, or another form of a conversation, and `label` (or `kto_tag`),
    true for a desirable answer and false for an undesirable one. Or pairs, each of which becomes two records.

    The loss is `train.preference_loss`: `kto` or `apo_zero_unpaired`.
    """

    corpus: Literal["unpaired_preference"]
    sources: tuple[PreferenceSourceSpec, ...] | None = Field(default=None, min_length=1, max_length=MAX_SOURCES)
    """Instead of `paths`: several sources with weights."""


ConversationsSpec = ChatSpec | PreferenceSpec | UnpairedPreferenceSpec
"""Corpora rendered by a chat template."""
