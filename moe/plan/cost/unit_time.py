"""Predicted seconds of a unit and a micro-batch: arithmetic at a device's rates, exchanges at its links'."""

from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import NamedTuple

from moe.plan.candidate import Candidate, Recompute
from moe.plan.cluster.cluster import Cluster
from moe.plan.cost.collectives import Network, Ranks
from moe.plan.cost.flops import looked_at, pairs_flops
from moe.plan.cost.memory import BYTES_PER_ELEMENT
from moe.plan.cost.skew import rank_skew
from moe.plan.cost.state import StateCounter
from moe.plan.cost.units import BACKWARD, Part, Products, Unit
from moe.plan.degrees import Shards, Split
from moe.plan.profile import Profile
from moe.spec import JobSpec, MoESpec, PreferenceSpec


@dataclass(frozen=True)
class UnitSeconds:
    """Of one unit and one micro-batch, forward and backward."""

    products_s: float = 0.0
    attention_s: float = 0.0
    routing_s: float = 0.0
    elementwise_s: float = 0.0
    launches_s: float = 0.0
    all_to_all_s: float = 0.0
    gather_s: float = 0.0
    hidden_s: float = 0.0

    total_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        spent = self.busy_s + self.all_to_all_s + self.gather_s
        object.__setattr__(self, "total_s", spent)

    @property
    def busy_s(self) -> float:
        """Of arithmetic and of waiting for it to be launched, behind which collectives can hide."""
        return self.products_s + self.attention_s + self.routing_s + self.elementwise_s + self.launches_s

    def __add__(self, other: "UnitSeconds") -> "UnitSeconds":
        return UnitSeconds(
            self.products_s + other.products_s, self.attention_s + other.attention_s,
            self.routing_s + other.routing_s, self.elementwise_s + other.elementwise_s,
            self.launches_s + other.launches_s, self.all_to_all_s + other.all_to_all_s,
            self.gather_s + other.gather_s, self.hidden_s + other.hidden_s,
        )  # fmt: skip


KINDS = tuple(each.name for each in fields(UnitSeconds) if each.init)


class MicroBatch(NamedTuple):
    """All of a candidate that a unit's time for one micro-batch depends on."""

    groups: int
    recompute: Recompute
    split: Split
    num_chunks: int = 1
    ranks_per_node: int | None = None
    overlap: bool = False
    fsdp: int = 1
    expert_fsdp: int = 1
    """Ranks that parameters are gathered from."""
    prefetched: bool = True
    """Whether that hides behind arithmetic, as far as it can."""

    @classmethod
    def of(cls, candidate: Candidate) -> "MicroBatch":
        degrees, options, gathers = candidate.degrees, candidate.options, candidate.gathers
        return cls(
            options.micro_batch_groups, options.recompute, degrees.split, options.num_chunks,
            options.ranks_per_node, options.overlap, degrees.fsdp if gathers else 1,
            degrees.expert_fsdp if gathers else 1, degrees.pipeline == 1,
        )  # fmt: skip

    @property
    def full_recompute(self) -> float:
        """Forward passes in the backward one, of whole blocks."""
        return 1.0 if self.recompute == "full" else 0.0

    @property
    def hidden_recompute(self) -> float:
        """The same of first products, which give hidden states."""
        return 0.0 if self.recompute == "none" else 1.0


class Passes(NamedTuple):
    """Passes over a unit that one micro-batch takes."""

    of_reference: int
    """By the model without its adapter, beside which preferences are learned."""
    forward: float
    """By the model as it is trained, those in the backward pass among them that make again what was not kept."""
    backward: int

    @property
    def forwards(self) -> float:
        return self.of_reference + self.forward

    @property
    def over_activations(self) -> float:
        """Counted as forward passes, where all is trained."""
        return self.forwards + BACKWARD * self.backward

    def of(self, products: Products) -> float:
        """Matrix products of all of them."""
        return self.of_reference + self.forward * products.forward + self.backward * products.backward


class UnitTime:
    """Predicts units of one job on one cluster; each question is worked out once."""

    def __init__(
        self, spec: JobSpec, cluster: Cluster, profile: Profile, network: Network, load_skew: float
    ) -> None:
        self._spec, self._device, self._network = spec, cluster.traits, network
        self._load_skew, self._m = load_skew, spec.model.model_dim
        self._width = BYTES_PER_ELEMENT[spec.train.dtype]
        self._profile = profile
        self._gathered_width = max(4, self._width) if profile.gathers_wide else self._width
        self._peak = self._device.flops_per_s[spec.train.dtype] * self._device.efficiency
        wide = "bfloat16" if spec.train.dtype == "fp8" else spec.train.dtype
        self._attention_rate = self._device.flops_per_s[wide] * self._device.attention_efficiency
        self._wide_peak = self._device.flops_per_s[wide] * self._device.efficiency
        self._reference_passes = 1 if isinstance(spec.data, PreferenceSpec) else 0
        self._counter = StateCounter(spec.train.optimizer)
        self.of = cache(self._of_unit)
        self._attention = cache(self._of_attention)

    def _of_unit(self, unit: Unit, of: MicroBatch) -> UnitSeconds:
        if of.fsdp > 1 or of.expert_fsdp > 1:
            whole = self.of(unit, of._replace(fsdp=1, expert_fsdp=1, prefetched=True))
            return self._with_gathers(whole, unit, of)
        seconds = UnitSeconds()
        if unit.attentions or unit.vocabulary is not None:
            seconds = self._attention(unit, of.groups, of.split.tensor, of.split.context, of.full_recompute)
        if unit.is_layer:
            seconds += self._of_feed_forward(unit, of)
        seconds += self._decoded(unit, of)
        if not of.overlap:
            return seconds
        covered = self._device.exchange_overlap * min(seconds.all_to_all_s, seconds.busy_s)
        left = seconds.all_to_all_s - covered
        return replace(seconds, all_to_all_s=left, hidden_s=seconds.hidden_s + covered)

    def _positions(self, unit: Unit, groups: int, context: int) -> float:
        return groups * self._spec.group_tokens / unit.sides / context

    def _product(
        self,
        rows: float,
        flops: float,
        num_bytes: float,
        peak: float | None = None,
        half_rows: float | None = None,
    ) -> float:
        """Roofline, with an efficiency that falls with few rows."""
        if not rows:
            return 0.0
        reached = (
            (peak or self._peak)
            * rows
            / (rows + (self._device.half_rows if half_rows is None else half_rows))
        )
        return max(flops / reached, num_bytes / self._device.memory_bytes_per_s)

    def _of_attention(
        self, unit: Unit, groups: int, tensor: int, context: int, full_recompute: float
    ) -> UnitSeconds:
        """Attention of a layer, or the head's logits."""
        positions, m = self._positions(unit, groups, context), self._m
        width, device = self._width, self._device
        passes = self._passes(unit, full_recompute)
        made = unit.products(Shards(tensor=tensor), "others")
        products = attention = gather = moved = 0.0
        for each in unit.attentions:
            weights = each.projections / tensor
            products += passes.of(made) * self._product(
                positions,
                2 * positions * weights,
                width * (weights + positions * (2 * m + each.queries) / tensor),
            )
            # The backward pass of fused attention computes scores again: 2.5 times its forward pass.
            flops = positions / tensor * pairs_flops(each, looked_at(each, self._spec.data.padded_tokens))
            attention += (passes.forwards + 2.5 * passes.backward) * flops / self._attention_rate
            kept = 3 * m / tensor + m + (each.queries + each.kept_keys_and_values + each.values) / tensor
            moved += passes.over_activations * 2 * width * positions * kept
            gather += self._into_and_out(positions, tensor, passes.over_activations, each.gathered)
            if context > 1:  # keys and values go round, their gradients back
                keys = width * positions * each.kept_keys_and_values / tensor * context
                times = passes.over_activations + passes.backward
                gather += times * self._network.gather(keys, Ranks(context, tensor))
        if unit.vocabulary is not None:
            split = tensor if self._profile.splits_vocabulary else 1
            rows, weights = positions / tensor * split, m * unit.vocabulary / split
            # Logits of preferences are made again, as their loss is no sum over tokens.
            of_logits = self._passes(unit, self._reference_passes)
            one = self._product(rows, 2 * rows * weights, width * weights, self._wide_peak)
            products += of_logits.of(made) * one
            moved += of_logits.over_activations * 4 * positions / tensor * unit.vocabulary
            if split > 1:  # gathered for each pass, gradients scattered
                gather += of_logits.over_activations * self._network.gather(
                    width * positions * m, Ranks(tensor)
                )
        launches = device.layer_s / 2 * passes.over_activations / 3 if unit.attentions else 0.0
        return UnitSeconds(
            products_s=products, attention_s=attention, elementwise_s=moved / device.memory_bytes_per_s,
            launches_s=launches, gather_s=gather,
        )  # fmt: skip

    def _passes(self, unit: Unit, recomputed: float) -> Passes:
        """Where a backward pass makes so much of a forward one again."""
        backward = int(unit.has_backward)
        return Passes(self._reference_passes, 1 + recomputed * backward, backward)

    def _decoded(self, unit: Unit, of: MicroBatch) -> UnitSeconds:
        """A frozen base's matrices decoded wherever they are multiplied, experts' for each chunk. Of a layer without
        experts all are decoded where its hidden states are made again, of experts the first."""
        tensor, _, expert, expert_tensor = of.split
        shards, device = Shards(tensor=tensor, expert=expert, expert_tensor=expert_tensor), self._device
        seconds = 0.0
        for each in unit.weights:
            if not each.num_coded or each.item_bytes == self._width:
                continue
            is_last = each.of_experts and "w_out" in each.name
            of_hidden = each.name.startswith("feed_forward.") and not is_last
            passes = self._passes(unit, of.hidden_recompute if of_hidden else of.full_recompute)
            is_chunked = each.of_experts and expert * expert_tensor > 1
            times = (passes.forwards + passes.backward) * (of.num_chunks if is_chunked else 1)
            one = 2 * self._width / device.memory_bytes_per_s
            if each.item_bytes == 1:
                one = max(one, 1 / device.decoded_per_s)
            seconds += times * one * each.decoded(shards)
        return UnitSeconds(elementwise_s=seconds)

    def _into_and_out(
        self, positions: float, tensor: int, passes: float, gathered: int | None = None
    ) -> float:
        """The all-gather into a layer that tensor ranks split, and the reduce-scatter out of it, in every pass.
        `gathered`: channels that go in, where they are not those of hidden states."""
        if tensor == 1:
            return 0.0
        width, ranks = self._width * positions, Ranks(tensor)
        inwards = self._m if gathered is None else gathered
        return passes * (
            self._network.gather(width * inwards, ranks) + self._network.gather(width * self._m, ranks)
        )

    def _of_feed_forward(self, unit: Unit, of: MicroBatch) -> UnitSeconds:
        """A layer's second half: a feed-forward layer, or experts with their routing and their exchanges."""
        if unit.moe is not None:
            return self._of_experts(unit, unit.moe, self._positions(unit, of.groups, of.split.context), of)
        dims = unit.feed_forward
        assert dims is not None
        positions, m, tensor = self._positions(unit, of.groups, of.split.context), self._m, of.split.tensor
        width, device = self._width, self._device
        passes = self._passes(unit, of.full_recompute)
        made = unit.products(Shards(tensor=tensor), "feed_forward")
        weights = dims.num_matrices * m * dims.hidden / tensor
        flops = 2 * positions * weights
        num_bytes = width * (weights + positions * 2 * dims.hidden / tensor)
        again = self._again(passes, made, dims.num_matrices, of)
        products = (passes.of(made) + again) * self._product(positions, flops, num_bytes)
        hidden = dims.num_matrices * dims.hidden
        of_hidden = passes.over_activations - of.full_recompute * passes.backward
        moved = 2 * width * positions * (passes.over_activations * 3 * m + of_hidden * hidden) / tensor
        return UnitSeconds(
            products_s=products, elementwise_s=moved / device.memory_bytes_per_s,
            launches_s=device.layer_s / 2 * passes.over_activations / 3,
            gather_s=self._into_and_out(positions, tensor, passes.over_activations),
        )  # fmt: skip

    @staticmethod
    def _again(passes: Passes, made: Products, num_matrices: int, of: MicroBatch) -> float:
        """Products of the first matrices, which give hidden states, where these alone are made again."""
        share = (num_matrices - 1) / num_matrices
        return passes.backward * made.forward * (of.hidden_recompute - of.full_recompute) * share

    def _of_experts(self, unit: Unit, moe: MoESpec, positions: float, of: MicroBatch) -> UnitSeconds:
        tensor, _, expert, expert_tensor = of.split
        m, width, device = self._m, self._width, self._device
        num_chunks, passes = of.num_chunks, self._passes(unit, of.full_recompute)
        through = passes.over_activations
        tokens, skew = positions / tensor, rank_skew(self._load_skew, moe, expert)
        rows = tokens * moe.experts_per_token * expert_tensor * skew
        each = moe.num_experts // expert
        weights = moe.num_matrices * m * moe.hidden_dim / expert_tensor
        hidden = moe.num_matrices * moe.hidden_dim / expert_tensor
        of_chosen = self._product(
            rows / each / num_chunks,
            2 * rows * weights,
            width * (each * weights + rows * (2 * m + hidden)),
            half_rows=device.expert_half_rows,
        )
        of_shared = 0.0
        if moe.shared_hidden_dim:
            shared = moe.num_matrices * m * moe.shared_hidden_dim
            of_shared = self._product(tokens, 2 * tokens * shared, width * (shared + tokens * 2 * m))
        shards, products = Shards(tensor=tensor, expert=expert, expert_tensor=expert_tensor), 0.0
        parts: tuple[tuple[float, Part], ...] = ((of_chosen, "experts"), (of_shared, "feed_forward"))
        for one, part in parts:
            made = unit.products(shards, part)
            products += (passes.of(made) + self._again(passes, made, moe.num_matrices, of)) * one
        # Scores in float32 for all tokens of a tensor group, some ten passes over them; rows are gathered, and weighed
        # and added up, in every pass.
        scores = 10 * 4 * positions * moe.num_experts
        of_hidden = through - of.full_recompute * passes.backward
        moved = through * (2 * 2 * width * rows * m) + 2 * width * rows * hidden * of_hidden
        router = through * 2 * positions / tensor * m * moe.num_experts / (self._wide_peak / 2)
        routing = router + (scores + moved) / device.memory_bytes_per_s
        ranks = Ranks(expert * expert_tensor)
        sent = width * tokens * moe.experts_per_token * expert_tensor * skew * m
        copies = self._copies(moe, ranks) if of.ranks_per_node else 1.0
        one = self._network.all_to_all(sent / num_chunks, ranks, copies) * num_chunks
        # Out and back, forward and backward; rows that are not kept travel out once more.
        back = 2 + (2 * of.full_recompute or of.hidden_recompute)
        exchange = one * (2 * (passes.of_reference + 1) + passes.backward * back)
        if not device.fixed_shapes:  # each pass begins with counts
            exchange += passes.forwards * self._network.all_to_all(0.0, ranks)
        covered = 0.0
        if num_chunks > 1:
            covered = device.exchange_overlap * (1 - 1 / num_chunks) * min(exchange, products)
        launches = device.layer_s / 2 * through / 3
        launches = launches * (1 + num_chunks) / 2 + device.expert_s * each * num_chunks * through / 3
        norms = through * 2 * width * tokens * 4 * m / device.memory_bytes_per_s
        return UnitSeconds(
            products_s=products, routing_s=routing, elementwise_s=norms, launches_s=launches,
            all_to_all_s=exchange - covered, hidden_s=covered,
        )  # fmt: skip

    def _copies(self, moe: MoESpec, ranks: Ranks) -> float:
        """Experts that a token has in each node that it has any in, where its K are spread evenly."""
        nodes, chosen = self._network.nodes_of(ranks), moe.experts_per_token
        if (groups := moe.routing.max_expert_groups) is not None:
            nodes = min(nodes, groups)
        missed = 1.0
        for _ in range(chosen):
            missed *= 1 - 1 / nodes
        return max(1.0, chosen / (nodes * (1 - missed)))

    def _with_gathers(self, seconds: UnitSeconds, unit: Unit, of: MicroBatch) -> UnitSeconds:
        """Parameters gathered for each forward pass and for the backward one, gradients scattered after it."""
        tensor, context, expert, expert_tensor = of.split
        shards = Shards(tensor, of.fsdp, expert, expert_tensor, of.expert_fsdp)
        of_unit = self._counter.of_unit(unit, shards)
        used, trained = of_unit.used, of_unit.trained_used
        fsdp, experts = Ranks(of.fsdp, tensor * context), Ranks(of.expert_fsdp, expert * expert_tensor)
        cost, passes = 0.0, self._passes(unit, 0.0)
        coded = of_unit.coded_used
        for elements, coded_bytes, scattered, ranks in (
            (used.dense, coded.dense, trained.dense, fsdp),
            (used.in_experts, coded.in_experts, trained.in_experts, experts),
        ):
            if elements + coded_bytes and ranks.count > 1:
                gathered = self._network.gather(self._gathered_width * elements + coded_bytes, ranks)
                cost += (passes.of_reference + 1 + 2 * passes.backward) * gathered
                if scattered < elements + coded_bytes:
                    scatter = self._network.gather(self._gathered_width * scattered, ranks)
                    cost += passes.backward * (scatter - gathered)
        busy = (
            seconds.busy_s - seconds.hidden_s if of.prefetched else 0.0
        )  # not behind what others hide behind
        covered = min(self._device.overlap * cost, busy)
        return replace(
            seconds, gather_s=seconds.gather_s + cost - covered, hidden_s=seconds.hidden_s + covered
        )
