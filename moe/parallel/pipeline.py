"""Execution of a pipeline schedule: the forward and backward passes of this rank's stages.

A stage's forward pass receives hidden states from the stage before and sends its outputs to the next one; its backward
pass receives the gradient of the outputs and sends that of the received states. Nothing else travels: MoE layers add
their auxiliary losses to the gradients of their own inputs. Sends do not wait for the other rank, and in each rank's
order of actions everything that it receives has been sent before (`moe.plan.schedule`), so no two ranks wait for each
other.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from moe.parallel import json_collectives
from moe.parallel.accelerator import accelerator
from moe.parallel.collective import during_action
from moe.parallel.deferred_gradients import DeferredGradients
from moe.parallel.fsdp import reduce_late_gradients
from moe.parallel.mesh import Layout
from moe.parallel.stage_links import StageLinks, Transfer
from moe.parallel.stages import ModelStages, Results, StagePass, VirtualStage, trained_stages
from moe.plan.schedule import Action, Turn, schedule_turns, splits_backward


class HasObjective(Protocol):
    """Result of a forward pass."""

    @property
    def objective(self) -> Tensor:
        """Scalar to minimize."""


LossT = TypeVar("LossT", bound=HasObjective)


class StageExecutor:
    """Runs a schedule's actions on this rank's stages of a model; without a pipeline, on all of the model.

    A forward pass leaves its graph, the hidden states that it received, and the gradient edge of those that it sent;
    the backward pass frees them.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        """Collective."""
        self._model, self._layout = model, layout
        self._stages: ModelStages = getattr(model, "stages", None) or ModelStages.whole(0)
        self._local = {stage.index: stage for stage in self._stages.local}
        self._is_pipeline = layout.degree("pipeline") > 1
        self._links = StageLinks(layout)
        self._first_trained = self._find_first_trained() if self._is_pipeline else 0
        self._passes: dict[tuple[int, int], _ForwardPass] = {}
        """Forward passes that await their backward passes, by (stage, micro-batch)."""
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}
        """Gradients of weights that await `backward_weight`, by (stage, micro-batch)."""
        self._gradient_sends: list[Transfer] = []
        self._turns: dict[int, Sequence[Turn]] = {}
        """This rank's turns by number of micro-batches: those of many ranks take tens of milliseconds to list."""

    @property
    def device(self) -> torch.device:
        """Device of the passes."""
        return self._layout.device

    def has_loss(self, action: Action) -> bool:
        """Whether the loss of a forward pass counts: that of the last stage."""
        return self._local[action.stage].is_last

    def turns(self, num_micro_batches: int) -> Sequence[Turn]:
        """This rank's actions of a step, in turns of one action or two."""
        if num_micro_batches not in self._turns:
            layout = self._layout
            sizes = layout.degree("pipeline"), layout.virtual_stages, num_micro_batches
            turns_by_rank = schedule_turns(layout.schedule, *sizes, side_by_side=layout.overlap)
            self._turns[num_micro_batches] = turns_by_rank[layout.index("pipeline")]
        return self._turns[num_micro_batches]

    def forward(self, action: Action, compute_loss: Callable[[], LossT]) -> LossT:
        """Run a stage's forward pass by `compute_loss`, which runs the model; return its result, whose objective counts
        on the last stage only."""
        stage = self._local[action.stage]
        forward_pass = _ForwardPass(stage, self._links, self._first_trained, self._layout)
        if not self._is_pipeline:
            loss = compute_loss()
        else:
            with during_action(str(action)), self._stages.running(stage, forward_pass), self._deferring(action):
                loss = compute_loss()
        if stage.is_last:
            forward_pass.objective = loss.objective
        self._passes[action.stage, action.micro_batch] = forward_pass
        return loss

    def backward(self, action: Action, num_targets: int) -> None:
        """Run the backward pass of a stage, or the part that the action names, of the objective divided by
        `num_targets`."""
        with during_action(str(action)) if self._is_pipeline else nullcontext():
            if action.kind == "backward_weight":
                self._deferred.pop((action.stage, action.micro_batch)).compute()
                reduce_late_gradients(self._model)
            else:
                with self._deferring(action):
                    self._compute_gradients(action, num_targets)

    def _compute_gradients(self, action: Action, num_targets: int) -> None:
        forward_pass = self._passes.pop((action.stage, action.micro_batch))
        if self._is_pipeline and isinstance(self._model, FSDPModule):
            # An earlier micro-batch's backward pass has freed the parameters outside blocks, and FSDP gathers them only
            # where the gradient of the model's output arrives: after that of the head.
            self._model.unshard()
        if forward_pass.objective is not None:
            (forward_pass.objective / num_targets).backward()
        else:
            forward_pass.backward()
        for x in forward_pass.inputs:
            self._send_gradient(action.stage, torch.zeros_like(x) if x.grad is None else x.grad)

    def _deferring(self, action: Action) -> AbstractContextManager[None]:
        """Context of a pass whose gradients of weights are deferred, if the schedule splits backward passes."""
        if not splits_backward(self._layout.schedule):
            return nullcontext()
        return self._deferred.setdefault((action.stage, action.micro_batch), DeferredGradients()).deferring()

    def finish(self) -> None:
        """Wait for all sends of a step."""
        for transfer in self._gradient_sends:
            transfer.wait()
        self._gradient_sends.clear()

    def discard(self) -> None:
        """Forget the passes of a step that failed, and free their activations."""
        self._passes.clear()
        self._deferred.clear()
        self._gradient_sends.clear()
        self._links = StageLinks(self._layout)

    def _send_gradient(self, stage: int, gradient: Tensor) -> None:
        if _receives_early(self._layout):
            self.finish()  # not for long, since these gradients are being received
        self._gradient_sends = [transfer for transfer in self._gradient_sends if not transfer.is_completed()]
        self._gradient_sends.append(self._links.send(stage, stage - 1, gradient))

    def _find_first_trained(self) -> int:
        """First stage with trained parameters: those before get no gradient. Collective."""
        stages_by_rank = json_collectives.all_gather_json(trained_stages(self._model))
        return min((stage for stages in stages_by_rank for stage in stages), default=0)


@dataclass
class _Sent:
    """Hidden states sent to the next stage. They are freed once they have arrived."""

    transfer: Transfer
    edge: GradientEdge | None
    """Edge of the graph that takes their gradient; None if no parameter needs it."""
    receive_gradient: Callable[[], Transfer]
    gradient: Transfer | None = None
    """Their gradient, if it is being received."""


class _ForwardPass(StagePass):
    """Forward pass of a stage on a micro-batch, with the tensors that its backward pass needs."""

    def __init__(self, stage: VirtualStage, links: StageLinks, first_trained: int, layout: Layout) -> None:
        self._stage, self._links, self._first_trained, self._layout = stage, links, first_trained, layout
        self.inputs: list[Tensor] = []
        """Received hidden states that need a gradient."""
        self.objective: Tensor | None = None
        """Scalar to minimize; on the last stage only."""
        self._sent: list[_Sent] = []
        self._sent_without_gradient: list[Transfer] = []

    def receive(self, stage: VirtualStage, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        x = self._links.receive(stage.index - 1, stage.index, shape, dtype, device).wait()
        if torch.is_grad_enabled() and dtype.is_floating_point and self._first_trained < stage.index:
            self.inputs.append(x.requires_grad_())
        return x

    def send(self, stage: VirtualStage, x: Tensor) -> None:
        index, shape, dtype, device = stage.index, x.shape, x.dtype, x.device
        transfer = self._links.send(index, index + 1, x)
        if not torch.is_grad_enabled() or not dtype.is_floating_point or index < self._first_trained:
            self._sent_without_gradient.append(transfer)
            return
        edge = get_gradient_edge(x) if x.requires_grad else None
        sent = _Sent(transfer, edge, lambda: self._links.receive(index + 1, index, shape, dtype, device))
        if _receives_early(self._layout):
            sent.gradient = sent.receive_gradient()
        self._sent.append(sent)

    def on_last_stage(
        self, compute: Callable[[], Results], shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> Results:
        if self._stage.is_last:
            return compute()
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

    def discard(self) -> None:
        """Do nothing: the executor forgets all passes of a step that fails."""

    def backward(self) -> None:
        """Compute the gradients of the stage from those of the hidden states that it sent."""
        for transfer in self._sent_without_gradient:
            transfer.wait()
        edges, gradients = list[GradientEdge](), list[Tensor]()
        for sent in self._sent:
            gradient = (sent.gradient or sent.receive_gradient()).wait()
            sent.transfer.wait()  # at once: the next stage has had them
            if sent.edge is not None:
                edges.append(sent.edge)
                gradients.append(gradient)
        if edges:
            torch.autograd.backward(edges, gradients)


def _receives_early(layout: Layout) -> bool:
    """Whether gradients are received as soon as possible, so that the sender can free them. On a GPU a waiting receive
    would take up multiprocessors, and the host can ask whether a send is completed."""
    return not accelerator(layout.device).runs_ahead
