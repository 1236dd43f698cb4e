"""Build the corpus of a spec, and check it before a job is launched."""

from collections.abc import Sequence

from moe.data.scan import check_corpus
from moe.data.sequences.corpus import DocumentCorpus
from moe.data.sequences.model_tokenizer import ModelTokenizer, require_usable
from moe.spec import ConversationsSpec, PackagesSpec, SequencesSpec, StreamableSpec, stream_of


def build(
    data: SequencesSpec,
    roots: Sequence[str] | None = None,
    tokenizer: ModelTokenizer | None = None,
    shards: bytes | None = None,
) -> DocumentCorpus:
    """The corpus that a spec names; the user's files must lie under `roots` (None: anywhere). Conversations are
    rendered by the chat template in the files of `tokenizer`. Of a stream, it is the part to prepare; `shards`: the
    list of an earlier attempt. Raises SpecError if there is no template, or a listed file is gone."""
    if isinstance(data, PackagesSpec):
        from moe.data.sequences.packages import Packages

        return Packages()
    if isinstance(data, ConversationsSpec):
        from moe.data.conversations.template import ChatTemplate
        from moe.data.sequences.conversations import Conversations

        if tokenizer is None:
            return Conversations(data, ChatTemplate.of_files({}, data.date), roots)
        ends = tokenizer.end_texts()
        template = ChatTemplate.of_files(tokenizer.files, data.date, ends)
        closing_tokens = (*ends, *tokenizer.special_texts())
        if stream_of(data) is None:
            return Conversations(data, template, roots, closing_tokens)
        from moe.data.sequences.stream.sample import StreamSample

        assert isinstance(data, StreamableSpec)
        return StreamSample(data, roots, shards, template, closing_tokens)
    if data.stream is not None:
        from moe.data.sequences.stream.sample import StreamSample

        return StreamSample(data, roots, shards)
    from moe.data.sequences.documents import DocumentFiles

    return DocumentFiles(data, roots)


def check(
    data: SequencesSpec, roots: Sequence[str], tokenizer: ModelTokenizer | None = None, vocab_size: int | None = None
) -> tuple[str, ...]:
    """Check a corpus quickly before launch; return warnings. Raises SpecError for its faults, and for those of
    `tokenizer`, such as too many ids.

    Files must lie under `roots` (folders or fsspec URLs). Loads neither torch nor the tokenizer nor pyarrow: separate
    processes load those.
    """
    corpus = build(data, roots, tokenizer)
    warnings = corpus.check() if stream_of(data) is not None else check_corpus(corpus, data, roots)
    if tokenizer is not None and vocab_size is not None:
        require_usable(tokenizer, vocab_size, sample=())
    return warnings
