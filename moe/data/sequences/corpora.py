"""From a spec to its corpus, and a first look at it before anything is launched."""

from collections.abc import Sequence

from moe.data.sequences.corpus import Corpus
from moe.data.sequences.model_tokenizer import ModelTokenizer, require_usable
from moe.spec import ConversationsSpec, PackagesSpec, SequencesSpec


def build(
    data: SequencesSpec, roots: Sequence[str] | None = None, tokenizer: ModelTokenizer | None = None
) -> Corpus:
    """The corpus that a spec names; the user's files must lie under `roots` (None: anywhere). Conversations are written
    by the chat template beside a given `tokenizer`. Raises SpecError where there is none."""
    if isinstance(data, PackagesSpec):
        from moe.data.sequences.packages import Packages

        return Packages()
    if isinstance(data, ConversationsSpec):
        from moe.data.conversations.template import ChatTemplate
        from moe.data.sequences.conversations import Conversations

        files = {} if tokenizer is None else tokenizer.files
        return Conversations(data, ChatTemplate.of_files(files, data.date), roots)
    from moe.data.sequences.documents import Documents

    return Documents(data, roots)


def check(
    data: SequencesSpec,
    roots: Sequence[str],
    tokenizer: ModelTokenizer | None = None,
    vocab_size: int | None = None,
) -> None:
    """Raise SpecError for what is wrong with a corpus and can be seen at once, before anything is launched; and with a
    given tokenizer, or its number of ids.

    Files must lie under `roots` (folders or fsspec URLs). Loads neither torch nor the tokenizer nor pyarrow: a process
    of their own does that.
    """
    build(data, roots, tokenizer).check()
    if tokenizer is not None and vocab_size is not None:
        require_usable(tokenizer, vocab_size, sample=())
