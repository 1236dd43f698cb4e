"""Training data: corpus, cleaning, held-out sets and language mixture."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from moe.spec.bad_records import BadRecordsFields
from moe.spec.base import MAX_PLACES, AboveOne, Column, Count, CountOrZero, LanguageCode, NonNegative, Place, Spec
from moe.spec.conversations import ChatSpec, ConversationsSpec
from moe.spec.data_files import FilesFields
from moe.spec.errors import RuleError, spec_error
from moe.spec.module import ModuleDataSpec
from moe.spec.sequences import DocumentsSpec, PackagesSpec, StreamSpec

PAIRS_LENGTH = 0.2
"""Mean padded length of a token's row, as a fraction of `max_tokens`: 18 of 96 in the catalogs. Also assumed for users'
corpora, which are not read for planning."""


class _CorpusSpec(Spec):
    """Fields that every corpus has."""

    target: LanguageCode = "en"
    """Target language."""
    languages: tuple[LanguageCode, ...] | None = Field(default=None, min_length=1, max_length=MAX_PLACES)
    """Source languages. Default: all in the corpus."""
    min_pairs_per_language: CountOrZero = 0
    """Languages with fewer pairs after cleaning are dropped."""
    sampling_exponent: NonNegative = Field(default=0.5, le=5)
    """Languages are sampled in proportion to pairs ** exponent: 1 as in the corpus, 0 uniformly."""
    max_tokens: Count = Field(default=96, ge=2)
    """Pairs with more tokens than this on either side are dropped and counted."""
    max_length_ratio: AboveOne = 9.0
    """Pairs whose lengths in characters differ by more than this factor, and by more than 20, are dropped."""
    held_out_messages: NonNegative = Field(default=0.02, lt=0.5)
    """Fraction of distinct targets that are held out in all languages: the `unseen` set."""
    held_out_pairs: NonNegative = Field(default=0.01, lt=0.5)
    """Fraction of the remaining pairs that are held out; their targets are seen in other languages: the `seen` set."""

    @property
    def padded_tokens(self) -> float:
        """Mean padded length of a token's row; pairs are batched by length."""
        return PAIRS_LENGTH * self.max_tokens

    @property
    def held_out_sets(self) -> tuple[str, ...]:
        """Names of the held-out sets."""
        return ("unseen", "seen")


SAMPLING_FIELDS = frozenset({"sampling_exponent"})
"""Fields that affect only how often pairs are drawn, not their tokens or the held-out sets."""


class CatalogsSpec(_CorpusSpec):
    """Message catalogs of installed software, translated into English: real text without a download."""

    corpus: Literal["catalogs"]
    target: Literal["en"] = "en"
    sources: tuple[Literal["pip", "system"], ...] = Field(default=("pip",), min_length=1, max_length=2)
    """`pip`: catalogs of pycountry and Django. `system`: those in /usr/share/locale."""


class JsonlSpec(BadRecordsFields, FilesFields, _CorpusSpec):
    """Objects with source, target and source language: JSON, one per line or in one array, or rows of Parquet and Arrow
    files."""

    corpus: Literal["jsonl"]
    source_column: Column = "source"
    """Key, or column, with the source text; `translation.de` is a key of an object, as in datasets of translations."""
    target_column: Column = "target"
    """Key, or column, with the target text."""
    lang_column: Column = "lang"
    """Key, or column, with the source language."""
    lang: LanguageCode | None = None
    """Source language of all records, instead of `lang_column`."""

    @model_validator(mode="after")
    def _check_lang(self) -> "JsonlSpec":
        if self.lang is not None and self.lang_column != "lang":
            rule = f"does not apply with lang (={self.lang!r}), the language of all records"
            raise spec_error("not_applicable", "lang_column", self.lang_column, rule, "omit one of them")
        return self


class TextPair(Spec):
    """Two text files with a sentence per line; line i of one translates line i of the other."""

    source: Place
    target: Place
    lang: LanguageCode


class ParallelTextSpec(BadRecordsFields, _CorpusSpec):
    """Parallel plain text files, one pair of files per language."""

    corpus: Literal["text"]
    files: tuple[TextPair, ...] = Field(min_length=1, max_length=MAX_PLACES)

    @model_validator(mode="after")
    def _check_files(self) -> "ParallelTextSpec":
        for pair in self.files:
            if pair.source == pair.target:
                raise RuleError("duplicate", f"has {pair.source!r} as both source and target", "name two files")
        return self


class SyntheticSpec(Spec):
    """Random tokens in sequences of equal length, for planning a language model but not for training."""

    corpus: Literal["synthetic"]
    max_tokens: Count = 4096
    """Tokens per sequence."""

    @property
    def padded_tokens(self) -> float:
        """Padded length of a token's row."""
        return float(self.max_tokens)


PairsSpec = CatalogsSpec | JsonlSpec | ParallelTextSpec
"""Corpora of source-target pairs."""
SequencesSpec = PackagesSpec | DocumentsSpec | ConversationsSpec
"""Corpora of language models."""
DataSpec = Annotated[PairsSpec | SyntheticSpec | SequencesSpec | ModuleDataSpec, Field(discriminator="corpus")]
StreamableSpec = DocumentsSpec | ChatSpec
"""Corpora that may be read while training."""


def stream_of(data: DataSpec) -> StreamSpec | None:
    """Stream of a corpus that is read while training; None for others."""
    return data.stream if isinstance(data, StreamableSpec) else None
