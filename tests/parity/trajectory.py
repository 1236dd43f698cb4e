"""A short training run under a layout, with a record of everything that must not depend on the layout.

The batches are synthetic, so that nothing but the layout differs; the model, the step, the optimizer and the
collectives are the product's.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.data.pairs import PairBatchPart
from moe.experts.experts import Cost
from moe.layers import MoELayer
from moe.parallel import Layout, LocalParameter, ParameterShard
from moe.plan import MemoryEstimate, Plan, TimeEstimate
from moe.plan import degrees as plan_degrees
from moe.plan.candidate import Options
from moe.plan.placement import Placement
from moe.routing import BatchCounts, Routing
from moe.spec import (
    JobSpec,
    JsonlSpec,
    LanguageModelSpec,
    PackagesSpec,
    PreferenceSpec,
    TrainSpec,
    TranslationModelSpec,
    UnpairedPreferenceSpec,
)
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageTask
from moe.tasks.task import RankBatch, Task
from moe.tasks.translation import TranslationTask
from moe.tasks.translation.batches import PairsBatch
from moe.train.signals import Signals
from moe.train.step import step
from moe.train.train_state import TrainState
from tests.parity.digests import digest_of_tensors
from tests.parity.sequences import ALL, ANSWERS, PAIRS, global_sequences, rank_sequences

Model = TranslationModelSpec | LanguageModelSpec


@dataclass(frozen=True)
class Shape:
    """The global batch: `groups` groups of `rows` pairs with `source` and `target` positions; for a language model, of
    `rows` sequences with the positions of both."""

    groups: int = 8
    rows: int = 2
    source: int = 7
    target: int = 5
    learned: str = ALL


@dataclass(frozen=True)
class Degrees(plan_degrees.Degrees, Options):
    """A layout by hand: degrees and options side by side."""

    micro_batch_groups: int = 8
    num_micro_batches: None = None
    """As many as the groups of a rank need."""
    placements: tuple[Placement, ...] | None = None
    """The planner's placements if None."""

    def __str__(self) -> str:
        default = Degrees()
        settings = (f"{name}={value}" for name, value in vars(self).items() if value != getattr(default, name))
        return ",".join(settings) or "one process"

    @property
    def workers(self) -> int:
        return self.expert * self.expert_tensor * self.data

    def plan(self, num_groups: int) -> Plan:
        no_memory = MemoryEstimate(**dict.fromkeys(MemoryEstimate.model_fields, 0))
        no_time = TimeEstimate()
        groups_per_rank = -(-num_groups // (self.workers // (self.tensor * self.context)))
        degrees = {field.name: getattr(self, field.name) for field in fields(plan_degrees.Degrees)}
        options = {field.name: getattr(self, field.name) for field in fields(Options)}
        options["num_micro_batches"] = -(-groups_per_rank // self.micro_batch_groups)
        return Plan(
            num_workers=self.workers, degrees=plan_degrees.Degrees(**degrees), options=Options(**options),
            placements=self.placements,
            device="cpu", device_type="cpu", memory=no_memory, predicted=no_time, tokens_per_step=1, reasons=(),
        )  # fmt: skip


def global_batch(shape: Shape, vocabulary: int, step_number: int) -> tuple[Tensor, Tensor, Tensor]:
    """(source, target_in, target_out) of a step: rows of many lengths, padded at their ends"""
    generator = torch.Generator().manual_seed(1000 + step_number % 2)  # two batches in turn, to be learned
    rows = shape.groups * shape.rows

    def tokens(length: int) -> Tensor:
        values = torch.randint(4, vocabulary, (rows, length), generator=generator)
        lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
        lengths[0] = length
        return torch.where(torch.arange(length) < lengths, values, 0)

    source, target_out = tokens(shape.source), tokens(shape.target)
    target_in = torch.cat((torch.ones(rows, 1, dtype=torch.int64), target_out[:, :-1]), 1)
    return source, torch.where(target_out != 0, target_in, 0), target_out


def rank_batch(layout: Layout, plan: Plan, shape: Shape, vocabulary: int, step_number: int) -> RankBatch:
    source, target_in, target_out = global_batch(shape, vocabulary, step_number)
    local_groups = layout.local_groups(shape.groups)
    counts = [
        BatchCounts(shape.groups, shape.groups * shape.rows, int((side != 0).sum())) for side in (source, target_out)
    ]
    micro_batches = []
    for index in range(plan.options.num_micro_batches):
        first = min(local_groups.start + index * plan.options.micro_batch_groups, local_groups.stop)
        rows = slice(first * shape.rows, min(first + plan.options.micro_batch_groups, local_groups.stop) * shape.rows)
        context = BatchContext(step_number, 5, True, rows.start, shape.rows, *reversed(counts))
        part = PairBatchPart(rows.start, *(side[rows].numpy() for side in (source, target_in, target_out)))
        micro_batches.append(PairsBatch.from_part(part, context, layout))
    num_sources, num_targets = (count.num_tokens for count in counts)
    return RankBatch(step_number, micro_batches, num_targets, num_sources + num_targets)


def batch_of(layout: Layout, plan: Plan, shape: Shape, model_spec: Model, step_number: int) -> RankBatch:
    """This rank's part of a global batch for a model of this kind."""
    if isinstance(model_spec, TranslationModelSpec):
        return rank_batch(layout, plan, shape, model_spec.source_vocab_size, step_number)
    num_rows, length = shape.groups * shape.rows, shape.source + shape.target
    rows = global_sequences(num_rows, length, model_spec.vocab_size, step_number, shape.learned)
    return rank_sequences(layout, plan, shape.groups, shape.rows, rows, step_number, shape.learned)


def task_of(model_spec: Model, train: TrainSpec, learned: str = ALL) -> Task[Any, Any]:
    """The task of a job whose data is never read."""
    if isinstance(model_spec, TranslationModelSpec):
        pairs = JsonlSpec.model_construct()
        return TranslationTask(JobSpec.model_construct(model=model_spec, train=train, data=pairs))
    kinds = {PAIRS: PreferenceSpec, ANSWERS: UnpairedPreferenceSpec}
    data = kinds.get(learned, PackagesSpec).model_construct()
    return LanguageTask(JobSpec.model_construct(model=model_spec, train=train, data=data))


def state_of(model_spec: Model, train: TrainSpec, layout: Layout, learned: str = ALL) -> TrainState:
    """State at the start of training, with the weights of the model's folder if it has one."""
    state = TrainState.build(task_of(model_spec, train, learned), layout)
    if isinstance(model_spec, LanguageModelSpec) and model_spec.from_folder is not None:
        state.task.begin(state.model, layout, None)
    state.task.begin_reference(layout, None)
    for layer in state.moe_layers.local_layers.values():
        if layer.router_bias is not None and not layer.spec.routing.bias_rate:  # a frozen bias, as of a loaded model
            layer.router_bias.copy_(torch.linspace(-0.1, 0.1, len(layer.router_bias)))
    return state


def local_indices(part: ParameterShard, layout: Layout) -> Tensor:
    """Indices of this rank's part in the full tensor, in the part's shape: split as by `torch.chunk`, axis by axis."""
    indices = torch.arange(part.shape.numel()).view(part.shape)
    for axis, dim in part.splits:
        chunks, empty = indices.chunk(layout.degree(axis), dim), indices.narrow(dim, 0, 0)
        indices = chunks[layout.index(axis)] if layout.index(axis) < len(chunks) else empty
    return indices


class FullTensors:
    """Full tensors, gathered from the parts of ranks."""

    def __init__(self, parameters: list[LocalParameter], layout: Layout) -> None:
        self._parameters, self._layout = parameters, layout
        self._sizes = [parameter.part.shape.numel() for parameter in parameters]
        indices, first = [], 0
        for parameter, size in zip(parameters, self._sizes, strict=True):
            indices.append(first + local_indices(parameter.part, layout).reshape(-1))
            first += size
        self._indices: list[Any] = [torch.cat(indices)]
        """Indices of each rank's elements in all parameters end to end."""
        if layout.world_group is not None:
            self._indices = [None] * layout.world_size
            dist.all_gather_object(self._indices, torch.cat(indices))
        self._max_length = max(len(indices) for indices in self._indices)

    def gradients(self) -> dict[str, Tensor]:
        """Every gradient in full."""
        return self.gather([parameter.local.grad.cpu() for parameter in self._parameters])  # type: ignore[union-attr]

    def gather(self, local_parts: list[Tensor]) -> dict[str, Tensor]:
        """Full tensors by name, from this rank's part of each. A part that several ranks have must be the same."""
        local_values = torch.cat([part.reshape(-1) for part in local_parts])
        rank_values = [functional.pad(local_values, (0, self._max_length - local_values.numel()))]
        if self._layout.world_group is not None:
            parts = [torch.empty_like(rank_values[0]) for _ in range(self._layout.world_size)]
            dist.all_gather(parts, rank_values[0])
            rank_values = parts
        full_values = local_values.new_full((sum(self._sizes),), torch.nan)
        for indices, part in zip(self._indices, rank_values, strict=True):
            part, earlier_values = part[: len(indices)], full_values[indices]
            torch.testing.assert_close(
                torch.where(earlier_values.isnan(), part, earlier_values), part, rtol=1e-12, atol=1e-14
            )
            full_values[indices] = part
        assert not full_values.isnan().any(), "no rank has some elements"
        pairs = zip(self._parameters, full_values.split(self._sizes), strict=True)
        return {parameter.name: gradient.view(parameter.part.shape) for parameter, gradient in pairs}


def _gather_rows(rows: dict[int, Tensor], layout: Layout) -> dict[int, Tensor]:
    """Rows of all data ranks in rank order, by layer; ranks may have different numbers of rows."""
    if layout.world_group is None:
        return rows
    rank_rows: list[Any] = [None] * layout.world_size
    dist.all_gather_object(rank_rows, rows if layout.is_first_with_rows else {})
    return {layer: torch.cat([local_rows[layer] for local_rows in rank_rows if local_rows]) for layer in rows}


def decision_table(routing: Routing) -> Tensor:
    """bool `[T, E]`: which tokens go to which experts, whether tokens or experts choose."""
    num_tokens = routing.assignments.first_by_token.shape[0]
    table = torch.zeros(num_tokens, routing.load.shape[0], dtype=torch.bool)
    table[routing.assignments.token.cpu(), routing.assignments.expert.cpu()] = True
    return table


def _note_decisions(decisions: dict[int, list[Tensor]], layer: MoELayer, _inputs: Any, output: Any) -> None:
    """Decisions that recomputation repeats must equal the first ones, and are not counted again."""
    if not torch.is_grad_enabled():
        return  # of the reference model in preference tuning
    table, so_far = decision_table(output[1]), decisions.setdefault(layer.layer, [])
    if torch._C._current_graph_task_id() == -1:
        so_far.append(table)
    else:
        assert torch.equal(table, so_far[-1]), f"layer {layer.layer} was routed anew"


def run(
    model_spec: Model,
    train: TrainSpec,
    degrees: Degrees,
    shape: Shape,
    num_steps: int,
    keep_gradients: bool = False,
    collapse_routers: bool = False,
    backend: str | None = None,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """One record per step: losses, the gradient norm, every gradient's norm (or the gradients), and all routing; the
    last record also has the norms of every parameter, of AdamW's second moments and of routers' biases after that step.
    `digests` are those of the full tensors.

    `collapse_routers` starts from routers of zeros: every token ties, so all choose experts 0 and 1. `backend`
    multiplies in the experts; None is one product per expert. On `cuda`, ranks share GPUs if there are too few.
    """
    plan = degrees.plan(shape.groups)
    if device == "cuda" and degrees.workers > 1:
        device = f"cuda:{dist.get_rank() % torch.cuda.device_count()}"
    layout = Layout.build(plan, device)
    state = state_of(model_spec, train.model_copy(update={"seed": 3}), layout, shape.learned)
    if collapse_routers:
        with torch.no_grad():
            for parameter in state.parameters:
                if parameter.name.endswith("router"):
                    parameter.local.zero_()
    if backend is not None:
        for layer in state.moe_layers.local_layers.values():
            layer.experts.costs = {backend: Cost(0.0, 0.0)}
    decisions: dict[int, list[Tensor]] = {}
    for layer in state.moe_layers.local_layers.values():
        layer.register_forward_hook(partial(_note_decisions, decisions))
    trained_parameters = [parameter for parameter in state.shards.parameters if parameter.local.requires_grad]
    records, full_tensors = [], FullTensors(trained_parameters, layout)
    for number in range(1, num_steps + 1):
        decisions.clear()
        batch = batch_of(layout, plan, shape, model_spec, number)
        result = step(state, batch, Signals())
        assert result.record.is_finite
        assert all(parameter.local.requires_grad or parameter.local.grad is None for parameter in state.parameters)
        gradients, plain = full_tensors.gradients(), result.record.to_plain()
        records.append(
            {
                **{name: plain[name] for name in ("loss", "nll", "aux_loss", "z_loss", "grad_norm", "layers")},
                "indexer_loss": result.record.indexer_loss,
                "numbers": result.record.numbers,
                "routing": _gather_rows(
                    {layer: torch.cat(parts) for layer, parts in sorted(decisions.items())}, layout
                ),
                "gradients": gradients
                if keep_gradients
                else {name: gradient.norm().item() for name, gradient in gradients.items()},
                "digests": {"gradients": digest_of_tensors(gradients.values())},
            }
        )
    final_tensors = {
        "parameters": FullTensors(state.parameters, layout).gather(
            [parameter.local.detach().cpu() for parameter in state.parameters]
        )
    }
    if isinstance(state.optimizer, torch.optim.AdamW):
        final_tensors["moments"] = full_tensors.gather(
            [state.optimizer.state[parameter.local]["exp_avg_sq"].cpu() for parameter in trained_parameters]
        )
    biases = {number: layer.router_bias for number, layer in state.moe_layers.local_layers.items()}
    final_tensors["biases"] = {str(number): bias.cpu() for number, bias in biases.items() if bias is not None}
    for kind, tensors in final_tensors.items():
        records[-1][kind] = {name: tensor.norm().item() for name, tensor in tensors.items()}
        records[-1]["digests"][kind] = digest_of_tensors(tensors.values())
    layout.close()
    return records
