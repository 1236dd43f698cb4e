"""Documents to token ids, a few megabytes at a time."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.data.sequences.corpus import Document
from moe.data.tokenizer import Tokenizer
from moe.spec import Problem, SpecError

PART_CHARS = 1 << 20
"""A longer document is encoded in parts of at most so many, cut after the end of a line where there is one: while the
library encodes, a token takes many times its two or four bytes."""
_CHUNK_CHARS = 2 << 20


def id_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    """The smallest type that a tokenizer's ids fit in."""
    return np.dtype(np.uint16 if tokenizer.num_ids <= 2**16 else np.uint32)


def encoded(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[tuple[Document, NDArray[Any]]]:
    """Each document with its ids, without BOS and EOS. Raises SpecError for text that breaks the tokenizer."""
    for chunk in _chunks(documents):
        parts = [list(_parts(document.text)) for document in chunk]
        texts = [part for of_document in parts for part in of_document]
        try:
            ids = iter([np.array(each, id_type(tokenizer)) for each in tokenizer.encode_each(texts)])
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # which the library raises, and gives no name to
                raise
            sources = ", ".join(sorted({document.source for document in chunk}))
            rule = f"breaks on a document of {sources}: {error}"
            raise SpecError(Problem("model.tokenizer", None, rule, "use another tokenizer")) from None
        for document, of_document in zip(chunk, parts, strict=True):
            found = [next(ids) for _ in of_document]
            yield document, found[0] if len(found) == 1 else np.concatenate(found)


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    num_chars = 0
    for document in documents:
        chunk.append(document)
        num_chars += len(document.text)
        if num_chars >= _CHUNK_CHARS:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk


def _parts(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PART_CHARS:
        cut = text.rfind("\n", start, start + PART_CHARS) + 1
        cut = cut or start + PART_CHARS
        yield text[start:cut]
        start = cut
    yield text[start:]
