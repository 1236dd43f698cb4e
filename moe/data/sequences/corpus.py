"""Corpora of documents, each from a source, for training or held out."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moe.data.corpus import Corpus


class SourceDocument(NamedTuple):
    source: str
    """Name of its source."""
    text: str
    is_held_out: bool
    spans: tuple[tuple[int, int], ...] | None = None
    """Learned spans, in characters; the text then contains its special tokens. None if everything is learned, between
    BOS and EOS."""
    by_marks: bool = False
    """Whether the spans are marked by a template, which may mark parts of an answer."""
    is_desirable: bool | None = None
    """Label of an unpaired preference; None for other documents."""
    role_spans: tuple[tuple[int, int, str], ...] | None = None
    """Spans of a held-out conversation's messages whose text is known, in characters: begin, end and role."""


@dataclass(frozen=True)
class DocumentSource:
    """Documents that share a name and a weight."""

    name: str
    weight: float = 1.0
    """Number of times that its sequences occur in an epoch of training."""


class DocumentCorpus(Corpus):
    """Documents of several sources."""

    has_spans: bool = False
    """Whether documents have spans: each is then in one sequence, truncated if it is too long. Other documents may be
    split over several sequences."""
    num_linked: int = 1
    """Number of consecutive documents that belong together and share a sequence."""
    has_labels: bool = False
    """Whether documents have a label, desirable or not, and count one by one rather than by token."""

    @property
    def packing(self) -> str:
        """Documents that share a sequence: those of a source (`by_source`), any (`together`), or none (`none`)."""
        return "by_source"

    @property
    def plain_sources(self) -> frozenset[str]:
        """Sources whose documents have no spans, among others that have."""
        return frozenset()

    @property
    @abstractmethod
    def training(self) -> tuple[DocumentSource, ...]:
        """Sources that are trained on, in order."""

    @property
    @abstractmethod
    def held_out(self) -> tuple[str, ...]:
        """Names of the sources with held-out documents, in order."""

    @abstractmethod
    def documents(self) -> Iterator[SourceDocument]:
        """Every document; those for training come source by source, in the order of `training`."""
