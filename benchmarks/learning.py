"""Training in this process step by step, for benchmarks of learning rather than of the service."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe.data.pairs import PreparedPairs
from moe.data.sequences import PreparedSequences
from moe.parallel import Layout
from moe.plan import Cluster, plan_job
from moe.records import StepRecord
from moe.spec import JobSpec, LanguageModelSpec
from moe.storage.folder import Folder
from moe.tasks.build import build_task
from moe.train import expert_costs
from moe.train.batches import BatchPrefetcher
from moe.train.signals import Signals
from moe.train.step import step
from moe.train.train_state import TrainState

LAYOUT = Layout.single()


@dataclass(frozen=True)
class Snapshot:
    """State of training after a step."""

    step: int
    """Number of the step, from 1."""
    seconds: float
    """Seconds of all steps so far, without the time between them."""
    record: StepRecord
    state: TrainState


def training(
    spec: JobSpec, data: PreparedPairs | PreparedSequences, cache: Path, batches_of: JobSpec | None = None
) -> Iterator[Snapshot]:
    """Train `spec`'s model on `data`, starting from the weights of its folder if it names one.

    `batches_of` is the job whose batches are used: the token groups of a dense model, and therefore its batches, differ
    from those of its twin with experts.
    """
    cluster = Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=8 * 1024**3)
    state = TrainState.build(build_task(spec), LAYOUT)
    if isinstance(spec.model, LanguageModelSpec) and spec.model.from_folder is not None:
        state.task.begin(state.model, LAYOUT, None)
    layers = state.moe_layers.local_layers.values()
    with tempfile.TemporaryDirectory() as folder:
        expert_costs.decide(layers, LAYOUT.device, state.dtype, Folder(folder), cache / "experts")
    of_batches = batches_of or spec
    batches = BatchPrefetcher(build_task(of_batches).batches(data, plan_job(of_batches, cluster), LAYOUT))
    seconds = 0.0
    try:
        for step_number in range(1, spec.train.num_steps + 1):
            batch = batches.take(step_number - 1)
            began = time.perf_counter()
            record = step(state, batch, Signals()).record
            seconds += time.perf_counter() - began
            yield Snapshot(step_number, seconds, record, state)
    finally:
        batches.close()
