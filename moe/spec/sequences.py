"""Text for language models: users' documents, or the source of installed packages."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from moe.spec.bad_records import BadRecordsFields
from moe.spec.base import MAX_PLACES, Column, Count, NonNegative, Place, Positive, Spec, Text
from moe.spec.errors import spec_error

Format = Literal["jsonl", "text", "parquet"]
MAX_SOURCES = 100
ALL = "all"
"""Name in reports of all sources together."""

_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "text", ".text": "text", ".md": "text",
    ".py": "text", ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zstd")


def format_of(path: str) -> Format | None:
    """Format from a path's suffix, ignoring compression; None if unknown."""
    name = path.rsplit("/", 1)[-1].lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return _FORMATS.get("." + name.rpartition(".")[2]) if "." in name else None


class SourceSpec(Spec):
    """Documents from files of one format, with a weight in the mixture and a line in the report."""

    name: Annotated[Text, Field(max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")] | None = None
    """Name in the report. Default: `source-1`, `source-2`, in order."""
    paths: tuple[Place, ...] = Field(min_length=1, max_length=MAX_PLACES)
    """fsspec URLs under the service's data roots; `*` is expanded."""
    format: Format | None = None
    """Documents are JSON objects, one per line or in one array (`jsonl`), whole files (`text`) or rows (`parquet`).
    Default: by the suffix of the paths."""
    column: Column = "text"
    """JSON key or Parquet column with the text; `text` has none."""
    weight: Positive = Field(default=1.0, ge=0.001, le=1000)
    """Number of times that an epoch uses its sequences; 0.5 is every other epoch. Its share of the mixture is weight ·
    tokens, divided by the sum over all sources."""

    @model_validator(mode="after")
    def _check_format(self) -> "SourceSpec":
        if self.format is None:
            formats = {format_of(path) for path in self.paths}
            if len(formats) > 1 or None in formats:
                rule = "is required unless file names imply it"
                if len(formats - {None}) > 1:
                    rule = f"is required if paths imply several ({', '.join(sorted(filter(None, formats)))})"
                raise spec_error("missing", "format", None, rule, "write jsonl, text or parquet, one per source")
        if self.file_format == "text" and self.column != "text":
            raise spec_error("not_applicable", "column", self.column,
                             "does not apply to text files, which are one document each",
                             "omit it, or name the format")  # fmt: skip
        return self

    @property
    def file_format(self) -> Format:
        """`format`, or the format from the suffix of the paths."""
        name = self.format or format_of(self.paths[0])
        assert name is not None
        return name


HELD_OUT_PACKAGES = ("h11", "sqlparse", "structlog", "uvicorn")
"""Packages of four kinds (a protocol, a parser, logging, a server), by other authors than those trained on."""


class SequencesFields(Spec):
    """Fields that every corpus of sequences has."""

    max_tokens: Count = Field(default=512, ge=2, le=2**24)
    """L, positions per sequence. Documents are packed into sequences; longer documents are split, longer conversations
    truncated."""

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

    @model_validator(mode="after")
    def _check_names(self) -> "DocumentsSpec":
        names = self.source_names
        for index, name in enumerate(names):
            if name == ALL:
                raise spec_error(
                    "duplicate", f"sources[{index}].name", name, "is reserved for the total in reports", "rename it"
                )
            if name in names[:index]:
                raise spec_error("duplicate", f"sources[{index}].name", name,
                                 f"is also the name of sources[{names.index(name)}]",
                                 "rename one, or merge their paths into one source")  # fmt: skip
        return self

    @property
    def source_names(self) -> tuple[str, ...]:
        """Report names of the sources."""
        return tuple(source.name or f"source-{index}" for index, source in enumerate(self.sources, start=1))

    @property
    def held_out_sets(self) -> tuple[str, ...]:
        """Names of the held-out sets: one per source."""
        return self.source_names if self.held_out else ()
