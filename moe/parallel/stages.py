"""Stages of a model in a pipeline: the layers that this rank has, and how hidden states reach the next stage.

A model runs `ModelStages.active` in order. Between two stages it calls `send` and `receive`; what the last stage alone
can compute, it computes in `on_last_stage`. Outside a schedule a pass runs all stages, one after the other, and every
rank gets the results; `StagePass` is replaced by the executor of a schedule, which runs one stage at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.parallel.collective import collective
from moe.parallel.mesh import Layout
from moe.parallel.parameters import shard_of
from moe.parallel.stage_links import StageLinks, Transfer
from moe.plan.schedule import stages_of_rank
from moe.spec.stages import even_stages

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class VirtualStage:
    """Consecutive layers of a model on one pipeline rank."""

    index: int
    """In model order."""
    num_stages: int
    """Stages of the model."""
    layers: range
    """Numbers of its layers."""

    @property
    def is_first(self) -> bool:
        """Whether it has the embeddings."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.index == self.num_stages - 1


class StagePass(ABC):
    """Exchange of hidden states between stages in a forward pass."""

    @abstractmethod
    def receive(self, stage: VirtualStage, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Output of the stage before `stage`."""

    @abstractmethod
    def send(self, stage: VirtualStage, x: Tensor) -> None:
        """Send the output of `stage` to the next stage."""

    @abstractmethod
    def on_last_stage(
        self, compute: Callable[[], Results], shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> Results:
        """Results of `compute`, which only the rank with the last stage can call; `shapes` and `dtype` are theirs."""

    @abstractmethod
    def discard(self) -> None:
        """Forget what a pass that failed has sent."""


class WholePass(StagePass):
    """Pass of a model whose stages are all on this rank: there is one, since nothing is exchanged."""

    def receive(self, stage: VirtualStage, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        raise AssertionError("the first stage receives nothing")

    def send(self, stage: VirtualStage, x: Tensor) -> None:
        raise AssertionError("the last stage sends nothing")

    def on_last_stage(
        self, compute: Callable[[], Results], shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> Results:
        return compute()

    def discard(self) -> None:
        pass


class DirectPass(StagePass):
    """Pass without gradients through all stages, after which all pipeline ranks have the results."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._links = layout, StageLinks(layout)
        self._sends: list[Transfer] = []

    def receive(self, stage: VirtualStage, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a pass through pipeline stages has gradients in a training step only; use torch.no_grad()"
            )
        return self._links.receive(stage.index - 1, stage.index, shape, dtype, device).wait()

    def send(self, stage: VirtualStage, x: Tensor) -> None:
        self._sends.append(self._links.send(stage.index, stage.index + 1, x))

    def on_last_stage(
        self, compute: Callable[[], Results], shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> Results:
        source = self._layout.rank_of_stage(self._layout.num_stages - 1)
        if source == self._layout.rank:
            results = tuple(result.contiguous() for result in compute())
        else:
            results = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        for result in results:
            with collective("broadcast of the last stage's results"):
                dist.broadcast(result, src=source, group=self._layout.group("pipeline"))
        for transfer in self._sends:
            transfer.wait()  # not for long: the last stage has had all before it
        self._sends.clear()
        return results

    def discard(self) -> None:
        self._sends.clear()
        self._links = StageLinks(self._layout)


@runtime_checkable
class StagedModel(Protocol):
    """Model that can be cut into stages."""

    stages: "ModelStages"

    def stage_parts(self, stage: VirtualStage) -> Iterator[str]:
        """Paths of the modules and parameters of a stage; tied tables belong to all that use them."""


class ModelStages:
    """Stages of a model on this rank, and those that a pass runs."""

    def __init__(self, local: Sequence[VirtualStage], stage_pass: StagePass) -> None:
        self.local = tuple(local)
        """This rank's stages, in model order."""
        self.active = self.local
        """Stages that a pass runs."""
        self._pass = stage_pass

    @classmethod
    def whole(cls, num_layers: int) -> "ModelStages":
        """One stage with all layers."""
        return cls([VirtualStage(0, 1, range(num_layers))], WholePass())

    @classmethod
    def of_layout(cls, num_layers: int, layout: Layout) -> "ModelStages":
        """This rank's stages under a layout, whose stage cut fits the model."""
        if layout.degree("pipeline") == 1:
            return cls.whole(num_layers)
        num_stages = layout.num_stages
        ends = list(accumulate(layout.stages or even_stages(num_layers, num_stages)))
        assert len(ends) == num_stages, "Layout.build refuses other plans"
        assert ends[-1] == num_layers, "stage_problems refuses other cuts"
        own = stages_of_rank(
            layout.schedule, layout.index("pipeline"), layout.degree("pipeline"), layout.virtual_stages
        )
        local = [VirtualStage(stage, num_stages, range(ends[stage - 1] if stage else 0, ends[stage])) for stage in own]
        return cls(local, DirectPass(layout))

    @contextmanager
    def running(self, stage: VirtualStage, stage_pass: StagePass) -> Iterator[None]:
        """Context in which a pass runs one stage."""
        before, self.active, self._pass = (self.active, self._pass), (stage,), stage_pass
        try:
            yield
        finally:
            self.active, self._pass = before

    @contextmanager
    def passing(self) -> Iterator[Sequence[VirtualStage]]:
        """Context of a part of a pass, with the stages that it runs. If it fails, what it sent is freed."""
        try:
            yield self.active
        except BaseException:
            self._pass.discard()
            raise

    def receive(self, stage: VirtualStage, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Output of the stage before `stage`."""
        return self._pass.receive(stage, shape, dtype, device)

    def send(self, stage: VirtualStage, x: Tensor) -> None:
        """Send the output of `stage` to the next stage."""
        self._pass.send(stage, x)

    def on_last_stage(
        self, compute: Callable[[], Results], shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> Results:
        """Results of `compute` on the last stage. In a training step, other stages get zeros, which must not count; in
        other passes all pipeline ranks get the results."""
        with self.passing():
            return self._pass.on_last_stage(compute, shapes, dtype, device)


def cut(model: nn.Module, num_layers: int, layout: Layout) -> None:
    """Remove the parts of other stages from a model, in place; those of this rank's stages keep their names."""
    assert isinstance(model, StagedModel)
    model.stages = ModelStages.of_layout(num_layers, layout)
    _keep(model, {path for stage in model.stages.local for path in model.stage_parts(stage)})


def mark_tied_tables(model: nn.Module, layout: Layout) -> None:
    """Mark the parameters that the first and the last stage both have, if these are on two ranks, so that their
    gradients are summed over both, and counted once."""
    if layout.tied_tables_group is None:
        return
    assert isinstance(model, StagedModel)
    num_stages = layout.num_stages
    first, last = ({*model.stage_parts(VirtualStage(stage, num_stages, range(0)))} for stage in (0, num_stages - 1))
    for name, parameter in model.named_parameters():
        if _is_in(name, first & last):
            parameter.part = replace(shard_of(parameter), stage_copies=2)  # type: ignore[attr-defined]


def trained_stages(model: nn.Module) -> list[int]:
    """This rank's stages with trained parameters."""
    assert isinstance(model, StagedModel)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        stage.index
        for stage in model.stages.local
        if any(_is_in(name, [*model.stage_parts(stage)]) for name in trained)
    ]


def stage_of(model: nn.Module, path: str) -> int:
    """First of this rank's stages with a module or parameter; 0 without a pipeline."""
    if isinstance(model, StagedModel):
        for stage in model.stages.local:
            if _is_in(path, [*model.stage_parts(stage)]):
                return stage.index
    return 0


def _is_in(name: str, paths: Collection[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _keep(module: nn.Module, paths: Collection[str]) -> None:
    """Remove all submodules and parameters except those at `paths`."""
    for name in [name for name in module._parameters if name not in paths]:
        module.register_parameter(name, None)
    for name, child in list(module.named_children()):
        if name in paths:
            continue
        inner_paths = {path.removeprefix(f"{name}.") for path in paths if path.startswith(f"{name}.")}
        if inner_paths:
            _keep(child, inner_paths)
        else:
            module.register_module(name, None)
