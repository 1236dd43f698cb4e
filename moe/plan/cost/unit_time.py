"""Predicted time of a unit for one micro-batch."""

from functools import cache

from moe.plan.candidate import Recompute
from moe.plan.cluster.cluster import Cluster
from moe.plan.cluster.kernels import MatrixProducts
from moe.plan.cost.attention_time import AttentionTime
from moe.plan.cost.collectives import Network, Ranks
from moe.plan.cost.context_exchange import exchange_of_layer
from moe.plan.cost.layer_bytes import BYTES_PER_ELEMENT
from moe.plan.cost.micro_batch import MicroBatch, Passes, recomputed_passes
from moe.plan.cost.skew import rank_skew
from moe.plan.cost.state import StateCounter
from moe.plan.cost.unit_seconds import UnitSeconds
from moe.plan.cost.units import Matrix, Part, Unit
from moe.plan.degrees import ShardCounts, WorkSplit
from moe.plan.profile import Profile
from moe.plan.software import FUSED, Software
from moe.spec import JobSpec, MoESpec
from moe.spec.parallel import ContextExchange

_WIDE = 4
"""Bytes per element of the optimizer's weights and gradients."""
_NARROW = 1 + 4 / 128
"""Bytes per fp8 element, with a scale for each 128 of them."""


class UnitTime:
    """Time of units of one job on one cluster; results are cached."""

    def __init__(
        self, spec: JobSpec, cluster: Cluster, profile: Profile, software: Software, network: Network, load_skew: float
    ) -> None:
        self._spec, self._device, self._network = spec, cluster.calibrated_device, network
        self._load_skew, self._m = load_skew, spec.model.model_dim
        self._width = BYTES_PER_ELEMENT[spec.train.dtype]
        self._profile, self._software = profile, software
        self._gathered_width = max(4, self._width) if profile.gathers_in_float32 else self._width
        kernels, dtype = self._device.kernels, spec.train.dtype
        self._kernels, self._products, self._experts = (kernels, kernels.products[dtype], kernels.experts[dtype])
        self._wide_products = kernels.products["bfloat16" if dtype == "fp8" else dtype]
        self._of_attention = AttentionTime(spec, kernels, network, is_peer=profile.name != "ours")
        self._reference_passes = spec.num_extra_passes
        self._recomputes_logits = int(spec.has_reference)
        self._exchange = None
        if software.is_fused and network.exchange is not None:
            self._exchange = network.exchange.with_speedup(software.exchange_rate)
        self._counter = StateCounter(spec.train.optimizer)
        self.unit_seconds, self._gathers_s = cache(self._seconds_of_unit), cache(self._seconds_of_gathers)
        self._attention, self._dense = cache(self._seconds_of_attention), cache(self._seconds_of_dense)
        self._rows_s = cache(self._seconds_of_rows)

    def _seconds_of_unit(self, unit: Unit, micro_batch: MicroBatch) -> UnitSeconds:
        if micro_batch.fsdp > 1 or micro_batch.expert_fsdp > 1:
            without_gathers = self.unit_seconds(unit, micro_batch._replace(fsdp=1, expert_fsdp=1, prefetches=True))
            return self._with_gathers(without_gathers, unit, micro_batch)
        seconds = UnitSeconds()
        if unit.attentions or unit.vocabulary is not None:
            seconds = self._attention(
                unit,
                micro_batch.groups,
                micro_batch.split.tensor,
                micro_batch.split.context,
                micro_batch.full_recompute,
                micro_batch.context_exchange,
            )
        if unit.feed_forward is not None:
            seconds = seconds.plus(
                self._dense(
                    unit, micro_batch.groups, micro_batch.split.tensor, micro_batch.split.context, micro_batch.recompute
                )
            )
        elif unit.moe is not None:
            seconds = seconds.plus(self._seconds_of_experts(unit, unit.moe, micro_batch))
        if unit.quantized_weights and (decoded_s := self._decoded_s(unit, micro_batch)):
            seconds = seconds._replace(elementwise_s=seconds.elementwise_s + decoded_s)
        if gradient_casts_s := self._gradient_casts_s(unit, micro_batch):
            seconds = seconds._replace(elementwise_s=seconds.elementwise_s + gradient_casts_s)
        if not micro_batch.overlap:
            return seconds
        idle_s = seconds.busy_s - seconds.hidden_s  # computation hides one collective only
        hidden_s = self._software.exchange_overlap * min(seconds.all_to_all_s, idle_s)
        exposed_s = seconds.all_to_all_s - hidden_s
        return seconds._replace(all_to_all_s=exposed_s, hidden_s=seconds.hidden_s + hidden_s)

    def _positions(self, unit: Unit, groups: int, context: int) -> float:
        return groups * self._spec.group_tokens / unit.sides / context

    def _seconds_of_rows(
        self, unit: Unit, part: Part, positions: float, tensor: int, passes: Passes, hidden_passes: float
    ) -> float:
        """Matrix products of one part of a unit. `hidden_passes`: recomputed forward passes of those that give hidden
        states, apart from whole blocks."""
        products = self._wide_products if unit.vocabulary is not None else self._products
        seconds = 0.0
        for matrix, count in unit.matrices(tensor, part):
            rows = positions if matrix.is_split else positions / tensor
            forward = products.seconds(rows, matrix.inputs, matrix.outputs, quantises=matrix.is_first)
            matrix_s = passes.forward * forward
            if not matrix.is_adapter:
                matrix_s += passes.reference * forward
            if passes.backward:
                matrix_s += passes.backward * self._backward_s(products, matrix, rows, forward)
                matrix_s += passes.backward * matrix.gives_hidden * hidden_passes * forward
            seconds += count * matrix_s
        return seconds / self._software.host.sustained

    @staticmethod
    def _backward_s(products: MatrixProducts, matrix: Matrix, rows: float, forward_s: float) -> float:
        """Gradients of both factors, and an adapter's recomputed first half."""
        seconds = products.seconds(rows, matrix.outputs, matrix.inputs)
        if matrix.is_trained:
            seconds += products.seconds(matrix.inputs, rows, matrix.outputs, quantises=False)  # already are
        return seconds + forward_s if matrix.is_recomputed else seconds

    def _seconds_of_attention(
        self,
        unit: Unit,
        groups: int,
        tensor: int,
        context: int,
        full_recompute: float,
        context_exchange: ContextExchange,
    ) -> UnitSeconds:
        """A layer's attention, or the head's logits."""
        positions, m = self._positions(unit, groups, context), self._m
        width, software = self._width, self._software
        elementwise = software.elementwise
        # DPO recomputes the logits, as its loss is not a sum over tokens.
        extra_passes = self._recomputes_logits if unit.vocabulary is not None else full_recompute
        passes = self._passes(unit, extra_passes)
        products = self._rows_s(unit, "others", positions, tensor, passes, 0.0)
        of_attention = self._of_attention
        attention = gather = ring = moved_bytes = 0.0
        for dims in unit.attentions:
            attention += of_attention.pairs_s(dims, positions, tensor, context, passes)
            heads = (dims.queries + dims.kept_keys_and_values + dims.values) / tensor
            elements = (
                elementwise.passes * ((3 + unit.extra_norms) * m / tensor + m)
                + (elementwise.normed_passes if dims.has_qk_norms else elementwise.passes) * heads
            )
            moved_bytes += passes.over_activations * 2 * width * positions * elements
            gather += self._into_and_out(positions, tensor, passes.over_activations, dims.gathered)
            gather += passes.forwards * of_attention.selection_gather_s(dims, positions, tensor)
            if context > 1:
                exchange = of_attention.context_exchange_s(dims, positions, tensor, context, passes, context_exchange)
                gather += exchange
                if self._profile.name == "ours":
                    layer_exchange = exchange_of_layer(dims, context_exchange)
                    ring += exchange * (layer_exchange == "ring")
                    if layer_exchange == "gather":
                        products += of_attention.gathered_latents_s(dims, positions, tensor, context, passes)
        attention /= software.host.sustained * software.attention_share
        hidden_s = min(software.tensor_overlap * (gather - ring), products + attention)
        hidden_s += min(software.overlap * ring, attention)
        if unit.vocabulary is not None:
            split = tensor if self._profile.splits_vocabulary else 1
            moved_bytes += passes.over_activations * 4 * positions / tensor * unit.vocabulary
            if split > 1:  # all-gather for each pass, reduce-scatter of gradients
                gather += passes.over_activations * self._network.gather(width * positions * m, Ranks(tensor))
        launches = software.host.layer_s / 2 * passes.over_activations / 3 if unit.attentions else 0.0
        return UnitSeconds(
            products_s=products, attention_s=attention, elementwise_s=self._moved_s(moved_bytes), launches_s=launches,
            gather_s=gather - hidden_s, hidden_s=hidden_s,
        )  # fmt: skip

    def _moved_s(self, num_bytes: float) -> float:
        """Elementwise kernels that move `num_bytes`."""
        elementwise = self._software.elementwise
        share = self._software.host.sustained if elementwise == FUSED else elementwise.share
        return num_bytes / self._device.memory_bytes_per_s / share

    def _gradient_casts_s(self, unit: Unit, micro_batch: MicroBatch) -> float:
        """Casts of gradients to float32, their accumulation, and casts of weights without a saved copy."""
        if self._software.weight_passes is None or self._width >= _WIDE:
            return 0.0
        tensor, _, expert, expert_tensor = micro_batch.split
        state = self._counter.of_unit(unit, ShardCounts(tensor=tensor, expert=expert, expert_tensor=expert_tensor))
        sum_bytes, used_elements = (2 if micro_batch.adds_gradients else 1) * _WIDE, state.trained_used
        moved_bytes = float((self._width + sum_bytes) * used_elements.total * unit.has_backward)
        if self._software.weight_passes == "fused":  # products of experts write the sums themselves
            moved_bytes -= self._width * used_elements.in_experts * unit.has_backward
        if micro_batch.recompute == "full":
            moved_bytes += self._cast_bytes(unit, micro_batch) * state.used.total
        return self._moved_s(moved_bytes)

    def _cast_bytes(self, unit: Unit, micro_batch: MicroBatch) -> float:
        """Bytes moved per weight element by the casts of all passes."""
        passes = self._passes(unit, micro_batch.full_recompute)
        return (passes.forwards + passes.backward) * (_WIDE + self._width)

    def _passes(self, unit: Unit, recompute_passes: float) -> Passes:
        """Passes over a unit if its backward pass recomputes `recompute_passes` forward passes."""
        backward = int(unit.has_backward)
        return Passes(self._reference_passes, 1 + recompute_passes * backward, backward)

    def _decoded_s(self, unit: Unit, micro_batch: MicroBatch) -> float:
        """Dequantization of a frozen base at each product, per chunk for experts. Recomputing hidden states
        dequantizes all of a dense feed-forward layer, but only the first matrices of experts."""
        tensor, _, expert, expert_tensor = micro_batch.split
        shards, device = ShardCounts(tensor=tensor, expert=expert, expert_tensor=expert_tensor), self._device
        seconds = 0.0
        for weight in unit.quantized_weights:
            if weight.item_bytes == self._width:
                continue
            is_last = weight.of_experts and "w_out" in weight.name
            of_hidden = weight.name.startswith("feed_forward.") and not is_last
            passes = self._passes(unit, micro_batch.hidden_recompute if of_hidden else micro_batch.full_recompute)
            is_chunked = weight.of_experts and expert * expert_tensor > 1
            times = (passes.forwards + passes.backward) * (micro_batch.num_chunks if is_chunked else 1)
            element_s = 2 * self._width / device.memory_bytes_per_s
            if weight.item_bytes == 1:
                element_s = max(element_s, 1 / device.decoded_per_s)
            seconds += times * element_s * weight.dequantized_numel(shards)
        return seconds

    def _into_and_out(self, positions: float, tensor: int, passes: float, input_channels: int | None = None) -> float:
        """Exposed all-gather into and reduce-scatter out of a tensor-parallel layer. `input_channels`: by default
        the model dimension."""
        if tensor == 1:
            return 0.0
        width, ranks = self._width * positions, Ranks(tensor)
        inwards = self._m if input_channels is None else input_channels
        return (
            (1 - self._software.tensor_overlap)
            * passes
            * (self._network.gather(width * inwards, ranks) + self._network.gather(width * self._m, ranks))
        )

    def _seconds_of_dense(
        self, unit: Unit, groups: int, tensor: int, context: int, recompute: Recompute
    ) -> UnitSeconds:
        dims = unit.feed_forward
        assert dims is not None
        positions, m = self._positions(unit, groups, context), self._m
        full, hidden_passes = recomputed_passes(recompute)
        passes = self._passes(unit, full)
        products = self._rows_s(unit, "feed_forward", positions, tensor, passes, hidden_passes - full)
        of_hidden = passes.over_activations - full * passes.backward
        elementwise = self._software.elementwise
        numbers = passes.over_activations * 3 * m * elementwise.passes + of_hidden * dims.num_matrices * dims.hidden
        gather = self._into_and_out(positions, tensor, passes.over_activations)
        hidden_s = min(self._software.tensor_overlap * gather, products)
        return UnitSeconds(
            products_s=products, elementwise_s=self._moved_s(2 * self._width * positions * numbers / tensor),
            launches_s=self._software.host.layer_s / 2 * passes.over_activations / 3,
            gather_s=gather - hidden_s, hidden_s=hidden_s,
        )  # fmt: skip

    def _seconds_of_experts(self, unit: Unit, moe: MoESpec, micro_batch: MicroBatch) -> UnitSeconds:
        tensor, context, expert, expert_tensor = micro_batch.split
        m, software, num_chunks = self._m, self._software, micro_batch.num_chunks
        positions = self._positions(unit, micro_batch.groups, context)
        passes, extra_passes = (
            self._passes(unit, micro_batch.full_recompute),
            micro_batch.hidden_recompute - micro_batch.full_recompute,
        )
        through = passes.over_activations
        tokens, skew = positions / tensor, rank_skew(self._load_skew, moe, expert)
        rows = tokens * moe.experts_per_token * expert_tensor * skew
        local_experts = moe.num_experts // expert
        expert_products = unit.products(
            "experts", ShardCounts(tensor=tensor, expert=expert, expert_tensor=expert_tensor)
        )
        times = passes.total(expert_products)
        times += passes.backward * expert_products.forward * extra_passes * (moe.num_matrices - 1) / moe.num_matrices
        chunk = (rows / num_chunks, tokens / num_chunks)
        chunk_s = self._experts.seconds(
            *chunk, local_experts, moe.expert_dim, moe.hidden_dim / expert_tensor, moe.num_matrices
        )
        permutation_s = self._experts.permutation_s(*chunk, moe.expert_dim)
        products = times * num_chunks * (chunk_s - permutation_s) / software.host.sustained
        permutation = times * num_chunks * permutation_s / software.host.sustained
        # Shared experts and projections to latents are replicated on every rank.
        products += self._rows_s(unit, "feed_forward", tokens, 1, passes, extra_passes)
        # Scores in float32 for all tokens of a tensor group, some ten passes over them.
        scores = self._moved_s(10 * 4 * positions * moe.num_experts)
        router = through * self._wide_products.seconds(tokens, m, moe.num_experts) / software.host.sustained
        moved_bytes = through * 2 * self._width * tokens * 4 * m * software.elementwise.passes
        if moe.expert_bias:
            moved_bytes += software.bias_passes * through / 3 * 2 * self._width * rows * moe.hidden_dim / expert_tensor
        exchange = self._exchange_s(moe, micro_batch, tokens, skew, passes)
        hidden_s = 0.0
        if num_chunks > 1:
            hidden_s = software.exchange_overlap * (1 - 1 / num_chunks) * min(exchange, products)
        launches = software.host.layer_s / 2 * through / 3
        launches = launches * (1 + num_chunks) / 2 + software.host.expert_s * local_experts * num_chunks * through / 3
        return UnitSeconds(
            products_s=products, routing_s=router + scores + permutation,
            elementwise_s=self._moved_s(moved_bytes), launches_s=launches,
            all_to_all_s=exchange - hidden_s, hidden_s=hidden_s,
        )  # fmt: skip

    def _exchange_s(self, moe: MoESpec, micro_batch: MicroBatch, tokens: float, skew: float, passes: Passes) -> float:
        """Dispatch and combine, forward and backward; unsaved rows are dispatched again."""
        _, _, expert, expert_tensor = micro_batch.split
        ranks = Ranks(expert * expert_tensor)
        if ranks.count == 1:
            return 0.0
        wide, narrow = self._width, _NARROW if self._spec.train.dispatch_dtype == "fp8" else self._width
        dispatches = passes.reference + 1 + passes.backward * micro_batch.hidden_recompute
        combines = passes.reference + 1 + passes.backward * (2 + micro_batch.full_recompute)
        chunk = tokens / micro_batch.num_chunks
        kernel = self._exchange
        copies = self._copies(moe, ranks.count // micro_batch.ranks_per_node) if micro_batch.ranks_per_node else 1.0

        def one_s(width: float) -> float:
            row_bytes = width * moe.expert_dim
            if kernel is not None:
                return self._network.fused_exchange_s(kernel, chunk * skew, row_bytes, moe, expert_tensor, ranks)
            send_bytes = row_bytes * chunk * moe.experts_per_token * expert_tensor * skew
            return self._network.all_to_all(send_bytes, ranks, copies)

        exchange = micro_batch.num_chunks * (dispatches * one_s(narrow) + combines * one_s(wide))
        if kernel is None and not self._device.fixed_shapes:  # each pass begins with an all-to-all of counts
            exchange += passes.forwards * self._network.all_to_all(0.0, ranks)
        return exchange

    def _copies(self, moe: MoESpec, nodes: int) -> float:
        """Mean number of a token's experts per node that has any, for evenly spread experts."""
        experts_per_token = moe.experts_per_token
        if (groups := moe.routing.max_expert_groups) is not None:
            nodes = min(nodes, groups)
        miss_probability = 1.0
        for _ in range(experts_per_token):
            miss_probability *= 1 - 1 / nodes
        return max(1.0, experts_per_token / (nodes * (1 - miss_probability)))

    def _with_gathers(self, seconds: UnitSeconds, unit: Unit, micro_batch: MicroBatch) -> UnitSeconds:
        cost = self.gathers_s(unit, micro_batch.split, micro_batch.fsdp, micro_batch.expert_fsdp)
        busy = (
            seconds.busy_s - seconds.hidden_s if micro_batch.prefetches else 0.0
        )  # computation hides one collective only
        hidden_s = min(self._software.overlap * cost, busy)
        return seconds._replace(
            gather_s=seconds.gather_s + cost - hidden_s, hidden_s=seconds.hidden_s + hidden_s,
            elementwise_s=seconds.elementwise_s + self._gathered_casts_s(unit, micro_batch),
        )  # fmt: skip

    def _gathered_casts_s(self, unit: Unit, micro_batch: MicroBatch) -> float:
        """Casts of gathered weights; under full recomputation they are counted with the gradients."""
        if self._software.weight_passes is None or self._width >= _WIDE or micro_batch.recompute == "full":
            return 0.0
        tensor, _, expert, expert_tensor = micro_batch.split
        weights = self._counter.of_unit(unit, ShardCounts(tensor, 1, expert, expert_tensor)).used
        num_gathered = (micro_batch.fsdp > 1) * weights.dense + (micro_batch.expert_fsdp > 1) * weights.in_experts
        return self._moved_s(self._cast_bytes(unit, micro_batch) * num_gathered)

    def gathers_s(self, unit: Unit, split: WorkSplit, fsdp: int, expert_fsdp: int) -> float:
        """All-gathers of parameters for every pass, and the reduce-scatter of gradients."""
        tensor, _, expert, expert_tensor = split
        cost = self._gathers_s(unit, False, ShardCounts(tensor, fsdp), Ranks(fsdp, tensor))
        if unit.moe is None:
            return cost
        shards = ShardCounts(1, 1, expert, expert_tensor, expert_fsdp)
        return cost + self._gathers_s(unit, True, shards, Ranks(expert_fsdp, expert * expert_tensor))

    def _seconds_of_gathers(self, unit: Unit, of_experts: bool, shards: ShardCounts, ranks: Ranks) -> float:
        """Gathers of a unit's experts or of its other weights."""
        if ranks.count == 1:
            return 0.0
        state = self._counter.of_part(unit, of_experts, shards)
        elements, trained_elements, coded_bytes = state.used, state.trained_used, state.coded_used
        if not elements + coded_bytes:
            return 0.0
        passes = self._passes(unit, 0.0)
        gather_s = self._network.gather(self._gathered_width * elements + coded_bytes, ranks)
        cost = (passes.reference + 1 + 2 * passes.backward) * gather_s
        if trained_elements < elements + coded_bytes:
            scatter = self._network.gather(self._gathered_width * trained_elements, ranks)
            cost += passes.backward * (scatter - gather_s)
        return cost
