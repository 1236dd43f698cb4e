"""From a spec to its corpus, and a first look at it before anything is launched."""

from collections.abc import Sequence

from moe.data.scan import check_corpus
from moe.data.sequences.corpus import DocumentCorpus
from moe.data.sequences.model_tokenizer import ModelTokenizer, require_usable
from moe.spec import ConversationsSpec, PackagesSpec, SequencesSpec


def build(
    data: SequencesSpec, roots: Sequence[str] | None = None, tokenizer: ModelTokenizer | None = None
) -> DocumentCorpus:
    """The corpus that a spec names; the user's files must lie under `roots` (None: anywhere). Conversations are written
    by the chat template beside a given `tokenizer`. Raises SpecError where there is none."""
    if isinstance(data, PackagesSpec):
        from moe.data.sequences.packages import Packages

        return Packages()
    if isinstance(data, ConversationsSpec):
        from moe.data.conversations.template import ChatTemplate
        from moe.data.sequences.conversations import Conversations

        if tokenizer is None:
            return Conversations(data, ChatTemplate.of_files({}, data.date), roots)
        texts = tokenizer.token_texts()
        ends = tuple(texts[id] for id in tokenizer.all_ends if id in texts)
        template = ChatTemplate.of_files(tokenizer.files, data.date, ends)
        return Conversations(data, template, roots, (*ends, *tokenizer.special_texts()))
    from moe.data.sequences.documents import DocumentFiles

    return DocumentFiles(data, roots)


def check(
    data: SequencesSpec, roots: Sequence[str], tokenizer: ModelTokenizer | None = None, vocab_size: int | None = None
) -> tuple[str, ...]:
    """Warnings about what can be seen of a corpus at once, before anything is launched. Raises SpecError for what is
    wrong with it, and with a given tokenizer, or its number of ids.

    Files must lie under `roots` (folders or fsspec URLs). Loads neither torch nor the tokenizer nor pyarrow: a process
    of their own does that.
    """
    warnings = check_corpus(build(data, roots, tokenizer), data, roots)
    if tokenizer is not None and vocab_size is not None:
        require_usable(tokenizer, vocab_size, sample=())
    return warnings
