"""AdamW with moments in bfloat16 or on the host, against torch's AdamW."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.parallel import Layout, local_parameters
from moe.spec import AdamWSpec
from moe.storage.folder import Folder
from moe.train.checkpoint import shards
from moe.train.optimizer import stored_moments
from moe.train.optimizer.build import build_optimizer, set_learning_rate
from moe.train.optimizer.stored_moments import StoredMomentsAdamW
from tests.refusals import expect_problem
from tests.unit.train_runs import corpus, job, run


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"matrix": (7, 5), "vector": (6,), "scalar": (), "empty": (0, 3)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def with_gradients(model: nn.Module, step: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return list(model.parameters())


@pytest.mark.parametrize("elements_at_once", [1, 10, 1 << 20])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_equals_torchs_adamw_with_state_rounded_after_each_step(
    monkeypatch: pytest.MonkeyPatch, moments: Any, elements_at_once: int
) -> None:
    """Bit by bit if a parameter is updated at once; otherwise torch's kernel rounds the last digit of rows that do not
    fill its vectors in another way."""
    monkeypatch.setitem(stored_moments._ELEMENTS_AT_ONCE, "cpu", elements_at_once)
    spec = AdamWSpec(name="adamw", beta2=0.95, eps=1e-8, weight_decay=0.1, moments=moments)
    model, reference = Model(), Model()
    optimizer = StoredMomentsAdamW(spec, local_parameters(model), on_host=True)
    expected = torch.optim.AdamW(
        [{"params": [reference.matrix, reference.empty], "weight_decay": 0.1},
         {"params": [reference.vector, reference.scalar], "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    for step in range(5):
        with_gradients(model, step)
        with_gradients(reference, step)
        set_learning_rate(optimizer, 0.01)
        optimizer.step()
        expected.step()
        for state in expected.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(getattr(torch, moments)).float()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=0, atol=0.0 if elements_at_once == 1 << 20 else 1e-4)
        state: dict[str, Tensor] = optimizer.state[parameter]
        assert {str(state[name].dtype) for name in ("exp_avg", "exp_avg_sq")} == {f"torch.{moments}"}


def test_another_dtype_of_moments_is_loaded_from_a_checkpoint(tmp_path: Path) -> None:
    """As when a job starts from another one's checkpoint."""
    run(job(corpus(tmp_path), train={"num_steps": 1}), tmp_path / "storage", tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "storage" / "checkpoints").glob("step-*") if path.is_dir())
    name = "optimizer.exp_avg_sq.encoder.1.feed_forward.moe.experts.w_in"
    stored, narrow = (torch.empty(4, 16, 24, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    for tensor in (stored, narrow):
        shards.load(Folder(str(folder)), {name: tensor})
    assert stored.any()
    assert torch.equal(narrow, stored.bfloat16())


def test_the_spec_chooses_it() -> None:
    def kind(**fields: Any) -> type:
        spec = AdamWSpec(name="adamw", **fields)
        return type(build_optimizer(spec, local_parameters(Model()), Layout.single()))

    assert kind(moments="bfloat16") is StoredMomentsAdamW
    assert kind() is kind(offload=True) is torch.optim.AdamW  # weights on a CPU have their moments there


def test_moments_that_would_never_decrease_are_refused() -> None:
    AdamWSpec(name="adamw", moments="bfloat16", beta2=0.996)
    with expect_problem("out_of_range", "beta2", 0.999):
        AdamWSpec(name="adamw", moments="bfloat16", beta2=0.999)
    moment = torch.rand(1000).bfloat16() + 0.1
    assert ((moment.float() * 0.996).bfloat16() < moment).all()
    assert ((moment.float() * 0.999).bfloat16() == moment).any()
