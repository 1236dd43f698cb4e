"""Text for language models: users' documents, or the source of installed packages."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from moe.spec.bad_records import BadRecordsFields
from moe.spec.base import Column, Count, NonNegative, Positive, Spec, Text
from moe.spec.data_files import FilesFields, Format, format_of
from moe.spec.errors import spec_error

MAX_SOURCES = 100
ALL = "all"
"""Name in reports of all sources together."""


class SourceFields(FilesFields):
    """Files with a name and a weight in the mixture."""

    name: Annotated[Text, Field(max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")] | None = None
    """Name in the report. Default: `source-1`, `source-2`, in order."""
    weight: Positive = Field(default=1.0, ge=0.001, le=1000)
    """Number of times that an epoch uses its sequences; 0.5 is every other epoch. Its share of the mixture is weight ·
    tokens, divided by the sum over all sources."""


class SourceSpec(SourceFields):
    """Documents from files of one format, with a weight in the mixture and a line in the report."""

    format: Format | None = None
    """Documents are JSON objects, one per line or in one array (`jsonl`), whole files (`text`) or rows (`parquet`,
    `arrow`). Default: by the suffix of the paths; a dataset's own."""
    column: Column = "text"
    """JSON key, or column, with the text; `text` has none."""

    @model_validator(mode="after")
    def _check_format(self) -> "SourceSpec":
        check_format(self.paths, self.format, self.column)
        return self

    @property
    def file_format(self) -> Format | None:
        """`format`, or the format from the suffix of the paths; None for a dataset, which has its own."""
        return file_format(self.paths, self.format)


def file_format(paths: Sequence[str] | None, format: Format | None) -> Format | None:
    """`format`, or the format from the suffix of the paths; None for a dataset."""
    return format if paths is None or format is not None else format_of(paths[0])


def check_format(paths: Sequence[str] | None, format: Format | None, column: str) -> None:
    """Raise SpecError unless the format of documents is known, and has a column where one is named."""
    if paths is None:
        if format is not None:
            raise spec_error("not_applicable", "format", format, "does not apply to a dataset", "omit it")
    elif format is None:
        formats = {format_of(path) for path in paths}
        if len(formats) > 1 or None in formats:
            rule = "is required unless file names imply it"
            if len(formats - {None}) > 1:
                rule = f"is required if paths imply several ({', '.join(sorted(filter(None, formats)))})"
            raise spec_error("missing", "format", None, rule, "write jsonl, text, parquet or arrow, one per source")
    if file_format(paths, format) == "text" and column != "text":
        raise spec_error("not_applicable", "column", column,
                         "does not apply to text files, which are one document each",
                         "omit it, or name the format")  # fmt: skip


def names_of(sources: Sequence[SourceFields]) -> tuple[str, ...]:
    """Names of sources in reports."""
    return tuple(source.name or f"source-{index}" for index, source in enumerate(sources, start=1))


def check_names(sources: Sequence[SourceFields]) -> None:
    """Raise SpecError for names of sources that are equal or reserved."""
    names = names_of(sources)
    for index, name in enumerate(names):
        if name == ALL:
            raise spec_error(
                "duplicate", f"sources[{index}].name", name, "is reserved for the total in reports", "rename it"
            )
        if name in names[:index]:
            raise spec_error("duplicate", f"sources[{index}].name", name,
                             f"is also the name of sources[{names.index(name)}]",
                             "rename one, or merge their paths into one source")  # fmt: skip


class StreamSpec(Spec):
    """Documents or conversations read while training, instead of prepared on disk before it. Their order depends on
    `train.seed` and the step alone. For evaluation, those held out at the beginnings of the files are prepared."""

    shuffle_bytes: Count | None = Field(default=None, le=2**40)
    """Bytes of text in the shuffle windows of all partitions together, within which sequences are shuffled; the order
    of files is shuffled, too. Each worker keeps at most two windows per partition on its disk. Default: 32 MiB, or more
    for long sequences."""
    partitions: Count | None = Field(default=None, le=1024)
    """Partitions of the stream, each of a part of the token groups of every batch, with windows and open files of its
    own. A worker reads only those of its token groups. Default: 4, or the number of token groups if that is less."""

    def num_partitions(self, num_groups: int) -> int:
        """`partitions`, or its default for batches of `num_groups` token groups."""
        return min(4, num_groups) if self.partitions is None else self.partitions

    def window_bytes(self, max_tokens: int, num_partitions: int) -> int:
        """Bytes of text in a shuffle window of one partition."""
        if self.shuffle_bytes is None:
            return max(_SHUFFLE_BYTES // num_partitions, MIN_WINDOW_BYTES_PER_TOKEN * max_tokens)
        return self.shuffle_bytes // num_partitions


_SHUFFLE_BYTES = 32 << 20
MIN_WINDOW_BYTES_PER_TOKEN = 64
"""Smallest shuffle window of a partition, in bytes per token of a sequence: about 16 sequences."""
MAX_STREAM_POSITIONS = 4096
"""Limit on partitions x sources of a stream, whose positions every checkpoint has."""

HELD_OUT_PACKAGES = ("h11", "sqlparse", "structlog", "uvicorn")
"""Packages of four kinds (a protocol, a parser, logging, a server), by other authors than those trained on."""


class SequencesFields(Spec):
    """Fields that every corpus of sequences has."""

    max_tokens: Count = Field(default=512, ge=2, le=2**24)
    """L, positions per sequence. Documents are packed into sequences; longer documents are split, longer conversations
    truncated."""

    @model_validator(mode="before")
    @classmethod
    def _check_stream(cls, values: Any) -> Any:
        if isinstance(values, dict) and "stream" in values and "stream" not in cls.model_fields:
            raise spec_error("not_applicable", "stream", None,
                             "applies only to the corpora documents and chat: others are prepared before training",
                             "omit it")  # fmt: skip
        return values

    @property
    def padded_tokens(self) -> float:
        """Padded length of a token's row."""
        return float(self.max_tokens)


class PackagesSpec(SequencesFields):
    """Python source of a fixed list of packages that Shardyard depends on: real text without a download."""

    corpus: Literal["packages"]

    @property
    def held_out_sets(self) -> tuple[str, ...]:
        """Names of the held-out sets: packages that are never trained on."""
        return HELD_OUT_PACKAGES


class DocumentsSpec(BadRecordsFields, SequencesFields):
    """The user's own documents."""

    corpus: Literal["documents"]
    sources: tuple[SourceSpec, ...] = Field(min_length=1, max_length=MAX_SOURCES)
    held_out: NonNegative = Field(default=0.01, lt=0.5)
    """Fraction of each source's documents held out for evaluation, by a hash of the text, so that equal documents are
    in the same set."""
    stream: StreamSpec | None = None
    """Streaming of corpora that are too large to prepare; `{}` with defaults. Default: documents are prepared on disk
    before training."""

    @model_validator(mode="after")
    def _check_names(self) -> "DocumentsSpec":
        check_names(self.sources)
        return self

    @property
    def source_names(self) -> tuple[str, ...]:
        """Report names of the sources."""
        return names_of(self.sources)

    @property
    def source_weights(self) -> dict[str, float]:
        """Weights by source."""
        return {name: source.weight for name, source in zip(self.source_names, self.sources, strict=True)}

    @property
    def held_out_sets(self) -> tuple[str, ...]:
        """Names of the held-out sets: one per source."""
        return self.source_names if self.held_out else ()
