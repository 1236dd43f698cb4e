"""Time models of kernels on one device; `benchmarks/device_constants.py` fits their constants to GPU measurements.

The bounds of the search rely on two properties: larger sizes are never faster, and a row (token, byte) never takes
less time in a smaller kernel. Terms are a constant plus a share of the rows with non-negative coefficients; sums,
minimum, maximum and root of squares preserve both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf, log2, sqrt

USUAL_WIDTHS = 256
"""Query-key plus value head dimension of most models, and of the attention calibration."""


@dataclass(frozen=True)
class MatrixProducts:
    """Product of (rows, inputs) and (inputs, outputs)."""

    flops_per_s: float
    bytes_per_s: float = inf
    item_bytes: float = 2.0
    output_bytes: float = 2.0
    start_s: float = 0.0
    depth_s: float = 0.0
    """One tile's loop over 1,000 inputs."""
    depth_power: float = 0.5
    fill: float = 0.0
    """Prologue and epilogue of a tile, in steps of `inputs`."""
    half_rows: float = 0.0
    quantise_s: float = 0.0
    """Per element of the rows, quantized first."""

    @property
    def knee_rows(self) -> float:
        """Rows at half of the rate: fitted, or where reading the other operand takes as long as arithmetic."""
        return max(self.half_rows, self.item_bytes * self.flops_per_s / (2 * self.bytes_per_s))

    def seconds(self, rows: float, inputs: float, outputs: float, *, quantises: bool = True) -> float:
        """Root of squares of arithmetic, memory and one tile's loop; plus quantizing the rows."""
        if not rows:
            return 0.0
        arithmetic = 2 * (rows + self.half_rows) * outputs * (inputs + self.fill) / self.flops_per_s
        moved_bytes = self.output_bytes * rows * outputs + self.item_bytes * inputs * (rows + outputs)
        memory = moved_bytes / self.bytes_per_s
        walk = self.depth_s * (inputs / 1000) ** self.depth_power if self.depth_s else 0.0
        slowest = sqrt(arithmetic * arithmetic + memory * memory + walk * walk)
        return self.start_s + (self.quantise_s * rows * inputs if quantises else 0.0) + slowest

    def achieved_flops_per_s(self, size: int) -> float:
        """Rate of a product with `size` rows, inputs and outputs; the peak rate if launch time was not fitted."""
        return 2 * size**3 / self.seconds(size, size, size) if self.start_s else self.flops_per_s


_TILE = 128


@dataclass(frozen=True)
class GroupedExperts:
    """A rank's experts, forward: rows permuted, multiplied and combined."""

    flops_per_s: float
    bytes_per_s: float = inf
    """Reading weights, once per expert."""
    item_bytes: float = 2.0
    start_s: float = 0.0
    row_s: float = 0.0
    """Per element of model-sized rows: gathered, read, written, combined."""
    hidden_s: float = 0.0
    token_s: float = 0.0
    """Per element of the rank's tokens before permutation."""
    half_rows: float = 0.0
    tile: int = _TILE

    @property
    def knee_rows(self) -> float:
        """Rows per expert at half of the rate."""
        return max(self.half_rows, self.item_bytes * self.flops_per_s / (2 * self.bytes_per_s))

    def seconds(
        self, rows: float, tokens: float, experts: float, width: float, hidden_dim: float, num_matrices: int
    ) -> float:
        """`rows` of `width` for `experts` of `hidden_dim`, on a rank with `tokens`."""
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

    def permutation_s(self, rows: float, tokens: float, width: float) -> float:
        """The part that gathers and combines rows."""
        return width * (rows * self.row_s + tokens * self.token_s)


@dataclass(frozen=True)
class FusedAttention:
    """Scores and weighted sum of values for one head width, forward."""

    flops_per_s: float
    start_s: float = 0.0
    chain_s: float = 0.0
    """Per position in one query block's loop."""
    query_s: float = 0.0
    """Per element of queries and outputs."""
    key_s: float = 0.0
    """Per element of keys and values."""
    window_query_s: float = 0.0
    window_key_s: float = 0.0
    """Both again, if a window shortens the loop."""
    block: int = 128
    """Block size; the diagonal block is computed in full."""
    backward: float = 3.0
    """Backward over forward time: 2.5 times the FLOPs, as scores are recomputed, at 0.78 to 0.86 of the rate
    (FlashAttention-2 and -3, arXiv 2307.08691 and 2407.08608, figures 5 and 6)."""

    def seconds(
        self, rows: float, length: float, heads: float, key_heads: float, widths: float,
        window: float | None = None, *, causal: bool = True,
    ) -> float:  # fmt: skip
        """`rows` queries in sequences of `length`. `widths`: query-key plus value dimension of a head; `window`:
        sliding window."""
        span = min(length, window or length)
        numbers = rows * widths
        seconds = full = (
            2 * numbers * heads * self._attended_positions(length, length, causal=causal) / self.flops_per_s
        )
        if span < length:
            part = 2 * numbers * heads * self._attended_positions(span, length, causal=causal) / self.flops_per_s
            ends = numbers * (self.window_query_s * heads + self.window_key_s * min(key_heads, heads / 2))
            seconds = min(full, part + ends)
        return (
            self.start_s
            + self.chain_s * min(span + self.block, length)
            + seconds
            + numbers * (self.query_s * heads + self.key_s * key_heads)
        )

    def achieved_flops_per_s(self, heads: int, length: int, widths: int) -> float:
        """Rate of attention without a mask; the peak rate if launch time was not fitted."""
        if not self.start_s:
            return self.flops_per_s
        seconds = self.seconds(length, length, heads, heads, widths, causal=False)
        return 2 * length * length * widths * heads / seconds

    def _attended_positions(self, span: float, length: float, *, causal: bool) -> float:
        """Positions computed per query, with half a block on the diagonal."""
        if not causal:
            return span
        positions = span - span * span / (2 * length) + self.block / 2
        return min(positions, (length + self.block) / 2)


@dataclass(frozen=True)
class CollectiveCost:
    """Collective over equal ranks; `size` is the bytes of a rank's whole buffer."""

    bytes_per_s: float
    """Bandwidth out of a rank, or into it."""
    start_s: float = 0.0
    step_s: float = 0.0
    """Latency per further rank."""
    doubling_s: float = 0.0
    """Latency per doubling of ranks."""
    own_bytes_per_s: float = inf
    """Copy of a rank's own share; at least `bytes_per_s`."""
    ramp_s: float = 0.0
    """Until all channels are used, proportional to size up to `knee_bytes`."""
    knee_bytes: float = 1.0

    def latency_s(self, ranks: int) -> float:
        """Latency of all sequential steps."""
        return self.step_s * (ranks - 1) + self.doubling_s * (ranks - 1).bit_length()

    def startup_s(self, size: float) -> float:
        return self.start_s + self.ramp_s * min(1.0, size / self.knee_bytes)

    def seconds(self, size: float, ranks: int) -> float:
        """Over ranks joined by links of one kind."""
        if ranks == 1:
            return 0.0
        transfer_s = size * (ranks - 1) / ranks / self.bytes_per_s + size / ranks / self.own_bytes_per_s
        return self.startup_s(size) + self.latency_s(ranks) + transfer_s


@dataclass(frozen=True)
class ExchangeCost:
    """Fused dispatch or combine: a row is sent once to each node and once to each rank."""

    start_s: float
    link_bytes_per_s: float
    own_bytes_per_s: float
    """Reading, or writing, each row once."""
    copy_s: float
    hop_s: float = 0.0
    """Latency per doubling of nodes."""
    line_bytes_per_s: float = inf
    forward_bytes_per_s: float = inf
    """Rows to other nodes, through a rank of the own node."""
    most_nodes: int = 1
    """Most nodes measured; beyond, time is extrapolated."""

    def with_speedup(self, rate: float) -> "ExchangeCost":
        """The kernel of a release that moves rows within a node at `rate` times the speed."""
        return replace(
            self, link_bytes_per_s=rate * self.link_bytes_per_s, own_bytes_per_s=rate * self.own_bytes_per_s,
            copy_s=self.copy_s / rate, forward_bytes_per_s=rate * self.forward_bytes_per_s,
        )  # fmt: skip

    def seconds(
        self, tokens: float, row_bytes: float, copies: float, other_nodes: float, nodes: int, ranks: int
    ) -> float:
        """`tokens` per rank, each to `copies` ranks and `other_nodes` other nodes; `nodes` of `ranks` each."""
        intra_node_s = (
            self.copy_s * copies
            + row_bytes / self.own_bytes_per_s
            + row_bytes * copies * (ranks - 1) / ranks / self.link_bytes_per_s
            + row_bytes * other_nodes / self.forward_bytes_per_s
        )
        begin = self.start_s + self.hop_s * log2(nodes)
        return begin + tokens * max(row_bytes * other_nodes / self.line_bytes_per_s, intra_node_s)


@dataclass(frozen=True)
class Kernels:
    """Kernel constants of one device."""

    products: Mapping[str, MatrixProducts]
    """By dtype of the operands, if supported."""
    experts: Mapping[str, GroupedExperts]
    attention: Mapping[int, FusedAttention]
    """By query-key plus value head dimension."""
    ring: CollectiveCost
    """All-gather, reduce-scatter and all-reduce within a node."""
    all_to_all: CollectiveCost
    exchange: ExchangeCost | None = None
    attention_dtype: str = "bfloat16"
    """Dtype of the attention measurements."""

    def attention_of(self, widths: float, dtype: str | None = None) -> FusedAttention:
        """Constants of the nearest width; for other dtypes, scaled by the ratio of product rates."""
        nearest = self.attention[min(self.attention, key=lambda width: (abs(log2(width / widths)), width))]
        if dtype in (None, self.attention_dtype):
            return nearest
        products, base_products = self.products[dtype], self.products[self.attention_dtype]
        wider = products.item_bytes / base_products.item_bytes
        return replace(
            nearest, flops_per_s=nearest.flops_per_s * products.flops_per_s / base_products.flops_per_s,
            query_s=wider * nearest.query_s, key_s=wider * nearest.key_s,
        )  # fmt: skip
