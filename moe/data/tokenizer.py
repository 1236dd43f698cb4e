"""Text to token ids and back: byte-level BPE, which encodes any text, or the tokenizer of a given model."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import islice

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from moe.data.text import as_characters, normalise

PAD, BOS, EOS, UNK = 0, 1, 2, 3

# Names that no text can spell: the byte-level alphabet, which every other token is made of, has no "⟨".
SPECIALS = ["⟨pad⟩", "⟨bos⟩", "⟨eos⟩", "⟨unk⟩"]

# Words keep vowel signs and joiners (\p{M}, U+200C, U+200D): GPT-2's pattern breaks Indic words at each.
_WORDS = r" ?[\p{L}\p{M}\x{200c}\x{200d}]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s+"

# A word keeps the one sign or space before it (`.append`, `_size`). Signs keep the line's end and the indentation of
# the next line (from `):` up to `return`), except the space that the next word keeps: on held-out source, that makes 4%
# fewer tokens than separate white space. Alternatives backtrack over white space only.
_CODE_AND_WORDS = (
    r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}\x{200c}\x{200d}]+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+(?:[\r\n]+[ \t]*(?=[ \t]))?|\s+(?!\S)|\s+"
)

_CHUNK = 10_000


@dataclass(frozen=True)
class EncodedText:
    """Ids of a text, and their offsets in it."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """First character of each id, and the one after its last; ids that are parts of one character have its offsets."""


class TextForm(Enum):
    """Kind of a tokenizer's texts, and the pattern whose matches no learned token crosses."""

    SENTENCES = _WORDS
    """Normalised (see `normalise`): spelling variants and line breaks do not matter."""
    DOCUMENTS = _CODE_AND_WORDS
    """Unchanged: in code and in prose, every space counts."""


class Tokenizer:
    """A tokenizer of texts of one form. A tokenizer trained here never encodes text as special ids: 0 to 3, PAD, BOS,
    EOS and UNK."""

    def __init__(
        self,
        bpe: tokenizers.Tokenizer,
        form: TextForm = TextForm.SENTENCES,
        *,
        bos_id: int = BOS,
        eos_id: int = EOS,
        special_ids: Iterable[int] = (PAD, BOS, EOS, UNK),
        prefix_ids: Sequence[int] | None = None,
        start_id: int | None = None,
    ) -> None:
        """`bos_id` and `eos_id` begin and end a document in training.

        `prefix_ids`: ids that the tokenizer itself puts before a text (`bos_id` by default). `start_id`: token before a
        text without context, since a model needs at least one token (`bos_id` by default).
        """
        self._bpe, self._form = bpe, form
        self.bos_id, self.eos_id = bos_id, eos_id
        self.prefix_ids = (bos_id,) if prefix_ids is None else tuple(prefix_ids)
        self.start_id = bos_id if start_id is None else start_id
        self._special_ids = frozenset(special_ids)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, form: TextForm = TextForm.SENTENCES) -> "Tokenizer":
        """A tokenizer of at most `vocab_size` entries; the same for the same texts, with any number of threads."""
        bpe = tokenizers.Tokenizer(models.BPE())
        words = pre_tokenizers.Split(Regex(form.value), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIALS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        bpe.train_from_iterator(_chunks(texts), trainer)
        # The library looks for special tokens in the raw text before anything else. Kept in the vocabulary but removed
        # from that list, they keep their ids, and no text encodes to them.
        plain = json.loads(bpe.to_str())
        plain["added_tokens"] = []
        return cls.from_json(json.dumps(plain), form)

    @classmethod
    def from_json(cls, text: str, form: TextForm = TextForm.SENTENCES) -> "Tokenizer":
        """The tokenizer that `to_json` wrote. Raises ValueError for other text."""
        return cls(_read(text), form)

    @classmethod
    def of_model(cls, text: str, *, bos_id: int | None, eos_id: int, start_token: str | None = None) -> "Tokenizer":
        """Tokenizer of documents from a model's `tokenizer.json`. Without `bos_id`, its EOS also begins a document.
        `start_token`: BOS, or else EOS, as named in `tokenizer_config.json`.

        Raises ValueError for a file that cannot be read, and any exception of the library for a pattern that never
        ends: the file must have been tried in a limited process before (moe.data.sequences). Special tokens in a text
        are encoded as plain text, as far as the library allows: it still matches those that are in the model's own
        vocabulary and not marked as special.
        """
        bpe = _read(text)
        bpe.no_truncation()
        bpe.no_padding()
        bpe.encode_special_tokens = True
        special_ids = {id for id, token in bpe.get_added_tokens_decoder().items() if token.special}
        bos_id = eos_id if bos_id is None else bos_id
        return cls(
            bpe,
            TextForm.DOCUMENTS,
            bos_id=bos_id,
            eos_id=eos_id,
            special_ids=special_ids | {bos_id, eos_id},
            prefix_ids=_prefix_ids(bpe),
            start_id=None if start_token is None else bpe.token_to_id(start_token),
        )

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        return self._special_ids

    def to_json(self) -> str:
        """The tokenizer as Hugging Face's `tokenizer.json`."""
        return str(self._bpe.to_str())

    @property
    def vocab_size(self) -> int:
        return self._bpe.get_vocab_size()

    @cached_property
    def num_ids(self) -> int:
        """Highest id plus 1: the minimum size of an embedding."""
        return 1 + max(self._bpe.get_vocab(with_added_tokens=True).values(), default=-1)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text; None if there is none."""
        token_id: int | None = self._bpe.token_to_id(token)
        return token_id

    def encode(self, text: str) -> list[int]:
        """The ids of a text, normalised as the training text was; no BOS, no EOS."""
        return self.encode_batch([text])[0]

    def prompt(self, text: str) -> list[int]:
        """Ids of a prompt, with the tokenizer's own prefix; never empty."""
        return self.prompts([text])[0]

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self.prefix_ids, *ids] or [self.start_id] for ids in self.encode_batch(texts)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self.encode_each(texts))

    def encode_each(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """The ids of each text, a chunk of texts at a time."""
        for chunk in _chunks(texts):
            for encoding in self._bpe.encode_batch_fast(
                [self._readable(text) for text in chunk], add_special_tokens=False
            ):
                yield encoding.ids

    def encode_verbatim(self, texts: Sequence[str]) -> list[EncodedText]:
        """Ids of texts rendered by a chat template, in which special tokens are special."""
        are_text, processor = self._bpe.encode_special_tokens, self._bpe.post_processor
        self._bpe.encode_special_tokens = False
        self._bpe.post_processor = None  # some trim spaces from offsets, to empty ranges for runs of spaces
        try:
            encodings = self._bpe.encode_batch([self._readable(text) for text in texts], add_special_tokens=False)
        finally:
            self._bpe.encode_special_tokens, self._bpe.post_processor = are_text, processor
        return [EncodedText(encoding.ids, encoding.offsets) for encoding in encodings]

    def _readable(self, text: str) -> str:
        return as_characters(normalise(text) if self._form is TextForm.SENTENCES else text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special ones, and ids beyond the vocabulary, are left out."""
        num_ids = self.num_ids
        known_ids = [int(id) for id in ids if id not in self._special_ids and 0 <= id < num_ids]
        return str(self._bpe.decode(known_ids, skip_special_tokens=False))


def _read(text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"not a valid tokenizer.json: {error}") from None


def _prefix_ids(bpe: tokenizers.Tokenizer) -> list[int]:
    """Ids that a tokenizer's post-processor puts before a text."""
    for probe in ("a", "0", "."):
        encoding = bpe.encode(probe, add_special_tokens=True)
        if 0 in encoding.special_tokens_mask:
            return list(encoding.ids[: encoding.special_tokens_mask.index(0)])
    return []


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while chunk := list(islice(texts, _CHUNK)):
        yield chunk
