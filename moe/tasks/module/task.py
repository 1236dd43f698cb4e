"""Task of a user module, with its own batches and a `moe.sharding` plan. Loads no torch until it is built."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.data.progress import ProgressCallback
from moe.records import HeldOutResult, ModuleReport
from moe.spec import JobSpec, ModuleDataSpec, ModuleModelSpec, spec_error
from moe.tasks.module.code import check_allowed
from moe.tasks.task import Loss, RankBatch, Task

if TYPE_CHECKING:
    from moe.parallel import Layout
    from moe.plan import Plan
    from moe.sharding import Applied
    from moe.tasks.module.build import Batch


class ModuleData:
    """Batches of a user module. Imports its function on first use."""

    def __init__(self, spec: ModuleDataSpec, seed: int) -> None:
        self._spec, self._seed = spec, seed
        self._function: Callable[[int], Batch] | None = None
        self._key = ""

    def batch(self, step: int) -> "Batch":
        """Global batch of a step, counted from 0. Raises SpecError if the function is missing or not allowed."""
        if self._function is None:
            from moe.tasks.module.build import batches

            self._function = batches(self._spec, self._seed)
        return self._function(step)

    @property
    def key(self) -> str:
        """Hash of the first batch: detects batches that differ between ranks, and changed functions."""
        if not self._key:
            from moe.tasks.module.build import digest

            self._key = digest(self.batch(0))
        return self._key

    def tokenizer_files(self) -> dict[str, bytes]:
        return {}

    def carried_files(self) -> dict[str, bytes]:
        return {}


@dataclass(frozen=True)
class ModuleBatch:
    """Global batch, the same on all ranks, and the step that keys its random draws."""

    step: int
    arguments: "Batch"


class ModuleTask(Task[ModuleData, ModuleBatch]):
    """User module that computes its own loss.

    All ranks receive the global batch and get the same loss; the sharded program takes this rank's shard. Only
    functions in `allowed_code` are called.
    """

    def __init__(self, spec: JobSpec, allowed_code: Collection[str] = ()) -> None:
        super().__init__(spec)
        assert isinstance(spec.model, ModuleModelSpec)
        assert isinstance(spec.data, ModuleDataSpec)
        self._model, self._data, self._allowed_code = spec.model, spec.data, allowed_code

    def check_data(self, roots: Sequence[str]) -> Sequence[str]:
        """No warnings: the data comes from code, not files."""
        return ()

    def prepare(
        self,
        cache: str | Path,
        *,
        roots: Sequence[str] | None = None,
        report: Callable[[str], None] | None = None,
        read_checkpoint_files: Callable[[], Mapping[str, bytes]] | None = None,
        progress: ProgressCallback | None = None,
    ) -> ModuleData:
        check_allowed(self.spec, self._allowed_code)
        return ModuleData(self._data, self.spec.train.seed)

    def build_model(self, layout: "Layout") -> "Applied":
        check_allowed(self.spec, self._allowed_code)
        from moe import sharding
        from moe.tasks.module.build import build
        from moe.tasks.module.planning import check_optimizer
        from moe.tasks.module.shards import attach_shards

        if layout.module is None:
            raise spec_error("missing", "plan.module", None, "is required for a module's layout", "plan again")
        plan = sharding.ShardingPlan.from_json(layout.module.plan)
        check_optimizer(self.spec.train.optimizer, plan)
        seed = self.spec.train.seed
        module = build(self._model, seed).to(layout.device)
        sample = ModuleData(self._data, seed).batch(0)
        model = sharding.apply(module, plan, sample=sample, seed=seed)
        model.draws.seed = seed
        attach_shards(model)
        return model

    def batches(self, data: ModuleData, plan: "Plan", layout: "Layout") -> Callable[[int], RankBatch[ModuleBatch]]:
        from moe.tasks.module.build import num_rows

        def batch(step: int) -> RankBatch[ModuleBatch]:
            micro_batch = _local_batch(data, step, layout)
            return RankBatch(step, [micro_batch], num_targets=1, num_tokens=num_rows(micro_batch.arguments))

        return batch

    def dummy_batch(self, num_rows: int, num_tokens: int, layout: "Layout") -> ModuleBatch:
        """First batch: only the module's function can create one."""
        return _local_batch(self.prepare(""), 0, layout)

    def loss(self, model: Any, micro_batch: ModuleBatch) -> Loss:
        model.draws.step = micro_batch.step
        from moe.tasks.module.outputs import loss_and_numbers

        output = model(*model.arguments_of(micro_batch.arguments))
        loss, numbers = loss_and_numbers(output, self._model.build)
        return Loss(loss, loss.detach(), numbers)

    def measure_held_out(self, model: Any, layout: "Layout", data: ModuleData) -> HeldOutResult:
        """Empty: a module has no held-out sets."""
        return HeldOutResult({})

    def evaluate(self, model: Any, layout: "Layout", data: ModuleData) -> ModuleReport:
        """Loss and other scalars on the batch after the last training step."""
        import math

        import torch

        step = self.spec.train.num_steps
        with torch.no_grad():
            loss = self.loss(model, _local_batch(data, step, layout))
        numbers = {name: float(number) for name, number in loss.numbers.items()}
        finite = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        return ModuleReport(num_steps=step, loss=float(loss.nll), numbers=finite or None)


def _local_batch(data: ModuleData, step: int, layout: "Layout") -> ModuleBatch:
    from moe.tasks.module.build import move_batch

    return ModuleBatch(step, move_batch(data.batch(step), layout.device))
