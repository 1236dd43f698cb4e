"""What lies beside parameters from step to step: narrow copies that are made once a step, and gradients' memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe.experts import Experts
from moe.layers.nll import smoothed_nll
from moe.parallel import Layout, LocalParameter, buffers_of, forget_gradients, local_parameters, reduce_gradients
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
OPTIMIZERS: list[OptimizerSpec] = [AdamWSpec(name="adamw", peak_lr=1e-2), AdafactorSpec(name="adafactor", peak_lr=1e-2)]
NEVER_NARROWED = ("embedding", "norm", "router")
"""Tables, whose rows are narrowed; vectors of a few numbers; and what is float32 in any arithmetic."""


def is_narrowed(each: LocalParameter) -> bool:
    return not any(word in each.name for word in NEVER_NARROWED)


class Training:
    """A model, its optimizer and some micro-batches."""

    def __init__(self, optimizer: OptimizerSpec, recompute: str = "none", dtype: torch.dtype = torch.bfloat16) -> None:
        layout = replace(Layout.single(), recompute=recompute)  # type: ignore[arg-type]
        self.layout = layout
        self.model: TranslationModel = build_model(MODEL, layout, dtype=dtype)
        self.parameters = local_parameters(self.model)
        self.optimizer = build_optimizer(optimizer, self.parameters, layout)
        numbers = torch.Generator().manual_seed(0)
        self.micro_batches = [torch.randint(5, 50, (4, 8), generator=numbers) for _ in range(2)]

    def micro_batch(self, tokens: Tensor) -> float:
        hidden = self.model.hidden_states(tokens, tokens, BatchContext())
        loss, nll = smoothed_nll(hidden, self.model.output_embedding, tokens, 0.1, 0)
        loss.backward()
        return float(nll)

    def step(self) -> list[float]:
        forget_gradients(self.parameters)
        found = [self.micro_batch(tokens) for tokens in self.micro_batches]
        reduce_gradients(self.parameters, self.layout)
        self.optimizer.step()
        return found


class Narrowings(TorchDispatchMode):
    """Counts the copies that are made of tensors of these shapes in another dtype."""

    def __init__(self, parameters: list[LocalParameter]) -> None:
        super().__init__()
        self._pointers = {each.local.data_ptr() for each in parameters}
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        source = given[1] if function is torch.ops.aten.copy_.default else given[0] if given else None
        copies = function in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
        made = function(*given, **(named or {}))
        if copies and isinstance(source, Tensor) and source.data_ptr() in self._pointers:
            self.count += made.dtype == torch.bfloat16
        return made


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.name)
def test_parameters_are_narrowed_once_a_step(optimizer: OptimizerSpec) -> None:
    training = Training(optimizer)
    often = [each for each in training.parameters if is_narrowed(each)]
    for _ in range(2):
        with Narrowings(often) as narrowings:
            training.step()
        assert narrowings.count == len(often)


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.name)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_kept_copies_change_no_loss_and_no_gradient(optimizer: OptimizerSpec, recompute: str) -> None:
    """Beside a model whose parameters have no buffers, after an update of every parameter."""
    training, plain = Training(optimizer, recompute), Training(optimizer, recompute)
    for each in plain.parameters:
        del each.parameter.beside  # type: ignore[attr-defined]
    for _ in range(3):
        assert training.step() == plain.step()
        for ours, theirs in zip(training.parameters, plain.parameters, strict=True):
            assert ours.parameter.grad is not None
            assert torch.equal(ours.parameter.grad, theirs.parameter.grad), ours.name


def test_what_is_loaded_is_narrowed_anew(tmp_path: Path) -> None:
    """From a checkpoint of another run that is further on."""

    def checkpointer_of(training: Training) -> Checkpointer:
        tensors = run_tensors(training.model, training.parameters, training.optimizer, training.layout)
        return Checkpointer(Folder(str(tmp_path)), training.layout, tensors, attempt=1, group=0, keep=1,
                            files={}, recorder=MemoryRecorder())  # fmt: skip

    further, training = Training(OPTIMIZERS[0]), Training(OPTIMIZERS[0])
    checkpointer = checkpointer_of(training)
    tokens = training.micro_batches[0]
    before = training.micro_batch(tokens)
    assert further.step()[0] == before
    checkpointer_of(further).save(1, b"{}")
    assert checkpointer.restore() is not None
    assert training.micro_batch(tokens) == further.micro_batch(tokens) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_experts_lie_where_the_last_step_s_lay(dtype: torch.dtype) -> None:
    training = Training(OPTIMIZERS[0], dtype=dtype)
    experts = [module for module in training.model.modules() if isinstance(module, Experts)]
    places = []
    for _ in range(3):
        training.step()
        gradients = [each.grad for of_layer in experts for each in (of_layer.w_in, of_layer.w_out)]
        places.append([each.data_ptr() for each in gradients if each is not None])
    assert len(places[0]) == 4
    assert places[0] == places[1] == places[2]


def test_an_expert_without_rows_has_a_gradient_of_zeros_where_another_lay() -> None:
    training = Training(OPTIMIZERS[0])
    training.step()
    experts = next(module for module in training.model.modules() if isinstance(module, Experts))
    forget_gradients(training.parameters)
    rows = torch.ones(3, MODEL.model_dim, dtype=torch.bfloat16)
    experts(rows, torch.ones(3), experts.local_computation([3, 0, 0, 0])).sum().backward()
    assert experts.w_in.grad is not None
    assert experts.w_in.grad[0].any()
    assert not experts.w_in.grad[1:].any()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_copies_take_what_the_planner_counts(recompute: str) -> None:
    """All of what layers multiply with, to the byte; where whole blocks are computed again, nothing is kept."""
    training = Training(OPTIMIZERS[0], recompute)
    training.step()
    kept = 0
    for each in training.parameters:
        beside = buffers_of(each.parameter)
        assert beside is not None
        kept += beside.narrow_bytes
    in_layers = state_of(MODEL, Degrees(), OPTIMIZERS[0]).in_layers
    others = sum(
        each.local.numel()
        for each in training.parameters
        if not is_narrowed(each) and each.name.startswith(("encoder.", "decoder."))
    )
    assert kept == (2 * (in_layers - others) if recompute == "none" else 0)
