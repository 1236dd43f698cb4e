"""The tokenizers of both sides of pairs."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import fsspec

from moe.data.pairs.pair import Pair
from moe.data.tokenizer import Tokenizer


class Vocabularies(Protocol):
    """Vocabularies of a model, from its spec."""

    @property
    def source_vocab_size(self) -> int: ...

    @property
    def target_vocab_size(self) -> int: ...

    @property
    def share_vocabulary(self) -> bool: ...


class Tokenizers:
    """The tokenizers of both sides: a single one if the model shares its vocabulary."""

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        self.source = source
        self.target = target

    @property
    def is_shared(self) -> bool:
        return self.source is self.target

    @classmethod
    def train(cls, pairs: Sequence[Pair], model: Vocabularies) -> "Tokenizers":
        """Tokenizers for a model's vocabularies, trained on the texts of `pairs`.

        A target that occurs n times counts √n times: otherwise names that a hundred languages translate to would use up
        the merges, and unseen messages would be split into many short tokens.
        """
        sources = [pair.source for pair in pairs]
        occurrences = Counter(pair.target for pair in pairs)
        targets = [target for target in sorted(occurrences) for _ in range(round(occurrences[target] ** 0.5))]
        if model.share_vocabulary:
            tokenizer = Tokenizer.train([*sources, *targets], model.source_vocab_size)
            return cls(tokenizer, tokenizer)
        return cls(Tokenizer.train(sources, model.source_vocab_size), Tokenizer.train(targets, model.target_vocab_size))

    def files(self) -> dict[str, bytes]:
        """Hugging Face `tokenizer.json` files, by name."""
        files = {"tokenizer.json": self.source}
        if not self.is_shared:
            files = {"tokenizer.source.json": self.source, "tokenizer.target.json": self.target}
        return {name: tokenizer.to_json().encode() for name, tokenizer in files.items()}

    def save(self, folder: str | Path) -> None:
        """Write `files` into a folder (a path or an fsspec URL)."""
        filesystem, root = fsspec.url_to_fs(str(folder))
        filesystem.makedirs(root, exist_ok=True)
        for name, content in self.files().items():
            filesystem.pipe_file(f"{root}/{name}", content)

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizers":
        """The tokenizers that `save` wrote. Raises FileNotFoundError."""
        filesystem, root = fsspec.url_to_fs(str(folder))
        return cls.read(lambda name: filesystem.cat_file(f"{root}/{name}"))

    @classmethod
    def read(cls, read: Callable[[str], bytes]) -> "Tokenizers":
        """The tokenizers in files that `save` wrote, read by name with `read`. Raises FileNotFoundError, and ValueError
        for files that `save` did not write."""
        with suppress(FileNotFoundError):
            tokenizer = Tokenizer.from_json(read("tokenizer.json").decode())
            return cls(tokenizer, tokenizer)
        source, target = (Tokenizer.from_json(read(f"tokenizer.{side}.json").decode()) for side in ("source", "target"))
        return cls(source, target)
