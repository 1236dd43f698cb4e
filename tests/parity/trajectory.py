"""A short training run under a layout, with a record of everything that must not depend on the layout.

The batches are synthetic, so that nothing but the layout differs; the model, the step, the optimizer and the
collectives are the product's.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe.data.pairs import PairBatchPart
from moe.experts.experts import Cost
from moe.layers import MoELayer
from moe.parallel import Layout
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
from tests.parity.full_tensors import FullTensors
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
        return self.num_workers

    def plan(self, num_groups: int) -> Plan:
        no_memory = MemoryEstimate(**dict.fromkeys(MemoryEstimate.model_fields, 0))
        no_time = TimeEstimate()
        groups_per_rank = -(-num_groups // self.data_ranks)
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
    state.shard_masters()
    return state


def _gather_rows(rows: dict[int, Tensor], layout: Layout) -> dict[int, Tensor]:
    """Rows of all data ranks in rank order, by layer, on rank 0; ranks may have different layers and numbers of
    rows."""
    if layout.world_group is None:
        return rows
    own_rows = {layer: part.numpy() for layer, part in rows.items()} if layout.is_first_with_rows else {}
    rank_rows: list[Any] = [None] * layout.world_size
    dist.gather_object(own_rows, rank_rows if layout.rank == 0 else None)
    if layout.rank != 0:
        return {}
    layers = sorted({layer for local_rows in rank_rows for layer in local_rows})
    return {
        layer: torch.from_numpy(np.concatenate([local_rows[layer] for local_rows in rank_rows if layer in local_rows]))
        for layer in layers
    }


def _gather_biases(biases: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Biases of all ranks' layers, which must be the same where several ranks have one."""
    if layout.world_group is None:
        return biases
    biases_by_rank: list[Any] = [None] * layout.world_size
    dist.all_gather_object(biases_by_rank, biases)
    all_biases: dict[str, Tensor] = {}
    for own_biases in biases_by_rank:
        for layer, bias in own_biases.items():
            assert torch.equal(all_biases.setdefault(layer, bias), bias), f"ranks have other biases of layer {layer}"
    return dict(sorted(all_biases.items()))


def decision_table(routing: Routing) -> Tensor:
    """bool `[T, E]`: which tokens go to which experts, whether tokens or experts choose."""
    num_tokens = routing.assignments.first_by_token.shape[0]
    table = torch.zeros(num_tokens, routing.load.shape[0], dtype=torch.bool)
    table[routing.assignments.token.cpu(), routing.assignments.expert.cpu()] = True
    return table


class _Decisions:
    """Decisions of one layer's router in a step, by micro-batch in order. Those that recomputation repeats must equal
    the first ones, and are not counted again."""

    def __init__(self, layer: MoELayer) -> None:
        self._tables: list[Tensor] = []
        self._num_repeated = 0
        layer.register_forward_hook(self._note)

    def take(self) -> Tensor:
        table, self._tables, self._num_repeated = torch.cat(self._tables), [], 0
        return table

    def _note(self, layer: MoELayer, _inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return  # of the reference model in preference tuning
        table = decision_table(output[1])
        if torch._C._current_graph_task_id() == -1:
            self._tables.append(table)
        else:
            assert torch.equal(table, self._tables[self._num_repeated]), f"layer {layer.layer} was routed anew"
            self._num_repeated += 1


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
    `digests` are those of the full tensors. Tensors and routing are gathered to rank 0; records of others have none.

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
    decisions = {number: _Decisions(layer) for number, layer in state.moe_layers.local_layers.items()}
    trained_parameters = [parameter for parameter in state.shards.parameters if parameter.local.requires_grad]
    records, full_tensors = [], FullTensors(trained_parameters, layout, on_rank0=True)
    for number in range(1, num_steps + 1):
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
                    {layer: layer_decisions.take() for layer, layer_decisions in sorted(decisions.items())}, layout
                ),
                "gradients": gradients
                if keep_gradients
                else {name: gradient.norm().item() for name, gradient in gradients.items()},
                "digests": {"gradients": digest_of_tensors(gradients.values())},
            }
        )
    final_tensors = {
        "parameters": FullTensors(state.parameters, layout, on_rank0=True).gather(
            [parameter.local.detach().cpu() for parameter in state.parameters]
        )
    }
    if isinstance(state.optimizer, torch.optim.AdamW):
        final_tensors["moments"] = full_tensors.gather(
            [state.optimizer.state[parameter.local]["exp_avg_sq"].cpu() for parameter in trained_parameters]
        )
    biases = {number: layer.router_bias for number, layer in state.moe_layers.local_layers.items()}
    final_tensors["biases"] = _gather_biases(
        {str(number): bias.cpu() for number, bias in biases.items() if bias is not None}, layout
    )
    for kind, tensors in final_tensors.items():
        records[-1][kind] = {name: tensor.norm().item() for name, tensor in tensors.items()}
        records[-1]["digests"][kind] = digest_of_tensors(tensors.values())
    layout.close()
    return records
