"""Documents to token ids, a few megabytes at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from moe.data.chunks import chunks
from moe.data.conversations.conversation import ASSISTANT, NO_ROLE, TOKEN_ROLES
from moe.data.sequences.corpus import SourceDocument
from moe.data.tokenizer import Tokenizer
from moe.spec import spec_error

PART_CHARS = 1 << 20
"""Longer documents are encoded in parts of at most this many characters, cut at line ends where possible: while the
library encodes, a token takes many times its two or four bytes."""
_CHUNK_CHARS = 2 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class EncodedDocument:
    """A document, or the beginning of one, as ids."""

    document: SourceDocument
    ids: NDArray[Any]
    """[n], all ids of a document with spans; of others, those between BOS and EOS."""
    label_mask: NDArray[np.bool_] | None = None
    """[n], whether each id overlaps a span; None if all ids are learned."""
    ends: NDArray[np.int64] | None = None
    """[n], the character after each id; None if all ids are learned."""
    roles: NDArray[np.uint8] | None = None
    """[n], index in `TOKEN_ROLES` of each id's role, or `NO_ROLE`; None for documents without `role_spans`."""

    @property
    def text(self) -> bytes:
        """UTF-8 of what is learned."""
        if self.document.spans is None or self.ends is None:
            return self.document.text.encode()
        end = int(self.ends[-1]) if len(self.ends) else 0
        return "".join(self.document.text[a : min(b, end)] for a, b in self.document.spans if a < end).encode()

    def cut(self, num_ids: int) -> "EncodedDocument":
        """The first `num_ids` ids of a document with spans."""
        assert self.label_mask is not None
        assert self.ends is not None
        roles = None if self.roles is None else self.roles[:num_ids]
        return EncodedDocument(self.document, self.ids[:num_ids], self.label_mask[:num_ids], self.ends[:num_ids], roles)

    @property
    def num_learned(self) -> int:
        """Learned ids that another id precedes, and so predicts."""
        assert self.label_mask is not None
        return int(self.label_mask[1:].sum())


def id_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    """The smallest type that a tokenizer's ids fit in."""
    return np.dtype(np.uint16 if tokenizer.num_ids <= 2**16 else np.uint32)


def encode_documents(tokenizer: Tokenizer, documents: Iterable[SourceDocument]) -> Iterator[EncodedDocument]:
    """Yield each document with its token ids. Raises SpecError for text that breaks the tokenizer."""
    dtype = id_type(tokenizer)
    for chunk in chunks(documents, lambda document: len(document.text), _CHUNK_CHARS):
        plain = [document for document in chunk if document.spans is None]
        chats = [document for document in chunk if document.spans is not None]
        parts = [list(_parts(document.text)) for document in plain]
        texts = [part for document_parts in parts for part in document_parts]
        ids = iter(_encode_or_raise(lambda texts=texts: list(tokenizer.encode_each(texts)), chunk))  # type: ignore[misc]
        chat_texts = [chat.text for chat in chats]
        encodings = iter(_encode_or_raise(lambda texts=chat_texts: tokenizer.encode_verbatim(texts), chunk))  # type: ignore[misc]
        plain_parts = iter(parts)
        for document in chunk:
            if document.spans is None:
                part_ids = [np.array(next(ids), dtype) for _ in next(plain_parts)]
                yield EncodedDocument(document, part_ids[0] if len(part_ids) == 1 else np.concatenate(part_ids))
                continue
            encoding = next(encodings)
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            label_mask = _overlaps(offsets, document.spans)
            roles = None if document.role_spans is None else _roles(offsets, document.role_spans, label_mask)
            yield EncodedDocument(document, np.array(encoding.ids, dtype), label_mask, offsets[:, 1], roles)


def _overlaps(offsets: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """[n], whether each of the ranges `offsets` [n, 2] overlaps a span; spans are sorted and disjoint."""
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
    first = np.searchsorted(ends, offsets[:, 0], side="right")  # the first span that ends behind its beginning
    has_span = first < len(begins)
    first = np.minimum(first, len(begins) - 1)
    return has_span & (begins[first] < offsets[:, 1]) & (offsets[:, 0] < offsets[:, 1])


def _roles(
    offsets: NDArray[np.int64], role_spans: Sequence[tuple[int, int, str]], label_mask: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """[n], roles of ids at `offsets` [n, 2], as in `EncodedDocument`. Learned ids are the assistant's; ids in two spans
    have no role."""
    spans = [(begin, end, TOKEN_ROLES.index(role)) for begin, end, role in role_spans]
    begins, ends, indices = np.array([(0, 0, NO_ROLE), *spans], np.int64).T
    span = np.searchsorted(begins, offsets[:, 0], side="right") - 1  # the last span that begins before it
    roles = np.where(offsets[:, 1] <= ends[span], indices[span], NO_ROLE)
    return np.where(label_mask, TOKEN_ROLES.index(ASSISTANT), roles).astype(np.uint8)


def _encode_or_raise(encode: Callable[[], list[T]], chunk: Sequence[SourceDocument]) -> list[T]:
    try:
        return encode()
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which the library raises, and gives no name to
            raise
        sources = ", ".join(sorted({document.source for document in chunk}))
        rule = f"fails on a document of {sources}: {error}"
        raise spec_error("unsupported", "model.tokenizer", None, rule, "use another tokenizer") from None


def _parts(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PART_CHARS:
        cut = text.rfind("\n", start, start + PART_CHARS) + 1
        cut = cut or start + PART_CHARS
        yield text[start:cut]
        start = cut
    yield text[start:]
