"""Rows of the vocabulary's tables that are trained while all others are frozen."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from pydantic import Field

from moe.spec.adapter_names import EMBEDDING, TOKEN_ROWS
from moe.spec.base import CountOrZero, Spec
from moe.spec.errors import Problem
from moe.spec.parameter import Derivation, Parameter

_MAX_TOKENS = 65_536


class TokenRowsSpec(Spec):
    """Tokens whose rows are trained, by table (PEFT's `trainable_token_indices`). With tied embeddings, rows of
    `embedding` are also those of the output."""

    embedding: tuple[CountOrZero, ...] = Field(default=(), max_length=_MAX_TOKENS)
    """Token ids, in the order of PEFT's tensor."""
    output: tuple[CountOrZero, ...] = Field(default=(), max_length=_MAX_TOKENS)

    def ids_of(self, table: str) -> tuple[int, ...]:
        """Token ids of the table `embedding.weight` or `output.weight`."""
        return self.embedding if table == EMBEDDING else self.output

    def parameter_of(self, table: Parameter) -> Parameter | None:
        """Trained rows `[n, M]` of a table `[V, M]`, initially the table's; None without any."""
        if not (ids := self.ids_of(table.name)):
            return None
        name = table.name.rpartition(".")[0] + TOKEN_ROWS
        return replace(
            table, name=name, shape=(len(ids), *table.shape[1:]), std=None, frozen=False,
            derivation=Derivation(table, ids),
        )  # fmt: skip

    def problems(self, vocab_size: int, *, tie_embeddings: bool) -> Iterator[Problem]:
        """Problems with a model's vocabulary."""
        if not self.embedding and not self.output:
            yield Problem("empty", "embedding", [], "names no token", "name some, or omit trainable_token_indices")
        for table, ids in (("embedding", self.embedding), ("output", self.output)):
            if beyond := [id for id in ids if id >= vocab_size]:
                rule = f"must be below vocab_size (={vocab_size})"
                yield Problem("out_of_range", table, beyond[0], rule, "name tokens of the tokenizer")
            if len(set(ids)) < len(ids):
                repeated_id, _ = Counter(ids).most_common(1)[0]
                yield Problem("duplicate", table, repeated_id, "occurs twice", "name each token once")
        if tie_embeddings and self.output:
            rule = "conflicts with tie_embeddings: both tables are one"
            yield Problem("conflict", "output", list(self.output), rule, "name the tokens in embedding alone")
