"""Parameter buffers from step to step: bfloat16 copies made once a step, and gradient memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe.experts import Experts
from moe.layers.nll import smoothed_nll
from moe.parallel import Layout, LocalParameter, buffers_of, discard_gradients, local_parameters, reduce_gradients
from moe.plan.cost.state import state_of
from moe.plan.degrees import Degrees
from moe.spec import AdafactorSpec, AdamWSpec, OptimizerSpec, TranslationModelSpec
from moe.storage.folder import Folder
from moe.tasks.batch_context import BatchContext
from moe.tasks.translation import TranslationModel, build_model
from moe.train.checkpoint.checkpointer import Checkpointer
from moe.train.checkpoint.state import run_tensors
from moe.train.optimizer.build import build_optimizer
from moe.train.recorder import MemoryRecorder

MODEL = TranslationModelSpec.model_validate(
    {
        "model_dim": 16, "num_heads": 2, "head_dim": 8, "ffn_dim": 32, "num_encoder_layers": 2,
        "num_decoder_layers": 2, "source_vocab_size": 300, "target_vocab_size": 300, "dropout": 0.0,
        "moe": {
            "num_experts": 4, "hidden_dim": 24, "group_tokens": 32, "activation": "swiglu", "expert_bias": True,
            "shared_hidden_dim": 8, "router": "softmax_topk", "top_k": 2,
        },
    }
)  # fmt: skip
ADAMW = AdamWSpec(name="adamw", peak_lr=1e-2)
OPTIMIZERS: list[OptimizerSpec] = [ADAMW, AdafactorSpec(name="adafactor", peak_lr=1e-2)]


def has_copy(parameter: LocalParameter) -> bool:
    """Embeddings, small vectors and parameters that are always float32 have none."""
    return not any(word in parameter.name for word in ("embedding", "norm", "router"))


class Training:
    """A model, its optimizer and some micro-batches."""

    def __init__(
        self,
        optimizer: OptimizerSpec = ADAMW,
        recompute: Any = "none",
        dtype: torch.dtype = torch.bfloat16,
        frozen: str | None = None,
    ) -> None:
        """Parameters whose names begin with `frozen` are not trained."""
        self.layout = replace(Layout.single(), recompute=recompute)
        self.model: TranslationModel = build_model(MODEL, self.layout, dtype=dtype)
        self.parameters = local_parameters(self.model)
        for parameter in self.parameters:
            parameter.parameter.requires_grad_(frozen is None or not parameter.name.startswith(frozen))
        self.optimizer = build_optimizer(optimizer, self.parameters, self.layout)
        self.experts = [module for module in self.model.modules() if isinstance(module, Experts)]
        numbers = torch.Generator().manual_seed(0)
        self.micro_batches = [torch.randint(5, 50, (4, 8), generator=numbers) for _ in range(2)]

    def micro_batch(self, tokens: Tensor) -> float:
        hidden_states = self.model.hidden_states(tokens, tokens, BatchContext())
        loss, nll = smoothed_nll(hidden_states, self.model.output_embedding, tokens, 0.1, 0)
        loss.backward()
        return float(nll)

    def step(self) -> list[float]:
        discard_gradients(self.parameters)
        losses = [self.micro_batch(tokens) for tokens in self.micro_batches]
        reduce_gradients(self.parameters, self.layout)
        self.optimizer.step()
        return losses


class Casts(TorchDispatchMode):
    """Counts the bfloat16 casts of these parameters."""

    def __init__(self, parameters: list[LocalParameter]) -> None:
        super().__init__()
        self._pointers = {parameter.local.data_ptr() for parameter in parameters}
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            source = args[1] if function is torch.ops.aten.copy_.default else args[0]
            self.count += source.data_ptr() in self._pointers and result.dtype == torch.bfloat16
        elif function is torch.ops.aten._foreach_copy_.default:
            self.count += sum(source.data_ptr() in self._pointers for source in args[1])
        return result


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda spec: spec.name)
def test_parameters_are_cast_once_a_step(optimizer: OptimizerSpec) -> None:
    """First for the first step's pass, then after each update; those that are frozen, only at first."""
    training = Training(optimizer, frozen="decoder")
    cast = [parameter for parameter in training.parameters if has_copy(parameter)]
    num_trained = sum(parameter.parameter.requires_grad for parameter in cast)
    assert 0 < num_trained < len(cast)
    for num_first in (len(cast), 0):
        with Casts(cast) as casts:
            training.step()
        assert casts.count == num_first + num_trained


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_buffers_change_no_loss_and_no_gradient(optimizer: OptimizerSpec, recompute: str) -> None:
    training, plain = Training(optimizer, recompute), Training(optimizer, recompute)
    for parameter in plain.parameters:
        del parameter.parameter.moe_buffers  # type: ignore[attr-defined]
    for _ in range(3):
        assert training.step() == plain.step()
        for actual, expected in zip(training.parameters, plain.parameters, strict=True):
            assert actual.parameter.grad is not None
            assert torch.equal(actual.parameter.grad, expected.parameter.grad), actual.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_parameter_keeps_the_memory_of_two_gradients(dtype: torch.dtype) -> None:
    """Autograd allocates the gradients of embeddings and norms; the others' memory is reused."""
    training = Training(dtype=dtype)
    for _ in range(3):
        training.step()
    buffers = {parameter.name: buffers_of(parameter.parameter) for parameter in training.parameters}
    assert [name for name, own in buffers.items() if own is not None and own._spare is not None] == []
    pointers = {parameter.name: parameter.local.grad.data_ptr() for parameter in training.parameters}
    training.step()
    reused = {parameter.name for parameter in training.parameters
              if parameter.local.grad.data_ptr() == pointers[parameter.name]}  # fmt: skip
    assert {name for name in pointers if "moe.w_" in name or "experts.w_" in name} <= reused


def test_restored_parameters_are_cast_again(tmp_path: Path) -> None:
    """From a checkpoint of another run, one step ahead."""

    def checkpointer_of(training: Training) -> Checkpointer:
        tensors = run_tensors(training.model, training.parameters, training.optimizer, training.layout)
        return Checkpointer(Folder(str(tmp_path)), training.layout, tensors, attempt=1, group=0, keep=1,
                            files={}, recorder=MemoryRecorder())  # fmt: skip

    further, training = Training(), Training()
    checkpointer, tokens = checkpointer_of(training), training.micro_batches[0]
    before = training.micro_batch(tokens)
    assert further.step()[0] == before
    checkpointer_of(further).save(1, b"{}")
    assert checkpointer.restore() is not None
    assert training.micro_batch(tokens) == further.micro_batch(tokens) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_experts_reuse_the_memory_of_the_last_step(dtype: torch.dtype) -> None:
    training, pointers = Training(dtype=dtype), []
    for _ in range(3):
        training.step()
        weights = [weight for experts in training.experts for weight in (experts.w_in, experts.w_out)]
        pointers.append([weight.grad.data_ptr() for weight in weights if weight.grad is not None])
    assert len(pointers[0]) == 4
    assert pointers[0] == pointers[1] == pointers[2]
    discard_gradients(training.parameters)  # now an expert has no rows: zeros replace its earlier gradient
    experts, rows = training.experts[0], torch.ones(3, MODEL.model_dim, dtype=dtype)
    experts(rows, torch.ones(3), experts.local_computation([3, 0, 0, 0])).sum().backward()
    assert experts.w_in.grad is not None
    assert experts.w_in.grad[0].any()
    assert not experts.w_in.grad[1:].any()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_copies_have_the_bytes_that_the_planner_predicts(recompute: str) -> None:
    """One copy of every matrix that layers multiply by; none is stored under full recomputation."""
    training = Training(recompute=recompute)
    training.step()
    buffers = [buffers_of(parameter.parameter) for parameter in training.parameters]
    num_bytes = sum(buffer.narrow_bytes for buffer in buffers if buffer is not None)
    in_layers = state_of(MODEL, Degrees(), ADAMW).in_layers - sum(
        parameter.local.numel()
        for parameter in training.parameters
        if not has_copy(parameter) and parameter.name.startswith(("encoder.", "decoder."))
    )
    assert num_bytes == (2 * in_layers if recompute == "none" else 0)
