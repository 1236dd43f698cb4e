"""Seconds of kernels on one device: forms with a few constants each, which `benchmarks/device_constants.py` fits on
what was measured of real GPUs.

Two laws hold for all, and the search proves its bounds by them: no size that grows makes a kernel faster, and a row
(a token, a byte) takes no less in a smaller kernel than in a larger one. Every term is a constant and a share of the
rows with coefficients of at least 0; sums of such terms, the smaller and the larger of two, and their root of squares
keep both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf, log2, sqrt

USUAL_WIDTHS = 256
"""Widths of a head's scores and values together in most models, and where attention is calibrated."""


@dataclass(frozen=True)
class MatrixProducts:
    """A product of (rows, inputs) and (inputs, outputs)."""

    flops_per_s: float
    bytes_per_s: float = inf
    item_bytes: float = 2.0
    """Bytes of an element of an operand."""
    output_bytes: float = 2.0
    start_s: float = 0.0
    depth_s: float = 0.0
    """A tile's walk over a thousand inputs, however few tiles there are."""
    depth_power: float = 0.5
    fill: float = 0.0
    """Steps of `inputs` that a tile's beginning and end take."""
    half_rows: float = 0.0
    """Rows at which half of the rate is reached."""
    quantise_s: float = 0.0
    """Seconds per element of the rows that is quantised before the product."""

    @property
    def knee_rows(self) -> float:
        """Rows at which half of the rate is reached: as fitted, or those for which reading the other operand takes as
        long as arithmetic."""
        return max(self.half_rows, self.item_bytes * self.flops_per_s / (2 * self.bytes_per_s))

    def seconds(self, rows: float, inputs: float, outputs: float, *, quantises: bool = True) -> float:
        """Three bounds as a root of squares: arithmetic, memory, and the walk of one tile; and the rows made narrow for
        it, where they are not yet."""
        if not rows:
            return 0.0
        arithmetic = 2 * (rows + self.half_rows) * outputs * (inputs + self.fill) / self.flops_per_s
        moved_bytes = self.output_bytes * rows * outputs + self.item_bytes * inputs * (rows + outputs)
        memory = moved_bytes / self.bytes_per_s
        walk = self.depth_s * (inputs / 1000) ** self.depth_power if self.depth_s else 0.0
        slowest = sqrt(arithmetic * arithmetic + memory * memory + walk * walk)
        return self.start_s + (self.quantise_s * rows * inputs if quantises else 0.0) + slowest

    def achieved_flops_per_s(self, size: int) -> float:
        """Operations a second of a product of so many rows, inputs and outputs; its own rate where nothing of few rows
        was fitted."""
        return 2 * size**3 / self.seconds(size, size, size) if self.start_s else self.flops_per_s


_TILE = 128


@dataclass(frozen=True)
class GroupedExperts:
    """A layer of experts on the rank that has them, forward: rows permuted, multiplied, and added up again."""

    flops_per_s: float
    bytes_per_s: float = inf
    """Rate at which weights are read, each expert's once."""
    item_bytes: float = 2.0
    """Bytes of a weight."""
    start_s: float = 0.0
    row_s: float = 0.0
    """Seconds per element of the rows, which are gathered, read, written and added up."""
    hidden_s: float = 0.0
    """Seconds per element of the rows' hidden states."""
    token_s: float = 0.0
    """Seconds per element of the rank's tokens, before they are permuted."""
    half_rows: float = 0.0
    """Rows of an expert at which half of the rate is reached."""
    tile: int = _TILE
    """Hidden units are multiplied in so many at a time."""

    @property
    def knee_rows(self) -> float:
        """Rows of an expert at which half of the rate is reached, as of other products."""
        return max(self.half_rows, self.item_bytes * self.flops_per_s / (2 * self.bytes_per_s))

    def seconds(
        self, rows: float, tokens: float, experts: float, width: float, hidden_dim: float, num_matrices: int
    ) -> float:
        """`rows` of width `width` for `experts` of hidden width `hidden_dim`, of a rank that has `tokens`."""
        if not rows:
            return 0.0
        matrices = num_matrices * width * ceil(hidden_dim / self.tile) * self.tile
        return (
            self.start_s
            + 2 * (rows + self.half_rows * experts) * matrices / self.flops_per_s
            + min(rows, experts) * matrices * self.item_bytes / self.bytes_per_s
            + rows * width * self.row_s
            + rows * hidden_dim * self.hidden_s
            + tokens * width * self.token_s
        )

    def permuted_s(self, rows: float, tokens: float, width: float) -> float:
        """Seconds of these in which rows are gathered and added up."""
        return width * (rows * self.row_s + tokens * self.token_s)


@dataclass(frozen=True)
class FusedAttention:
    """Scores and the weighing of values for heads of one width, forward."""

    flops_per_s: float
    start_s: float = 0.0
    chain_s: float = 0.0
    """A position that a block of queries walks over, however few heads there are."""
    query_s: float = 0.0
    """Seconds per element of queries and of heads' outputs."""
    key_s: float = 0.0
    """Seconds per element of keys and values."""
    window_query_s: float = 0.0
    window_key_s: float = 0.0
    """The same two once more, where a window cuts the walk short."""
    block: int = 128
    """Positions of a block, of which that on the diagonal is computed whole."""
    backward: float = 3.0
    """Times the forward pass that the backward pass takes: 2.5 times its operations, as scores are made again, at 0.78
    to 0.86 of its rate (FlashAttention-2 and -3, arXiv 2307.08691 and 2407.08608, figures 5 and 6)."""

    def seconds(
        self, rows: float, length: float, heads: float, key_heads: float, widths: float,
        window: float | None = None, *, causal: bool = True,
    ) -> float:  # fmt: skip
        """`rows` queries in sequences of `length`; `widths`: of a head's scores and values together; `window`:
        positions that a query looks back at most."""
        span = min(length, window or length)
        numbers = rows * widths
        seconds = full = (
            2 * numbers * heads * self._looked_at(length, length, causal=causal) / self.flops_per_s
        )
        if span < length:
            part = 2 * numbers * heads * self._looked_at(span, length, causal=causal) / self.flops_per_s
            ends = numbers * (self.window_query_s * heads + self.window_key_s * min(key_heads, heads / 2))
            seconds = min(full, part + ends)
        return (
            self.start_s
            + self.chain_s * min(span + self.block, length)
            + seconds
            + numbers * (self.query_s * heads + self.key_s * key_heads)
        )

    def achieved_flops_per_s(self, heads: int, length: int, widths: int) -> float:
        """Operations a second, as they are counted of pairs that all see each other; its own rate where nothing beside
        it was fitted."""
        if not self.start_s:
            return self.flops_per_s
        seconds = self.seconds(length, length, heads, heads, widths, causal=False)
        return 2 * length * length * widths * heads / seconds

    def _looked_at(self, span: float, length: float, *, causal: bool) -> float:
        """Positions, those of half a block on the diagonal among them."""
        if not causal:
            return span
        positions = span - span * span / (2 * length) + self.block / 2
        return min(positions, (length + self.block) / 2)


@dataclass(frozen=True)
class CollectiveCost:
    """An operation over ranks that are alike: `size` bytes are a rank's whole buffer."""

    bytes_per_s: float
    """Rate of what leaves a rank, or comes to it."""
    start_s: float = 0.0
    step_s: float = 0.0
    """A further rank."""
    doubling_s: float = 0.0
    """A doubling of ranks."""
    own_bytes_per_s: float = inf
    """A rank's own share, which is copied too, as fast at least."""
    ramp_s: float = 0.0
    """Seconds until all channels are full, in proportion up to `knee_bytes`."""
    knee_bytes: float = 1.0

    def latency_s(self, ranks: int) -> float:
        """Steps one after the other, of no bytes."""
        return self.step_s * (ranks - 1) + self.doubling_s * (ranks - 1).bit_length()

    def begin_s(self, size: float) -> float:
        """Launch, and channels that fill."""
        return self.start_s + self.ramp_s * min(1.0, size / self.knee_bytes)

    def seconds(self, size: float, ranks: int) -> float:
        """Seconds over ranks that are joined by links of one kind."""
        if ranks == 1:
            return 0.0
        transfer_s = size * (ranks - 1) / ranks / self.bytes_per_s + size / ranks / self.own_bytes_per_s
        return self.begin_s(size) + self.latency_s(ranks) + transfer_s


@dataclass(frozen=True)
class ExchangeCost:
    """A fused dispatch to experts, or combine: a token's row travels once to each node, and once to each rank."""

    start_s: float
    link_bytes_per_s: float
    """Rate between the ranks of a node."""
    own_bytes_per_s: float
    """Rate at which a rank reads or writes its rows, once each."""
    copy_s: float
    """A copy of a row."""
    hop_s: float = 0.0
    """A doubling of nodes."""
    line_bytes_per_s: float = inf
    """Rate between nodes."""
    forward_bytes_per_s: float = inf
    """Rows to other nodes, on their way through a rank of their own."""
    most_nodes: int = 1
    """Nodes that it was measured over at most: over more its time is extrapolated."""

    def times_as_fast(self, rate: float) -> "ExchangeCost":
        """The cost of a release whose rows move `rate` times as fast within a domain."""
        return replace(
            self, link_bytes_per_s=rate * self.link_bytes_per_s, own_bytes_per_s=rate * self.own_bytes_per_s,
            copy_s=self.copy_s / rate, forward_bytes_per_s=rate * self.forward_bytes_per_s,
        )  # fmt: skip

    def seconds(
        self, tokens: float, row_bytes: float, copies: float, across: float, nodes: int, ranks: int
    ) -> float:
        """`tokens` of a rank, each to `copies` ranks and `across` nodes but its own, of `nodes` with `ranks` each."""
        within = (
            self.copy_s * copies
            + row_bytes / self.own_bytes_per_s
            + row_bytes * copies * (ranks - 1) / ranks / self.link_bytes_per_s
            + row_bytes * across / self.forward_bytes_per_s
        )
        begin = self.start_s + self.hop_s * log2(nodes)
        return begin + tokens * max(row_bytes * across / self.line_bytes_per_s, within)


@dataclass(frozen=True)
class Kernels:
    """Constants of one device."""

    products: Mapping[str, MatrixProducts]
    """Constants by dtype of the operands; a dtype that the device lacks is not there."""
    experts: Mapping[str, GroupedExperts]
    attention: Mapping[int, FusedAttention]
    """Constants by the widths of a head's scores and values together."""
    ring: CollectiveCost
    """Gathers, scatters and all-reduces in a node."""
    all_to_all: CollectiveCost
    exchange: ExchangeCost | None = None
    attention_dtype: str = "bfloat16"
    """Dtype that attention was measured in."""

    def attention_of(self, widths: float, dtype: str | None = None) -> FusedAttention:
        """Constants of the nearest width; in another dtype than was measured at the ratio of both in products."""
        nearest = self.attention[min(self.attention, key=lambda width: (abs(log2(width / widths)), width))]
        if dtype in (None, self.attention_dtype):
            return nearest
        products, base_products = self.products[dtype], self.products[self.attention_dtype]
        wider = products.item_bytes / base_products.item_bytes
        return replace(
            nearest, flops_per_s=nearest.flops_per_s * products.flops_per_s / base_products.flops_per_s,
            query_s=wider * nearest.query_s, key_s=wider * nearest.key_s,
        )  # fmt: skip
