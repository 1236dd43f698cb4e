"""Check of conversations before a job is launched."""

from collections.abc import Sequence

from moe.data.corpus import CHECK_BYTES
from moe.data.faults import Faults
from moe.data.sequences.chat_sources import ChatSource
from moe.data.sequences.conversation_reader import ConversationEntry, ConversationReader, check_columns

_CHECKED = 32
"""Records of each file that are rendered before a job is launched."""
_MAX_CHECKED_FILES = 16
_ENDLESS = (
    "no learned text ends in a token that ends generation, so the model would never learn "
    "to stop; name that token by eos_token_id in the folder's generation_config.json, or a "
    "template that renders one by data.chat_template"
)


def check_conversations(
    reader: ConversationReader, sources: Sequence[ChatSource], faults: Faults, closing_tokens: tuple[str, ...]
) -> tuple[str, ...]:
    """Read the beginnings of files, render some of their conversations, and return warnings. Unusable records are added
    to `faults`. `closing_tokens` as of `Conversations`. Raises SpecError for files that cannot be read or are empty."""
    limit_bytes = CHECK_BYTES // sum(len(source.files) for source in sources)
    sample_entries: list[ConversationEntry] = []
    for source in sources:
        if source.documents is not None:
            source.documents.check(source.files, faults, limit_bytes)
            continue
        for file in check_columns(source.files):
            entries = list(reader.entries([file], faults, limit_bytes))
            if not entries and not faults.num_bad:
                raise file.broken("empty", "has no records", "add some, or omit it")
            sample_entries += entries[:_CHECKED] if len(sample_entries) < _CHECKED * _MAX_CHECKED_FILES else []
    rows = [
        row
        for _, renderings in reader.renderings(sample_entries, faults)
        for rendering in renderings
        for row in rendering.rows
    ]
    has_closer = any(row.text[begin:end].rstrip().endswith(closing_tokens) for row in rows for begin, end in row.spans)
    return () if has_closer or not rows else (_ENDLESS,)
