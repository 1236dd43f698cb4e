"""Preparation of a corpus of documents: tokenized, packed and stored, once for its content."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from moe.clock import Clock
from moe.data import preparation
from moe.data.conversations.template import TEMPLATE_FILES
from moe.data.progress import ProgressCallback, Stages, scaled_progress
from moe.data.sequences.closing_tokens import ClosingTokens
from moe.data.sequences.corpora import build
from moe.data.sequences.corpus import DocumentCorpus, SourceDocument
from moe.data.sequences.description import describe
from moe.data.sequences.encoding import encode_documents, id_type
from moe.data.sequences.model_tokenizer import (
    CLOSERS,
    ENDS,
    SHARDS,
    TOKENIZER,
    TOKENIZER_FILES,
    ModelTokenizer,
    load_tokenizer,
    require_usable,
)
from moe.data.sequences.store import SequenceStore, StoreWriter
from moe.data.sequences.stream.sample import StreamSample
from moe.data.sequences.stream.shards import ShardList
from moe.data.sequences.truncation import Truncation
from moe.data.text import hash_text
from moe.data.tokenizer import TextForm, Tokenizer
from moe.spec import ConversationsSpec, SequencesSpec, spec_error

FORMAT_VERSION = 1
"""Version of the store: increased when the same corpus and spec would give another one, by its files, packing,
tokenizer or what is left out of packages."""
RENDERING_VERSION = 3
"""Version of rendering: increased when the same conversations would be rendered, or their learned spans found,
otherwise."""

ROLES_VERSION = 1
"""Version of the roles of held-out tokens: increased when others would be found. Training does not read them, so they
are no part of keys that checkpoints record."""

SMALLEST_VOCABULARY = 4 + 256
"""Size of a learned tokenizer without merges: special tokens and bytes."""
_STAGES = {"reading": 1.0, "learning the tokenizer": 2.0, "encoding": 6.0, "counting": 1.0}
"""Stages, with the share of time that each usually takes."""
_SAMPLE_DOCUMENTS, _SAMPLE_CHARS = 50, 20_000
"""Sample of the corpus that a given tokenizer is tried with."""


@dataclass(frozen=True)
class PreparedSequences:
    """Everything a run reads."""

    folder: Path
    key: str
    """Hash of everything that determines its tokens and their order."""
    train: SequenceStore
    held_out: dict[str, SequenceStore]
    """By source, with their text. One may have no rows: chance held out none of few documents."""
    stats: dict[str, Any]
    """Counts of what was read, left out, and kept: see `describe`."""
    shards: ShardList | None = None
    """Files of a stream, of which `train` is a sample only."""
    roots: Sequence[str] | None = None
    """Folders that the shards must be in; None: anywhere."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(partial(preparation.read_tokenizer, self.folder))

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids of the tokens that stop generation."""
        files = dict(self._files())
        further = (json.loads(files.get(name, b"[]")) for name in (ENDS, CLOSERS))
        return frozenset({self.tokenizer.eos_id}.union(*further))

    def tokenizer_files(self) -> dict[str, bytes]:
        """Files that checkpoints carry, by name: the tokenizer, and a given model's ids of BOS and EOS."""
        return {name: content for name, content in self._files() if name in TOKENIZER_FILES}

    def carried_files(self) -> dict[str, bytes]:
        """Further files of a given model, unchanged, and the ids that stop generation."""
        return {name: content for name, content in self._files() if name not in TOKENIZER_FILES}

    def _files(self) -> Iterator[tuple[str, bytes]]:
        for name in preparation.tokenizer_names(self.folder):
            yield name, preparation.read_tokenizer(self.folder, name)


def prepare(
    data: SequencesSpec,
    vocab_size: int,
    cache_dir: str | Path,
    tokenizer: ModelTokenizer | None = None,
    roots: Sequence[str] | None = None,
    report: Callable[[str], None] | None = None,
    progress: ProgressCallback | None = None,
    shards: bytes | None = None,
) -> PreparedSequences:
    """Return the prepared corpus, from `cache_dir` by content hash, or built there.

    The hash covers the corpus's content, the spec's fields with an effect, and the tokenizer: the size of its
    vocabulary if it is learned from the corpus, otherwise its files and those stored with them. A change of any of
    these builds a new one. Several processes may call this at once; one of them builds. `roots`: folders that the
    user's files must be in, as in `check`. `report` receives decisions, `progress` the share done. Raises SpecError
    for a corpus that cannot be read or is empty, and for a tokenizer that cannot be used. `shards`: list of a stream's
    files that an earlier attempt stored as SHARDS, to read the same again.
    """
    report = report or (lambda message: None)
    corpus = build(data, roots, tokenizer, shards)
    if tokenizer is None and vocab_size < SMALLEST_VOCABULARY:
        rule = "is less than the special tokens and bytes of a new tokenizer"
        raise spec_error("out_of_range", "model.vocab_size", vocab_size, rule, f"use {SMALLEST_VOCABULARY} or more")
    tokenizer_files = None if tokenizer is None else tokenizer.all_files()
    file_names = (*TOKENIZER_FILES, *((*TEMPLATE_FILES, ENDS) if isinstance(data, ConversationsSpec) else ()))
    deciding = (
        {file_name: tokenizer_files[file_name] for file_name in file_names if file_name in tokenizer_files}
        if tokenizer_files
        else None
    )
    folder = preparation.find_or_build(
        lambda: _content_key(data, vocab_size, corpus, tokenizer_files, has_roles=True),
        lambda empty: _build(empty, corpus, data.max_tokens, vocab_size, tokenizer, report, Stages(_STAGES, progress)),
        report,
        cache_dir,
    )
    stats = preparation.read_stats(folder)
    if tokenizer is not None:
        tokenizer.require_within(vocab_size, stats["vocabulary"])  # it may have been built for a larger one
    return PreparedSequences(
        folder=folder,
        key=folder.name if tokenizer_files is None else _content_key(data, vocab_size, corpus, deciding),
        train=SequenceStore(folder / "train"),
        held_out={name: SequenceStore(folder / f"held_out-{index}") for index, name in enumerate(corpus.held_out)},
        stats=stats,
        shards=corpus.shards if isinstance(corpus, StreamSample) else None,
        roots=roots,
    )


def _content_key(
    data: SequencesSpec,
    vocab_size: int,
    corpus: DocumentCorpus,
    tokenizer_files: Mapping[str, bytes] | None,
    *,
    has_roles: bool = False,
) -> str:
    """`tokenizer_files`: files of a given model's tokenizer. `has_roles`: whether roles of held-out tokens count."""
    facts: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "tokenizer": vocab_size if tokenizer_files is None else _digests(tokenizer_files),
    }
    if isinstance(data, ConversationsSpec):
        facts["rendering"] = RENDERING_VERSION
        if has_roles:
            facts["roles"] = ROLES_VERSION
    return preparation.content_key(corpus, data, facts, exclude={"sources": {"__all__": {"weight"}}, "stream": True})


def _digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def _build(
    folder: Path,
    corpus: DocumentCorpus,
    max_tokens: int,
    vocab_size: int,
    model_tokenizer: ModelTokenizer | None,
    report: Callable[[str], None],
    stages: Stages,
) -> None:
    """Fill an empty folder: learn or try a tokenizer, encode, pack, store."""
    clock = Clock()
    documents = _DocumentPasses(corpus, stages)
    files = _tokenizer_files(documents, vocab_size, model_tokenizer)
    preparation.write_tokenizers(folder, files)
    tokenizer = load_tokenizer(partial(preparation.read_tokenizer, folder))
    clock.lap("tokenizer")

    closing_tokens = ClosingTokens(tokenizer, (tokenizer.eos_id, *json.loads(files.get(ENDS, b"[]"))))
    cut = _write(folder, documents, tokenizer, max_tokens, closing_tokens)
    stages.report("counting")
    if corpus.has_spans:
        cut |= closing_tokens.facts()
        preparation.write_tokenizers(folder, {CLOSERS: json.dumps(closing_tokens.new_end_ids()).encode()})
    if isinstance(corpus, StreamSample):
        preparation.write_tokenizers(folder, {SHARDS: corpus.shards.to_bytes()})
    clock.lap("encode_and_pack")

    train = SequenceStore(folder / "train")
    stats = {
        **corpus.facts(),
        **cut,
        "train": {
            **_counts(train),
            "rows_of": dict(zip(train.sources, np.diff(train.source_rows).tolist(), strict=True)),
            "counts_of": train.source_counts,
        },
        "held_out": {
            name: _counts(SequenceStore(folder / f"held_out-{index}")) for index, name in enumerate(corpus.held_out)
        },
        "max_tokens": max_tokens,
        "vocabulary": tokenizer.num_ids,
        "seconds": clock.laps,
    }
    preparation.write_stats(folder, stats)
    for line in describe(stats):
        report(line)


def _write(
    folder: Path, documents: "_DocumentPasses", tokenizer: Tokenizer, max_tokens: int, closing_tokens: ClosingTokens
) -> dict[str, int]:
    """Write the training store, and one for each source with held-out documents. Returns counts of documents that were
    cut, or left out because nothing of them is learned; counts `closing_tokens`."""
    corpus = documents.corpus
    ids = id_type(tokenizer), tokenizer.bos_id, tokenizer.eos_id
    names = [source.name for source in corpus.training]
    has_spans, num_linked = corpus.has_spans, corpus.num_linked
    truncation = Truncation(max_tokens, num_linked)
    with ExitStack() as stack:
        plain_sources = corpus.plain_sources

        def writer(name: str, sources: Sequence[str], *, keeps_text: bool) -> StoreWriter:
            is_plain = plain_sources.issuperset(sources)
            store = StoreWriter(folder / name, sources, *ids, keeps_text=keeps_text, num_linked=num_linked,
                                has_spans=has_spans and not is_plain, has_labels=corpus.has_labels,
                                has_roles=has_spans and not is_plain and name != "train",
                                plain_sources=plain_sources,
                                packing=corpus.packing if name == "train" else "by_source")  # fmt: skip
            return stack.enter_context(store)

        train = writer("train", names, keeps_text=False)
        held_out = {
            name: writer(f"held_out-{index}", [name], keeps_text=True) for index, name in enumerate(corpus.held_out)
        }
        encoded_documents = encode_documents(tokenizer, documents.to_encode())
        while linked_documents := list(islice(encoded_documents, num_linked)):
            document = linked_documents[0].document
            store = held_out[document.source] if document.is_held_out else train
            if document.spans is None:
                store.add(document.source, linked_documents[0].ids, document.text.encode())
                continue
            if fitting_documents := truncation.fit(linked_documents):
                store.add_whole(document.source, fitting_documents)
                for encoded_document in fitting_documents:
                    closing_tokens.add(encoded_document)
        if empty := [name for name in names if not train.num_documents(name)]:
            rule = f"leaves nothing for training of {', '.join(empty)}"
            remedy = "add documents, or lower data.held_out"
            if truncation.counts["nothing_left"]:
                rule += f": {truncation.counts['nothing_left']} have no answer within data.max_tokens (={max_tokens})"
                remedy = "raise data.max_tokens"
            raise spec_error("empty", "data", None, rule, remedy)
        for store in (train, *held_out.values()):
            store.finish(max_tokens)
    return {**truncation.counts, "num_each": num_linked} if has_spans else {}


def _counts(store: SequenceStore) -> dict[str, Any]:
    positions = store.num_rows * store.max_tokens
    return {
        "documents": store.num_documents,
        "bytes": store.num_bytes,
        "tokens": store.num_tokens,
        "targets": store.num_targets,
        "rows": store.num_rows,
        "waste": round(1 - store.num_tokens / positions, 5) if positions else 0.0,
    }


class _DocumentPasses:
    """Passes over the documents of a corpus. Their number is known after the pass that a tokenizer is learned from."""

    def __init__(self, corpus: DocumentCorpus, stages: Stages) -> None:
        self.corpus, self._stages = corpus, stages
        self._num: int | None = None

    def to_learn(self) -> Iterator[SourceDocument]:
        num = 0
        for document in self._stages.through("reading", self.corpus.documents(), lambda number: None, interval=100):
            num += 1
            yield document
        self._num = num
        self._stages.report("learning the tokenizer")

    def to_encode(self) -> Iterator[SourceDocument]:
        share = (lambda number: None) if self._num is None else scaled_progress(self._num)
        return self._stages.through("encoding", self.corpus.documents(), share, interval=100)


def _tokenizer_files(
    documents: _DocumentPasses, vocab_size: int, model_tokenizer: ModelTokenizer | None
) -> dict[str, bytes]:
    if model_tokenizer is None:
        return {TOKENIZER: train_tokenizer(documents.to_learn(), vocab_size).to_json().encode()}
    corpus = documents.corpus
    sample = islice((document.text[:_SAMPLE_CHARS] for document in corpus.documents()), _SAMPLE_DOCUMENTS)
    require_usable(model_tokenizer, vocab_size, list(sample))
    return model_tokenizer.all_files()


SAMPLE_CHARS = 10_000_000
"""Characters that merges are learned from. All of the 32 MB of `packages` would take four times as long, and make
tokens of held-out text 1% longer."""
MAX_DOCUMENT_CHARS = 200_000
"""Characters that the sample takes of one document."""


def train_tokenizer(documents: Iterable[SourceDocument], vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` entries; the same for the same documents in any order."""
    return Tokenizer.train(sample(documents), vocab_size, TextForm.DOCUMENTS)


def sample(documents: Iterable[SourceDocument], max_chars: int = SAMPLE_CHARS) -> list[str]:
    """Beginnings of the training documents with the lowest hashes, at most `max_chars` together, and at least one. The
    same for the same documents in any order."""
    heap: list[tuple[int, str]] = []
    """A heap, the highest hash first."""
    num_chars, too_high = 0, 2**64
    for document in documents:
        if document.is_held_out:
            continue
        text = document.text[:MAX_DOCUMENT_CHARS]
        hash = hash_text(text)
        if hash >= too_high:
            continue
        heappush(heap, (-hash, text))
        num_chars += len(text)
        while num_chars > max_chars and len(heap) > 1:
            highest, text = heappop(heap)
            num_chars, too_high = num_chars - len(text), -highest
    return [text for minus_hash, text in sorted(heap, reverse=True) if -minus_hash < too_high]
