"""Pairs that a model never learns from, so that it is evaluated on them."""

from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum

from moe.data.pairs.pair import Pair
from moe.data.text import is_held_out
from moe.spec import PairsSpec


class CorpusPart(IntEnum):
    """Part of the corpus that a pair belongs to."""

    TRAIN = 0
    UNSEEN = 1
    """Its message is not in training in any language."""
    SEEN = 2
    """Its message is in training, in another language; the pair itself is not."""


class HeldOut:
    """Chooses held-out messages and pairs by hash, from the spec's shares and a seed."""

    def __init__(self, data: PairsSpec, seed: int) -> None:
        self._share_of_messages = data.held_out_messages
        self._share_of_pairs = data.held_out_pairs
        self._key = f"shardyard held-out {seed}".encode()[:64]

    def candidates(self, pairs: Sequence[Pair]) -> list[CorpusPart]:
        """Part of each pair, by hash only: a SEEN pair may still have no counterpart in training.

        Messages that differ only in case and punctuation are one message: knowing "Save" answers "Save…".
        """
        unseen = {
            target: is_held_out(f"message\0{_normalize(target)}", self._share_of_messages, self._key)
            for target in {pair.target for pair in pairs}
        }
        return [
            CorpusPart.UNSEEN
            if unseen[pair.target]
            else CorpusPart.SEEN
            if is_held_out("\0".join(("pair", *pair)), self._share_of_pairs, self._key)
            else CorpusPart.TRAIN
            for pair in pairs
        ]

    def assign(self, pairs: Sequence[Pair], candidates: Sequence[CorpusPart]) -> list[CorpusPart]:
        """The final parts: a SEEN pair whose message is not in training in another language returns to training."""
        langs_in_training = defaultdict(set)
        for pair, part in zip(pairs, candidates, strict=True):
            if part is CorpusPart.TRAIN:
                langs_in_training[pair.target].add(pair.lang)
        return [
            CorpusPart.TRAIN if part is CorpusPart.SEEN and not langs_in_training[pair.target] - {pair.lang} else part
            for pair, part in zip(pairs, candidates, strict=True)
        ]


def _normalize(message: str) -> str:
    letters = "".join(filter(str.isalnum, message.casefold()))
    return letters or message
