"""Text to token ids and back: byte-level BPE, which no text can fall outside of."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from moe.data.text import normalise

PAD, BOS, EOS, UNK = 0, 1, 2, 3

# Names that no text can spell: the byte-level alphabet, which every other token is made of, has no "⟨".
_SPECIALS = ["⟨pad⟩", "⟨bos⟩", "⟨eos⟩", "⟨unk⟩"]

# Words keep vowel signs and joiners (\p{M}, U+200C, U+200D): GPT-2's pattern breaks Indic words at each.
_WORDS = r" ?[\p{L}\p{M}\x{200c}\x{200d}]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s+"

_CHUNK = 10_000


class Tokenizer:
    """One side's tokenizer. Ids 0 to 3 are PAD, BOS, EOS and UNK; encoding never yields them."""

    def __init__(self, bpe: tokenizers.Tokenizer) -> None:
        self._bpe = bpe

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """A tokenizer of at most `vocab_size` entries; the same for the same texts, with any threads."""
        bpe = tokenizers.Tokenizer(models.BPE())
        words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=_SPECIALS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        bpe.train_from_iterator(_chunks(texts), trainer)
        # The library looks for special tokens in the raw text before anything else. Left in the vocabulary
        # but taken off that list, they keep their ids and no user's text can turn into them.
        plain = json.loads(bpe.to_str())
        plain["added_tokens"] = []
        return cls.from_json(json.dumps(plain))

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """The tokenizer that `to_json` wrote. Raises ValueError for what it did not."""
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the library raises this and nothing narrower
            raise ValueError(f"a tokenizer.json cannot be read: {error}") from None

    def to_json(self) -> str:
        """The tokenizer as Hugging Face's `tokenizer.json`."""
        return str(self._bpe.to_str())

    @property
    def vocab_size(self) -> int:
        return self._bpe.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, normalised as the training text was; no BOS, no EOS."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self.encode_each(texts))

    def encode_each(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """The ids of each text, a chunk of texts at a time."""
        for chunk in _chunks(texts):
            # A lone half of a surrogate pair is no character, and UTF-8 has no bytes for it.
            readable = [normalise(text).encode("utf-8", "replace").decode() for text in chunk]
            for encoding in self._bpe.encode_batch_fast(readable, add_special_tokens=False):
                yield encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special ones, and ids beyond the vocabulary, are left out."""
        num_entries = self.vocab_size
        return str(
            self._bpe.decode([int(id) for id in ids if UNK < id < num_entries], skip_special_tokens=False)
        )


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while chunk := list(islice(texts, _CHUNK)):
        yield chunk
