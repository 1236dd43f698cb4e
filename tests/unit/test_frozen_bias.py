"""A frozen selection bias: no step changes it, and a checkpoint restores it."""

import torch

from moe.parallel import Layout
from moe.storage.folder import Folder
from moe.train.checkpoint.checkpointer import Checkpointer
from moe.train.checkpoint.state import run_tensors
from moe.train.recorder import MemoryRecorder
from tests.parity.combinations import model_of, train_of
from tests.parity.trajectory import state_of


def test_a_frozen_bias_is_restored_as_it_was_loaded_whatever_was_chosen(tmp_path):
    moe = {"router": "sigmoid_topk", "bias_update_rate": 0.0, "selection_bias": True}
    state = state_of(model_of(**moe), train_of(), Layout.single())  # which initializes frozen biases
    layers = state.moe_layers.local_layers.values()
    biases = [layer.router_bias.clone() for layer in layers]
    for layer in layers:
        layer.end_step(torch.tensor([9, 0, 0, 3]))
    checkpointer = Checkpointer(
        Folder(str(tmp_path)), Layout.single(),
        run_tensors(state.model, state.parameters, state.optimizer, Layout.single()),
        attempt=1, group=0, keep=1, files={"spec.json": b"{}"}, recorder=MemoryRecorder(),
    )  # fmt: skip
    checkpointer.save(1, b"{}")
    for layer in layers:
        layer.router_bias.zero_()
    checkpointer.restore()
    for layer, bias in zip(layers, biases, strict=True):
        assert bias.unique().numel() == 4
        assert torch.equal(layer.router_bias, bias)
