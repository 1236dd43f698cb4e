"""Lightning indexer of DeepSeek sparse attention."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, model_validator

from moe.spec.base import Count, CountOrZero, NonNegative, Spec
from moe.spec.block import SelectionDims
from moe.spec.errors import Problem, SpecError
from moe.spec.parameter import Parameter, Size, bias, frozen, linear, norm

QUERIES_AT_ONCE = 256
"""Queries per block of sparse attention, at most."""
SCORES_AT_ONCE = 1 << 25
"""Scores of all heads per block of queries, at most."""


class IndexerSpec(Spec):
    """Lightning indexer of DeepSeek sparse attention (DSA, arXiv 2512.02556, section 2.1): scores all earlier tokens
    for each query, which attends to the `top_k` with the highest scores."""

    num_heads: Count
    head_dim: Count
    """Dimension of a head, and of the key that all heads share. Its first dimensions, as many as the attention's
    `rope_dim`, are rotary."""
    top_k: Count
    """Number of tokens that a query attends to, at most."""
    pairing: Literal["half", "interleaved"] = "half"
    """Dimensions that rotate together, as in `rope`; independent of the attention's own."""
    shared_layers: tuple[CountOrZero, ...] = Field(default=(), max_length=10_000)
    """Layers without an indexer, counted from 0: they attend to the tokens chosen in the last layer before them that
    has one (GLM-5.2)."""
    loss_coefficient: NonNegative = 0.0
    """Weight of the indexer's loss: per token and layer, the KL divergence of the softmax of its scores from the
    attention's distribution, mean over heads (equations 3 and 4). It trains the indexer alone. 0: the indexer is
    frozen."""
    stage: Literal["sparse", "dense"] = "sparse"
    """`dense`: warm-up of the indexer. Queries attend to all earlier tokens, and the loss covers all of them; freeze
    the other parameters by `train.freeze`."""

    @model_validator(mode="after")
    def _coherent(self) -> "IndexerSpec":
        if self.stage == "dense" and self.loss_coefficient == 0:
            raise SpecError([Problem("requires", "stage", self.stage, "trains the indexer, which is frozen",
                                     "set loss_coefficient, or omit stage")])  # fmt: skip
        return self

    def problems(self, query_rank: int | None, rope_dim: int) -> Iterator[Problem]:
        """Problems in an attention of these dimensions."""
        if query_rank is None:
            yield Problem("requires", "indexer", None, "projects its queries from the latent of query_rank",
                          "set query_rank, or omit indexer")  # fmt: skip
        if self.head_dim < rope_dim:
            yield Problem("out_of_range", "indexer.head_dim", self.head_dim, f"must be at least rope_dim (={rope_dim})",
                          "raise it")  # fmt: skip

    def layer_problems(self, layers: Sequence[int], num_layers: int) -> Iterator[Problem]:
        """Problems in a model of `num_layers`, of which `layers` have this attention."""
        path = "attention.indexer.shared_layers"
        if beyond := [layer for layer in self.shared_layers if layer >= num_layers]:
            yield Problem("out_of_range", path, beyond[0], f"must be below num_layers (={num_layers})",
                          "count layers from 0")  # fmt: skip
        elif layers and layers[0] in self.shared_layers:
            yield Problem("out_of_range", path, layers[0], f"must be above {layers[0]}, the first with this attention",
                          "let the first layer have an indexer")  # fmt: skip

    def is_in(self, layer: int) -> bool:
        """Whether this layer has an indexer."""
        return layer not in self.shared_layers

    def parameters(self, model_dim: int, query_rank: int) -> tuple[Parameter, ...]:
        """Parameters of a layer, replicated over tensor ranks, each of which scores a share of the queries."""
        heads: Size = ("none", self.num_heads)
        queries: Size = ("none", self.num_heads * self.head_dim)
        key: Size = ("none", self.head_dim)
        width: Size = ("model", model_dim)
        table = (
            linear("query", queries, ("none", query_rank)),
            linear("key", key, width),
            norm("key_norm", self.head_dim),
            bias("key_norm", key),
            linear("head_weights", heads, width),
        )
        return table if self.loss_coefficient else frozen(table)

    def dims(self, key_value_rank: int, rope_dim: int) -> SelectionDims:
        """Dimensions of a layer with an indexer, in an attention with these."""
        return SelectionDims(
            self.top_k, self.num_heads, self.head_dim, is_trained=bool(self.loss_coefficient),
            attends_to_all=self.stage == "dense",
            gathered_width=2 * key_value_rank + rope_dim,
            gathered_key=key_value_rank + rope_dim,
        )  # fmt: skip
