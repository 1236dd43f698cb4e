"""Predicted seconds of a step: arithmetic at a device's rates, collectives at its links'. Predictions only."""

from dataclasses import dataclass, field, fields, replace
from functools import cache

from moe.plan.candidate import Candidate, Recompute, Sharding
from moe.plan.cluster import Cluster
from moe.plan.collectives import Network, Ranks
from moe.plan.degrees import Degrees
from moe.plan.memory import BYTES_PER_ELEMENT, StateCounter
from moe.plan.plan import TimeEstimate
from moe.plan.skew import rank_skew
from moe.plan.stages import Stage, stages
from moe.plan.units import AttentionDims, Unit, units
from moe.spec import JobSpec, MoESpec, TranslationModelSpec

BACKWARD = 2.0
"""Times the forward pass that a backward pass takes: products for the gradients of both factors."""


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
        spent = self.busy_s + self.launches_s + self.all_to_all_s + self.gather_s
        object.__setattr__(self, "total_s", spent)

    @property
    def busy_s(self) -> float:
        """Of arithmetic, behind which collectives can hide."""
        return self.products_s + self.attention_s + self.routing_s + self.elementwise_s


_KINDS = tuple(each.name for each in fields(UnitSeconds) if each.init)


def model_flops_per_step(spec: JobSpec) -> float:
    """Floating-point operations of one step, forward and backward (3 times forward), without recomputation: of
    projections, experts that tokens choose, attention over the pairs that are looked at, and logits."""
    flops, width = 0.0, spec.model.model_dim
    for unit in units(spec.model):
        positions = spec.train.batch_tokens / unit.sides
        per_position = 0.0
        for each in unit.attentions:
            per_position += 2 * each.projections + _pairs_flops(each, _looked_at(each, spec.data.max_tokens))
        if unit.feed_forward is not None:
            per_position += 2 * unit.feed_forward.num_matrices * width * unit.feed_forward.hidden
        if (moe := unit.moe) is not None:
            chosen = moe.experts_per_token * moe.hidden_dim + (moe.shared_hidden_dim or 0)
            per_position += 2 * width * (moe.num_matrices * chosen + moe.num_experts)
        if unit.vocabulary is not None:
            per_position += 2 * width * unit.vocabulary
        flops += positions * per_position
    return (1 + BACKWARD) * flops


def _looked_at(dims: AttentionDims, sequence_tokens: int) -> float:
    """Positions that a query looks at, on average."""
    length = min(sequence_tokens, dims.window or sequence_tokens)
    if dims.causal and length == sequence_tokens:
        return sequence_tokens / 2
    return float(length)


def _pairs_flops(dims: AttentionDims, looked_at: float) -> float:
    """Of one query: scores and the weighing of values, or updates of a state for linear attention."""
    if dims.linear:  # each channel of a key with each of its head's value, some three times
        return 6.0 * dims.keys * 128
    return 2.0 * (dims.queries + dims.values) * looked_at


class TimeModel:
    """Predicts the step of candidates of one job on one cluster. `load_skew`: rows of the busiest expert over the
    mean."""

    def __init__(self, spec: JobSpec, cluster: Cluster, load_skew: float = 1.0) -> None:
        self._spec, self._device, self._network = spec, cluster.traits, Network(cluster)
        self._per_node, self._load_skew = cluster.devices_per_node, load_skew
        self._units, self._m = units(spec.model), spec.model.model_dim
        self._width = BYTES_PER_ELEMENT[spec.train.dtype]
        self._state_width = max(4, self._width)
        # Here weights are gathered and gradients scattered in float32; peers do both as narrow as the arithmetic.
        # And here gradients are added up over replicas when the backward pass is over, at peers beside it.
        self._here = isinstance(spec.model, TranslationModelSpec)
        self._gathered_width = self._state_width if self._here else self._width
        self._peak = self._device.flops_per_s[spec.train.dtype] * self._device.efficiency
        wide = "bfloat16" if spec.train.dtype == "fp8" else spec.train.dtype
        self._attention_rate = self._device.flops_per_s[wide] * self._device.attention_efficiency
        self._wide_peak = self._device.flops_per_s[wide] * self._device.efficiency
        self._counter = StateCounter(spec.train.optimizer.name)
        self._unit = cache(self._of_unit)
        self._end_of_step = cache(self._reduce_and_update)

    def step_s(self, candidate: Candidate) -> float:
        """Seconds of a step."""
        return self._sum(candidate, self._slowest(candidate))[0]

    def of(self, candidate: Candidate) -> TimeEstimate:
        """Seconds by kind, of the slowest stage."""
        stage = self._slowest(candidate)
        kinds = dict.fromkeys(_KINDS, 0.0)
        for unit, count in stage.units:
            seconds = self._seconds(unit, candidate)
            for name in _KINDS:
                kinds[name] += count * candidate.num_micro_batches * getattr(seconds, name)
        _, at_the_end = self._sum(candidate, stage)
        at_the_end["hidden_s"] += kinds.pop("hidden_s")
        return TimeEstimate(**{name: _rounded(seconds) for name, seconds in (kinds | at_the_end).items()})

    def bound_s(self, shape: Degrees, ranks_per_node: int | None) -> float:
        """The least that a step of this shape could take: all groups at once on stages that are as even as can be, with
        nothing cut up, nothing computed again, exchanges hidden as well as can be, and no waiting."""
        groups = -(-self._spec.num_groups // shape.data_ranks)
        nodes = (None, ranks_per_node) if ranks_per_node else (None,)
        total = 0.0
        for unit, count in stages(self._units, 1, 1)[0].units:
            every = [
                self._unit(unit, groups, "none", 1, each, True, shape.tensor, shape.context, shape.expert,
                           shape.expert_tensor, 1, 1)
                for each in nodes
            ]  # fmt: skip
            total += count * min(each.total_s for each in every)
        return total / shape.pipeline

    def _slowest(self, candidate: Candidate) -> Stage:
        every = stages(self._units, candidate.degrees.pipeline, candidate.virtual_stages)
        return every[0] if len(every) == 1 else max(every, key=lambda stage: self._of_stage(stage, candidate))

    def _of_stage(self, stage: Stage, candidate: Candidate) -> float:
        """Seconds of one micro-batch, forward and backward."""
        total = 0.0
        for unit, count in stage.units:
            total += count * self._seconds(unit, candidate).total_s
        return total

    def _sum(self, candidate: Candidate, slowest: Stage) -> tuple[float, dict[str, float]]:
        """(seconds of a step, what comes to those of the slowest stage's units)."""
        degrees, times = candidate.degrees, candidate.num_micro_batches
        one = self._of_stage(slowest, candidate)
        reduce, optimizer = self._end_of_step(slowest.units, degrees, candidate.sharding)
        if candidate.cut_up and candidate.sharding == "gradients":
            reduce *= times  # what is cut up cannot wait for the last micro-batch
        overlaps = one * BACKWARD / (1 + BACKWARD) * (times if candidate.sharding == "gradients" else 1)
        covered = 0.0 if self._here else min(self._device.overlap * reduce, overlaps)
        found = {
            "bubble_s": one * (degrees.pipeline - 1) / candidate.virtual_stages,
            "send_s": self._sends(candidate),
            "all_reduce_s": reduce - covered,
            "optimizer_s": optimizer,
        }
        return one * times + sum(found.values()), {**found, "hidden_s": covered}

    def _seconds(self, unit: Unit, candidate: Candidate) -> UnitSeconds:
        degrees, gathers = candidate.degrees, candidate.gathers
        return self._unit(
            unit, candidate.micro_batch_groups, candidate.recompute, candidate.num_chunks, candidate.ranks_per_node,
            candidate.overlap,
            degrees.tensor, degrees.context, degrees.expert, degrees.expert_tensor,
            degrees.fsdp if gathers else 1, degrees.expert_fsdp if gathers else 1,
        )  # fmt: skip

    def _of_unit(
        self, unit: Unit, groups: int, recompute: Recompute, num_chunks: int, ranks_per_node: int | None,
        overlap: bool, tensor: int, context: int, expert: int, expert_tensor: int, fsdp: int, expert_fsdp: int,
    ) -> UnitSeconds:  # fmt: skip
        again = 1.0 if recompute == "full" else 0.0
        parts = []
        if unit.attentions or unit.vocabulary is not None:
            parts.append(self._of_attention(unit, groups, tensor, context, again))
        if unit.is_layer:
            selective = recompute == "selective"
            parts.append(
                self._of_feed_forward(
                    unit,
                    groups,
                    tensor,
                    context,
                    expert,
                    expert_tensor,
                    num_chunks,
                    ranks_per_node,
                    again,
                    selective,
                )
            )
        seconds = UnitSeconds(**{name: sum(getattr(part, name) for part in parts) for name in _KINDS})
        if overlap:
            covered = self._device.exchange_overlap * min(seconds.all_to_all_s, seconds.busy_s)
            left = seconds.all_to_all_s - covered
            seconds = replace(seconds, all_to_all_s=left, hidden_s=seconds.hidden_s + covered)
        if fsdp == expert_fsdp == 1:
            return seconds
        cut = Degrees(expert=expert, expert_tensor=expert_tensor, tensor=tensor, context=context,
                      data=fsdp * tensor * context * expert_fsdp, fsdp=fsdp, expert_fsdp=expert_fsdp)  # fmt: skip
        return self._with_gathers(seconds, unit, cut)

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

    def _of_attention(self, unit: Unit, groups: int, tensor: int, context: int, again: float) -> UnitSeconds:
        """Attention of a layer, or the head's logits."""
        positions, m, width, device = (
            self._positions(unit, groups, context),
            self._m,
            self._width,
            self._device,
        )
        passes = 1 + BACKWARD + again
        products = attention = gather = moved = 0.0
        for each in unit.attentions:
            weights = each.projections / tensor
            products += passes * self._product(
                positions,
                2 * positions * weights,
                width * (weights + positions * (2 * m + each.queries) / tensor),
            )
            # The backward pass of fused attention computes scores again: 2.5 times its forward pass.
            flops = positions / tensor * _pairs_flops(each, _looked_at(each, self._spec.data.max_tokens))
            attention += (1 + 2.5 + again) * flops / self._attention_rate
            kept = 3 * m / tensor + m + (each.queries + each.kept_keys_and_values + each.values) / tensor
            moved += passes * 2 * width * positions * kept
            gather += self._into_and_out(positions, tensor, passes)
            if context > 1:  # keys and values go round, their gradients back
                keys = width * positions * each.kept_keys_and_values / tensor * context
                gather += (passes + 1) * self._network.gather(keys, Ranks(context, tensor))
        if unit.vocabulary is not None:
            tokens, weights = positions / tensor, m * unit.vocabulary
            flops = 2 * tokens * weights
            products += (1 + BACKWARD) * self._product(tokens, flops, width * weights, self._wide_peak)
            moved += 3 * 4 * tokens * unit.vocabulary
        launches = device.layer_s / 2 * passes / 3 if unit.attentions else 0.0
        return UnitSeconds(
            products_s=products, attention_s=attention, elementwise_s=moved / device.memory_bytes_per_s,
            launches_s=launches, gather_s=gather,
        )  # fmt: skip

    def _into_and_out(self, positions: float, tensor: int, passes: float) -> float:
        """The all-gather into a layer that tensor ranks split, and the reduce-scatter out of it, in every pass."""
        if tensor == 1:
            return 0.0
        return passes * 2 * self._network.gather(self._width * positions * self._m, Ranks(tensor))

    def _of_feed_forward(
        self, unit: Unit, groups: int, tensor: int, context: int, expert: int, expert_tensor: int, num_chunks: int,
        ranks_per_node: int | None, again: float, selective: bool,
    ) -> UnitSeconds:  # fmt: skip
        """A layer's second half: a feed-forward layer, or experts with their routing and their exchanges."""
        positions, m, width, device = (
            self._positions(unit, groups, context),
            self._m,
            self._width,
            self._device,
        )
        passes = 1 + BACKWARD + again
        launches = device.layer_s / 2 * passes / 3
        first = again or (1.0 if selective else 0.0)  # hidden states are made again by the first products
        if (dims := unit.feed_forward) is not None:
            weights = dims.num_matrices * m * dims.hidden / tensor
            flops, num_bytes = (
                2 * positions * weights,
                width * (weights + positions * 2 * dims.hidden / tensor),
            )
            share = (dims.num_matrices - 1) / dims.num_matrices
            products = (passes + (first - again) * share) * self._product(positions, flops, num_bytes)
            hidden = dims.num_matrices * dims.hidden
            moved = 2 * width * positions * (passes * 3 * m + (1 + BACKWARD) * hidden) / tensor
            gather = self._into_and_out(positions, tensor, passes)
            return UnitSeconds(
                products_s=products, elementwise_s=moved / device.memory_bytes_per_s, launches_s=launches,
                gather_s=gather,
            )  # fmt: skip
        assert unit.moe is not None
        return self._of_experts(
            unit.moe,
            positions,
            tensor,
            expert,
            expert_tensor,
            num_chunks,
            ranks_per_node,
            again,
            first,
            launches,
        )

    def _of_experts(
        self, moe: MoESpec, positions: float, tensor: int, expert: int, expert_tensor: int, num_chunks: int,
        ranks_per_node: int | None, again: float, first: float, launches: float,
    ) -> UnitSeconds:  # fmt: skip
        m, width, device, passes = self._m, self._width, self._device, 1 + BACKWARD + again
        tokens, skew = positions / tensor, rank_skew(self._load_skew, moe, expert)
        rows = tokens * moe.experts_per_token * expert_tensor * skew
        each = moe.num_experts // expert
        weights = moe.num_matrices * m * moe.hidden_dim / expert_tensor
        share = (moe.num_matrices - 1) / moe.num_matrices
        hidden = moe.num_matrices * moe.hidden_dim / expert_tensor
        per_pass = self._product(
            rows / each / num_chunks,
            2 * rows * weights,
            width * (each * weights + rows * (2 * m + hidden)),
            half_rows=device.expert_half_rows,
        )
        if moe.shared_hidden_dim:
            shared = moe.num_matrices * m * moe.shared_hidden_dim
            per_pass += self._product(tokens, 2 * tokens * shared, width * (shared + tokens * 2 * m))
        products = (passes + (first - again) * share) * per_pass
        # Scores in float32 for all tokens of a tensor group, some ten passes over them; rows are gathered, and weighed
        # and added up, in every pass.
        scores = 10 * 4 * positions * moe.num_experts
        moved = passes * (2 * 2 * width * rows * m) + 2 * width * rows * hidden * (1 + BACKWARD)
        router = passes * 2 * positions / tensor * m * moe.num_experts / (self._wide_peak / 2)
        routing = router + (scores + moved) / device.memory_bytes_per_s
        ranks = Ranks(expert * expert_tensor)
        sent = width * tokens * moe.experts_per_token * expert_tensor * skew * m
        copies = self._copies(moe, ranks) if ranks_per_node else 1.0
        one = self._network.all_to_all(sent / num_chunks, ranks, copies) * num_chunks
        # Out and back, forward and backward; rows that are not kept travel out once more.
        exchange = one * (4 + (2 * again or (1.0 if first else 0.0)))
        covered = 0.0
        if num_chunks > 1:
            covered = device.exchange_overlap * (1 - 1 / num_chunks) * min(exchange, products)
        norms = passes * 2 * width * tokens * 4 * m / device.memory_bytes_per_s
        return UnitSeconds(
            products_s=products, routing_s=routing, elementwise_s=norms, launches_s=launches * (1 + num_chunks) / 2,
            all_to_all_s=exchange - covered, hidden_s=covered,
        )  # fmt: skip

    def _copies(self, moe: MoESpec, ranks: Ranks) -> float:
        """Experts that a token has in each node that it has any in, where its K are spread evenly."""
        nodes, chosen = self._network.nodes_of(ranks), moe.experts_per_token
        if moe.num_expert_groups > 1:
            nodes = min(nodes, moe.expert_groups_per_token)
        missed = 1.0
        for _ in range(chosen):
            missed *= 1 - 1 / nodes
        return max(1.0, chosen / (nodes * (1 - missed)))

    def _with_gathers(self, seconds: UnitSeconds, unit: Unit, degrees: Degrees) -> UnitSeconds:
        """Parameters gathered for the forward pass and for the backward one, gradients scattered after it."""
        _, used, _ = self._counter.of_unit(unit, degrees)
        fsdp = Ranks(degrees.fsdp, degrees.tensor * degrees.context)
        experts = Ranks(degrees.expert_fsdp, degrees.expert * degrees.expert_tensor)
        cost = 0.0
        for elements, ranks in ((used.dense, fsdp), (used.in_experts, experts)):
            if elements and ranks.count > 1:
                cost += 3 * self._network.gather(self._gathered_width * elements, ranks)
        covered = min(self._device.overlap * cost, seconds.busy_s)
        return replace(
            seconds, gather_s=seconds.gather_s + cost - covered, hidden_s=seconds.hidden_s + covered
        )

    def _sends(self, candidate: Candidate) -> float:
        """From stage to stage and back, for the micro-batches that are not behind another one's arithmetic."""
        degrees = candidate.degrees
        if degrees.pipeline == 1:
            return 0.0
        tokens = candidate.micro_batch_groups * self._spec.group_tokens / degrees.tensor / degrees.context
        one = self._network.send(self._width * tokens * self._m, degrees.stage_workers)
        runs = candidate.num_micro_batches * candidate.virtual_stages
        return 2 * one * (runs * (1 - self._device.overlap) + degrees.pipeline - 1)

    def _reduce_and_update(
        self, counted: tuple[tuple[Unit, int], ...], degrees: Degrees, sharding: Sharding
    ) -> tuple[float, float]:
        """(reduction of gradients over replicas, the optimizer's update)."""
        of = self._counter.of_units(counted, degrees)
        dense, experts = (
            Ranks(degrees.stage_workers // degrees.tensor, degrees.tensor),
            Ranks(degrees.data, degrees.expert * degrees.expert_tensor),
        )
        reduce = self._reduction(of.used.dense, of.held.dense, dense, degrees.fsdp, sharding)
        reduce += self._reduction(
            of.used.in_experts, of.held.in_experts, experts, degrees.expert_fsdp, sharding
        )
        # Reads weight and gradient, reads and writes what is remembered, writes the weight.
        numbers = 3 * of.held.both + 2 * of.optimizer
        return reduce, self._state_width * numbers / self._device.memory_bytes_per_s

    def _reduction(self, used: int, held: int, ranks: Ranks, cut: int, sharding: Sharding) -> float:
        """Seconds to add up gradients over `ranks`, of which runs of `cut` have parts of parameters."""
        width = self._state_width
        if not used or ranks.count == 1:
            return 0.0
        if cut > 1 and sharding == "parameters":  # what is left after the scatter: over the replicas
            return self._network.all_reduce(
                width * held, Ranks(max(1, ranks.count // cut), ranks.stride * cut)
            )
        if cut > 1:  # gradients scattered, updated weights gathered
            scattered = self._network.gather(width * used, ranks)
            return scattered + self._network.gather(self._width * used, ranks)
        return self._network.all_reduce(width * used, ranks)


def _rounded(seconds: float) -> float:
    """To six digits: the last bits of a sum may differ between machines, a plan may not."""
    return float(f"{seconds:.6g}")
