"""The corpus `packages`: Python source of installed distributions, read where it is installed."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from moe.data.sequences.corpus import DocumentCorpus, DocumentSource, SourceDocument
from moe.data.sequences.package_list import HELD_OUT, TRAINING, Distribution, SourceFile, exclusion_reason, files_of
from moe.spec import spec_error


class Packages(DocumentCorpus):
    """Source files of two lists of distributions: one for training, and one held out, each of which is a source.

    A training document is left out if most of its lines are in held-out documents or in earlier training documents, and
    a held-out one if most of its lines are in training, so that neither a part of a long document nor a whole short one
    is on both sides.
    """

    def __init__(
        self, training: Sequence[Distribution] = TRAINING, held_out: Sequence[Distribution] = HELD_OUT
    ) -> None:
        self._training, self._held_out = training, held_out
        self._left_out: Counter[str] = Counter()

    @property
    def training(self) -> tuple[DocumentSource, ...]:
        return (DocumentSource("packages"),)

    @property
    def held_out(self) -> tuple[str, ...]:
        return tuple(distribution.name for distribution in self._held_out)

    @cached_property
    def _files(self) -> tuple[list[SourceFile], list[SourceFile]]:
        """(held-out files, training files)."""
        held_out, training = (
            [file for distribution in distributions for file in files_of(distribution)]
            for distributions in (self._held_out, self._training)
        )
        return held_out, training

    def check(self) -> tuple[str, ...]:
        for distribution in (*self._training, *self._held_out):
            next(files_of(distribution))
        return ()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for file in (file for files in self._files for file in files):
            digest.update(f"{file.name}\0{hashlib.sha256(_read(file)).hexdigest()}\n".encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[SourceDocument]:
        self._left_out = Counter()
        held_out_files, training_files = self._files
        held_out = [(file, text, lines_of(text)) for file, text in self._texts(held_out_files)]
        seen_lines, training_lines = SeenLines(), SeenLines()
        for _, _, lines in held_out:
            seen_lines.add(lines)
        for _, text in self._texts(training_files):
            lines = lines_of(text)
            if seen_lines.has_most_of(lines):
                self._left_out["near_duplicate"] += 1
                continue
            seen_lines.add(lines)
            training_lines.add(lines)
            yield SourceDocument("packages", text, is_held_out=False)
        for file, text, lines in held_out:
            if training_lines.has_most_of(lines):
                self._left_out["held_out_near_duplicate"] += 1
            else:
                yield SourceDocument(file.distribution, text, is_held_out=True)

    def facts(self) -> dict[str, object]:
        return {
            "corpus": "packages", "files": sum(map(len, self._files)), "left_out": dict(sorted(self._left_out.items())),
            "digest": self.fingerprint(),
        }  # fmt: skip

    def _texts(self, files: list[SourceFile]) -> Iterator[tuple[SourceFile, str]]:
        """Files that are documents, with their text."""
        for file in files:
            try:
                text = _read(file).decode("utf-8")
            except UnicodeDecodeError:
                self._left_out["not_utf8"] += 1
                continue
            reason = exclusion_reason(text) if text.strip() else "empty"
            if reason is None:
                yield file, text
            else:
                self._left_out[reason] += 1


def _read(file: SourceFile) -> bytes:
    try:
        return file.path.read_bytes()
    except OSError as error:
        rule = f"cannot read {file.path} of {file.distribution}: {error.strerror or error}"
        remedy = f"reinstall it: pip install --force-reinstall --no-deps {file.distribution}"
        raise spec_error("unreadable", "data.corpus", "packages", rule, remedy) from None


MIN_LINE_CHARS = 12
"""Shorter lines (`else:`, `return self`) are in every file, and do not identify its origin."""
MAX_SEEN = 0.5
"""Share of a document's distinct lines in others from which it is a near duplicate."""


def lines_of(text: str) -> frozenset[bytes]:
    """Hashes of a document's distinct lines, without indentation, comments and short lines."""
    lines = {line.strip() for line in text.split("\n")}
    return frozenset(
        hashlib.blake2b(line.encode("utf-8", "replace"), digest_size=8).digest()
        for line in lines
        if len(line) >= MIN_LINE_CHARS and not line.startswith("#")
    )


class SeenLines:
    """Lines of the documents so far."""

    def __init__(self) -> None:
        self._line_hashes: set[bytes] = set()

    def add(self, lines: frozenset[bytes]) -> None:
        self._line_hashes |= lines

    def has_most_of(self, lines: frozenset[bytes]) -> bool:
        """Whether at least half of these lines have been seen; True without lines."""
        return len(lines & self._line_hashes) >= MAX_SEEN * len(lines)
