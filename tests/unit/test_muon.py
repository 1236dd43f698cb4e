"""Muon against torch's, and against an exact orthogonalization."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moe.parallel import Layout, ParameterShard, local_parameters
from moe.parallel.whole_matrices import _Block, _Matrix, _with_owners
from moe.plan import Cluster, plan_job
from moe.spec import JobSpec, MuonSpec, model_spec
from moe.spec.patterns import layer_pattern
from moe.tasks.module.planning import check_optimizer
from moe.train.optimizer.build import build_optimizer, set_learning_rate
from moe.train.optimizer.muon import orthogonalize_
from tests.refusals import expect_problem
from tests.unit.test_spec import job

SPEC = MuonSpec(name="muon", momentum=0.9, weight_decay=0.1, eps=1e-8)
SHAPES = {"wide": (24, 40), "tall": (40, 24), "experts": (3, 16, 40), "pair": (2, 40, 16), "norm": (24,),
          "embedding": (50, 24), "expert_bias": (3, 40)}  # fmt: skip
MATRICES = ("wide", "tall", "experts", "pair")


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
            parameter.part = ParameterShard(  # type: ignore[attr-defined]
                parameter.shape, of_experts=name.startswith("expert"), is_hidden_matrix=name in MATRICES
            )
            self.register_parameter(name, parameter)


def gradient(shape: torch.Size, step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def test_equals_torch_with_each_matrix_by_itself() -> None:
    """Four steps in float32, bit by bit, with torch's AdamW for the rest."""
    model, reference = Model(torch.float32), dict(Model(torch.float32).named_parameters())
    optimizer = build_optimizer(SPEC, local_parameters(model), Layout.single())
    single = {
        name: [nn.Parameter(matrix.clone()) for matrix in reference[name].detach().view(-1, *SHAPES[name][-2:])]
        for name in MATRICES
    }
    muon = torch.optim.Muon(
        [matrix for matrices in single.values() for matrix in matrices], lr=0.01, momentum=0.9, weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    adamw = torch.optim.AdamW(
        [{"params": [reference["embedding"]], "weight_decay": 0.1},
         {"params": [reference["norm"], reference["expert_bias"]], "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.98), eps=1e-8, fused=True,
    )  # fmt: skip
    for step in range(4):
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(parameter.shape, step).float()
            reference[name].grad = parameter.grad.clone()
            for matrix, part in zip(single.get(name, []), parameter.grad.view(-1, *SHAPES[name][-2:]), strict=False):
                matrix.grad = part.clone()
        set_learning_rate(optimizer, 0.01)
        optimizer.step()
        muon.step()
        adamw.step()
    for name, parameter in model.named_parameters():
        matrices = [matrix.detach() for matrix in single.get(name, [])]
        expected = torch.stack(matrices).view(parameter.shape) if matrices else reference[name]
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("shape", [(3, 6, 10), (2, 10, 6), (1, 5, 5)])
def test_singular_values_go_through_the_polynomial_and_vectors_stay(shape: tuple[int, ...]) -> None:
    matrices = gradient(torch.Size(shape), 1)
    matrices[0, :, 1] = matrices[0, :, 0]  # not of full rank
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / matrices.flatten(1).norm(dim=1)[:, None]
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    orthogonalize_(matrices, 5)
    torch.testing.assert_close(matrices, left @ torch.diag_embed(values) @ right)


def test_zeros_stay_zeros() -> None:
    matrices = torch.zeros(2, 4, 3)
    orthogonalize_(matrices, 5)
    assert not matrices.any()


def hidden_matrices(model: dict[str, Any]) -> set[str]:
    return {layer_pattern(weight.name) for weight in model_spec(model).parameters() if weight.is_hidden_matrix}


def test_hidden_matrices_are_no_embeddings_heads_routers_or_convolutions() -> None:
    kinds = {layer_pattern(weight.name) for weight in model_spec({"preset": "gpt-oss-20b"}).parameters()}
    others = kinds - hidden_matrices({"preset": "gpt-oss-20b"})
    assert hidden_matrices({"preset": "gpt-oss-20b"}) == {
        *(f"layers.*.attention.{name}.weight" for name in ("query", "key", "value", "output")),
        *(f"layers.*.feed_forward.moe.experts.{name}" for name in ("w_in", "w_gate", "w_out")),
    }
    assert {"embedding.weight", "output.weight", "layers.*.feed_forward.moe.router"} < others
    assert "layers.*.attention.convolution.weight" not in hidden_matrices({"preset": "qwen3-next-80b-a3b"})
    assert "layers.*.attention.projection.weight" in hidden_matrices({"preset": "qwen3-next-80b-a3b"})


def test_a_job_without_a_hidden_matrix_to_train_is_refused() -> None:
    train = {"optimizer": {"name": "muon"}, "freeze": ["*.w_*", "*.attention.*", "*.cross_attention.*"]}
    with expect_problem("not_applicable", "train.optimizer.name", "muon"):
        JobSpec.parse(job(train=train))


def test_the_planner_counts_orthogonalization_spread_over_the_ranks() -> None:
    """The same weights on each rank, so that AdamW takes as long on 4 ranks as on 8."""

    def optimizer_s(name: str, workers: int) -> float:
        fields = {
            "model": {"preset": "olmoe-1b-7b"}, "data": {"corpus": "synthetic", "max_tokens": 4096},
            "train": {"num_steps": 1, "batch_tokens": 64 * 4096, "dtype": "bfloat16", "optimizer": {"name": name}},
            "resources": {"num_workers": workers},
            "parallel": {"expert": 4, "tensor": 1, "fsdp": 1, "expert_fsdp": 1, "context": 1, "pipeline": 1},
        }  # fmt: skip
        cluster = Cluster(num_nodes=1, devices_per_node=workers, device="h200")
        return plan_job(JobSpec.parse(fields), cluster).predicted.optimizer_s

    extra_s = [optimizer_s("muon", workers) - optimizer_s("adamw", workers) for workers in (4, 8)]
    assert 0 < extra_s[1] < extra_s[0]


def test_a_users_module_is_refused() -> None:
    with expect_problem("not_applicable", "train.optimizer.name", "muon"):
        check_optimizer(SPEC, SimpleNamespace(parameters={"weight": "R"}))  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=40), st.integers(1, 6))
def test_matrices_are_spread_evenly_over_the_ranks_that_have_parts_of_them(
    shapes: list[tuple[int, int]], num_ranks: int
) -> None:
    """Replicas on all ranks: loads differ by at most one matrix. On a rank alone: no other owns it."""
    blocks = [_Block(rank, 0, (0, 1), (0, 1)) for rank in range(num_ranks)]
    loads = [0] * num_ranks
    matrices = _with_owners([_Matrix(0, shape, tuple(blocks)) for shape in shapes], loads)
    assert sum(loads) == sum(matrix.cost for matrix in matrices)
    assert max(loads) - min(loads) <= max(matrix.cost for matrix in matrices)
    (matrix,) = _with_owners([_Matrix(0, (3, 3), (blocks[-1],))], loads)
    assert matrix.owner == num_ranks - 1
