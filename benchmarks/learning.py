"""Training in this process, a step at a time, for benchmarks of what is learned rather than of the service."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe.data.pairs import TokenStore
from moe.parallel import Layout
from moe.plan import Cluster, plan_job
from moe.records import StepRecord
from moe.spec import JobSpec
from moe.storage.folder import Folder
from moe.tasks.translation import TranslationModel, build_model
from moe.train import expert_costs
from moe.train.batches import BatchesAhead
from moe.train.optimizer.build import build_optimizer
from moe.train.step import step
from moe.train.totals import Signals

LAYOUT = Layout.single()


@dataclass(frozen=True)
class Taken:
    """A step that was taken, with the model as it is now."""

    step: int
    """From 1."""
    seconds: float
    """Of all steps so far, without what was done between them."""
    record: StepRecord
    model: TranslationModel


def training(
    spec: JobSpec, pairs: TokenStore, cache: Path, batches_of: JobSpec | None = None
) -> Iterator[Taken]:
    """Train `spec`'s model on `pairs`, with the batches of another job where `batches_of` names it: a dense model's own
    groups, and so its batches, differ from those of its twin with experts."""
    cluster = Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=8 * 1024**3)
    model = build_model(spec.model, LAYOUT, seed=spec.train.seed)
    with tempfile.TemporaryDirectory() as folder:
        expert_costs.settle(model, LAYOUT, Folder(folder), cache / "experts")
    optimizer = build_optimizer(spec.train.optimizer, model.held, LAYOUT)
    of_batches = batches_of or spec
    batches = BatchesAhead(pairs, of_batches, plan_job(of_batches, cluster), LAYOUT)
    seconds = 0.0
    try:
        for done in range(1, spec.train.num_steps + 1):
            batch = batches.take(done - 1)
            began = time.perf_counter()
            record = step(model, optimizer, LAYOUT, spec.train, batch, Signals()).record
            seconds += time.perf_counter() - began
            yield Taken(done, seconds, record, model)
    finally:
        batches.close()
