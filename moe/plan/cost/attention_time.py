"""Predicted time of a layer's attention apart from its projections: pairs of queries and keys, an indexer's scores, and
what ranks exchange for them."""

from moe.plan.cluster.kernels import Kernels
from moe.plan.cost.collectives import Network, Ranks
from moe.plan.cost.context_exchange import exchange_of_layer, key_value_width, received_elements
from moe.plan.cost.flops import attended_positions, index_flops, pairs_flops, trains_indexer
from moe.plan.cost.layer_bytes import BYTES_PER_ELEMENT
from moe.plan.cost.micro_batch import Passes
from moe.plan.cost.units import BACKWARD
from moe.spec import JobSpec
from moe.spec.block import AttentionDims
from moe.spec.parallel import ContextExchange


class AttentionTime:
    """Time of attention in one job. `is_peer`: whether another executor runs it; its context ranks exchange keys and
    values in a ring."""

    def __init__(self, spec: JobSpec, kernels: Kernels, network: Network, *, is_peer: bool) -> None:
        self._spec, self._kernels, self._network, self._is_peer = spec, kernels, network, is_peer
        self._width = BYTES_PER_ELEMENT[spec.train.dtype]
        self._latent_rate = kernels.products[spec.train.dtype].flops_per_s
        self._index_rate = kernels.products["float32"].flops_per_s

    def context_exchange_s(
        self,
        dims: AttentionDims,
        positions: float,
        tensor: int,
        context: int,
        passes: Passes,
        context_exchange: ContextExchange,
    ) -> float:
        """Exchanges of one attention between context ranks, each with `positions`. A peer's is a ring."""
        ranks = Ranks(context, tensor)
        if self._is_peer:
            keys = self._width * positions * dims.kept_keys_and_values / tensor * context
            return (passes.over_activations + passes.backward) * self._network.gather(keys, ranks)
        row_tokens = self._spec.data.padded_tokens
        received = received_elements(dims, context_exchange, positions, context, tensor, row_tokens)
        element_bytes = self._width * context / (context - 1)  # the network counts a rank's own part, too
        is_gathered = exchange_of_layer(dims, context_exchange) == "gather"
        collective = self._network.gather if is_gathered else self._network.all_to_all
        forward_s = collective(element_bytes * received.forward, ranks) if received.forward else 0.0
        backward_s = collective(element_bytes * received.backward, ranks) if received.backward else 0.0
        return passes.forwards * forward_s + passes.backward * backward_s

    def gathered_latents_s(
        self, dims: AttentionDims, positions: float, tensor: int, context: int, passes: Passes
    ) -> float:
        """Products that give the keys and values of other context ranks' latents."""
        if dims.key_value_latent is None:
            return 0.0
        flops = 2.0 * (context - 1) * positions * dims.key_value_latent * key_value_width(dims) / tensor
        return (passes.forwards + BACKWARD * passes.backward) * flops / self._latent_rate

    def pairs_s(self, dims: AttentionDims, positions: float, tensor: int, context: int, passes: Passes) -> float:
        """Scores and the weighted sum of values; the backward pass recomputes scores."""
        length, heads = self._spec.data.padded_tokens, dims.heads / tensor
        widths, dtype = (dims.queries + dims.values) / dims.heads, self._spec.train.dtype
        kernel = self._kernels.attention_of(widths, "bfloat16" if dtype == "fp8" else dtype)
        if dims.chunk:
            forward = positions / tensor * pairs_flops(dims, attended_positions(dims, length)) / kernel.flops_per_s
        elif dims.selection is not None and dims.gathers(length):
            gathered_width = dims.selection.top_k * dims.selection.gathered_width
            forward = positions * heads * 2.0 * gathered_width / kernel.flops_per_s
        else:
            # A context rank has a share of each sequence's queries, and all keys.
            window = None if dims.in_chunks else dims.window
            row_tokens = min(length, dims.window or length) if dims.in_chunks else length
            forward = kernel.seconds(
                positions * context, row_tokens, heads, dims.key_heads / tensor,
                (dims.queries + dims.values) / dims.heads, window, causal=dims.causal,
            ) / context  # fmt: skip
        seconds = (passes.forwards + kernel.backward * passes.backward) * forward
        if dims.selection is None:
            return seconds
        # Masked tokens cost as much as others; blocks of queries are recomputed in the backward pass.
        seconds += passes.backward * forward * dims.selects(length)
        return seconds + positions / tensor * self._index_flops(dims, length, passes) / self._index_rate

    def selection_gather_s(self, dims: AttentionDims, positions: float, tensor: int) -> float:
        """All-gathers of an indexer's keys and head weights, and of what each tensor rank selects for its queries."""
        selection = dims.selection
        if selection is None or tensor == 1 or not index_flops(dims, self._spec.data.padded_tokens):
            return 0.0
        row_bytes = self._width * selection.head_dim + 4 * selection.heads
        row_bytes += 4 * selection.top_k * dims.selects(self._spec.data.padded_tokens)
        return self._network.gather(positions * row_bytes, Ranks(tensor))

    def _index_flops(self, dims: AttentionDims, length: float, passes: Passes) -> float:
        """FLOPs of one query's index scores: for the selection, and of an indexer with a loss again, with their
        gradients and the distribution that it learns."""
        scores = index_flops(dims, length)
        flops = passes.forwards * scores * dims.selects(length)
        if trains_indexer(dims):
            flops += passes.forward * ((1 + BACKWARD) * scores + dims.queries * length)
        return flops
