"""Steps of a decoder on the rehearsal device, of which micro-batches are graphs."""

from collections import Counter
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from moe.parallel import Layout
from moe.records import StepRecord
from moe.spec import LanguageModelSpec, Problem, SpecError, TrainSpec
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.task import RankBatch
from moe.train import micro_batch_graphs
from moe.train.micro_batch_graphs import MicroBatchGraphs
from moe.train.signals import Signals
from moe.train.step import step
from moe.train.train_state import TrainState
from tests.parity.trajectory import Degrees, Shape, batch_of, state_of
from tests.rehearsal.device import LAUNCHES, register
from tests.rehearsal.kernels import kernels_on_wrapped
from tests.rehearsal.recording import Recording, Signature


@dataclass(frozen=True)
class Steps:
    """Results of training steps."""

    records: list[StepRecord]
    launches: dict[str, int]
    """Launches of torch's operations by the host in the last step, by operation."""
    parameters: list[Tensor]
    num_graphs: int


def steps_by_graphs(
    model: LanguageModelSpec,
    train: TrainSpec,
    degrees: Degrees,
    shape: Shape,
    num_steps: int,
    num_warm_ups: int,
    device: str | None = None,
) -> Steps:
    """Steps in which graphs follow `num_warm_ups` micro-batches of a shape. On the rehearsal device, with kernels if
    there are experts."""
    plan = degrees.plan(shape.groups)
    if device is None:
        layout = Layout.build(plan, register())
    else:
        layout = replace(Layout.single(device), recompute=degrees.recompute)
    kernels = kernels_on_wrapped() if device is None and model.moe is not None else nullcontext()
    records = list[StepRecord]()
    with pytest.MonkeyPatch.context() as patch, kernels:
        patch.setattr(micro_batch_graphs, "WARM_UP_PASSES", num_warm_ups)
        state = state_of(model, train, layout)
        batches = [batch_of(layout, plan, shape, model, number) for number in range(num_steps)]
        for batch in batches:
            with LAUNCHES.count() as launches:
                records.append(step(state, batch, Signals()).record)
    parameters = [parameter.local.detach().cpu() for parameter in state.parameters]
    layout.close()
    by_operation = Counter(operation for operation, _ in launches.elements())
    return Steps(
        records,
        by_operation,
        parameters,
        len(state.passes._graphs) if isinstance(state.passes, MicroBatchGraphs) else 0,
    )


def signatures(model: LanguageModelSpec, train: TrainSpec, numbers_on_device: bool) -> list[Signature]:
    """Signatures of the operations of the first micro-batches of two steps."""
    degrees, shape = Degrees(), Shape(groups=1)
    plan = degrees.plan(shape.groups)
    layout = Layout.build(plan, register())
    with kernels_on_wrapped():
        state = state_of(model, train, layout)
        results = []
        for number in (1, 2):
            batch = batch_of(layout, plan, shape, model, number)
            compute = _both_passes(state, batch, numbers_on_device=numbers_on_device)
            with Recording() as recording:
                compute()
            results.append(recording.signature)
    layout.close()
    return results


def _both_passes(state: TrainState, batch: RankBatch[SequencesBatch], *, numbers_on_device: bool) -> Any:
    graphs, (micro_batch,) = state.passes, batch.micro_batches
    assert isinstance(graphs, MicroBatchGraphs)
    graphs.discard_gradients()
    if not numbers_on_device:
        return partial(graphs._both_passes, micro_batch, batch.num_targets)
    return partial(graphs._both_passes, *state.task.graph_inputs(micro_batch, batch.num_targets))


class _NeverRecorded(dict[Hashable, int]):
    """Numbers of micro-batches that were computed without a graph, which never suffice."""

    def get(self, key: Hashable, default: int = 0) -> int:  # type: ignore[override]
        return -1


def problems_without_kernels(
    model: LanguageModelSpec, train: TrainSpec, degrees: Degrees, waiting_ranks: tuple[int, ...]
) -> tuple[Problem, ...]:
    """Problems of graphs of layers that read the numbers of their rows on some ranks; others never record."""
    shape = Shape(groups=degrees.data * (2 + micro_batch_graphs.WARM_UP_PASSES))
    plan = degrees.plan(shape.groups)
    layout = Layout.build(plan, register())
    state = state_of(model, train, layout)
    if layout.rank not in waiting_ranks:
        assert isinstance(state.passes, MicroBatchGraphs)
        state.passes._num_warm_ups = _NeverRecorded()
    try:
        step(state, batch_of(layout, plan, shape, model, 0), Signals())
    except SpecError as error:
        return tuple(error.problems)
    finally:
        layout.close()
    return ()
