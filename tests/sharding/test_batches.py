"""Batches of applied modules: the same on every rank or each rank's own rows, and of any size."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe import sharding
from moe.sharding.applied.checksum import EVERY_CALLS, checksum
from moe.spec import SpecError
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import cores


class Classifier(nn.Module):
    """Labels, a mask of no rows and a temperature beside the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(6, 10), nn.Linear(10, 4), nn.BatchNorm1d(10)

    def forward(self, x: Tensor, labels: Tensor, kept: Tensor, temperature: Tensor) -> dict[str, Tensor]:
        logits = self.outer(torch.tanh(self.norm(self.inner(x * kept)))) / temperature
        return {"loss": F.cross_entropy(logits, labels), "logits": logits.detach()}


def batch_of(num_rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 6, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 4, (num_rows,), generator=draw)
    return x, labels, torch.ones(6, dtype=torch.bool), torch.tensor(2.0, dtype=torch.float64)


def rows_of_rank(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = len(batch[0]) // ranks
    mine = slice(rank * rows, (rank + 1) * rows)
    return batch[0][mine], batch[1][mine], *batch[2:]


def applied_on(mesh: dict[str, int], **options: object) -> tuple[nn.Module, sharding.Applied]:
    torch.manual_seed(0)
    module = Classifier().double()
    hints = {"inputs.0": sharding.Split(0), "*.weight": sharding.Split(0)}
    plan = sharding.plan(module, batch_of(8), cores(math.prod(mesh.values())), hints, mesh=mesh)
    return module, sharding.apply(module, plan, **options)  # type: ignore[arg-type]


def different_on_ranks() -> list[str]:
    said = []
    for first_calls, rank, number in ((0, 1, 0), (0, 0, 1), (EVERY_CALLS, 1, 3)):
        _, applied = applied_on({"all": dist.get_world_size()})
        for _ in range(first_calls):
            with torch.no_grad():
                applied(*batch_of(8))
        batch = list(batch_of(8))
        if dist.get_rank() == rank:
            batch[number] = batch[number] + 1
        try:
            applied(*batch)
            said.append("")
        except ValueError as error:
            said.append(str(error))
        sharding.close(applied)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_other_batches_on_some_ranks_are_refused_on_all(ranks: Pools, world: int):
    for said in ranks[world].run(different_on_ranks):
        assert "(other values than on rank 0 at rank 1: inputs.0)" in said[0]
        others = "; ".join(f"rank {rank}: inputs.1" for rank in range(1, world))
        assert f"(other values than on rank 0 at {others})" in said[1]
        assert "(other values than on rank 0 at rank 1: inputs.3)" in said[2]
        assert all('batch="local"' in words for words in said)


def refused_on_one_rank() -> str:
    _, applied = applied_on({"all": 2})
    batch = batch_of(8)
    if dist.get_rank() == 1:
        batch = (batch[0].float(), *batch[1:])
    with pytest.raises(ValueError) as error:
        applied(*batch)
    sharding.close(applied)
    return str(error.value)


def test_a_batch_that_one_rank_refuses_ends_the_call_on_all(ranks: Pools):
    first, second = ranks[2].run(refused_on_one_rank)
    assert "refused on rank 1" in first
    assert second.startswith("inputs.0 (=[8, 6] torch.float32)")


def refused_after_the_first_call() -> list[str]:
    """What each rank raises where rank 1 alone calls otherwise, each between two right calls."""
    module, applied = applied_on({"all": 2})
    right, said = batch_of(8), []
    is_other = dist.get_rank() == 1
    expected = module(*right)["loss"]
    others: dict[str, tuple[tuple[Tensor, ...], dict[str, Tensor]]] = {
        "a dtype": ((right[0].float(), *right[1:]), {}),
        "an argument": (right, {"nothing": right[0]}),
        "a size": (batch_of(6), {}),
        "a mode": (right, {}),
        "no gradients": (right, {}),
    }
    for what, (batch, named) in others.items():
        assert torch.allclose(applied(*right)["loss"], expected)
        if what == "a mode" and is_other:
            applied.eval()
        try:
            with torch.set_grad_enabled(what != "no gradients" or not is_other):
                applied(*(batch if is_other else right), **(named if is_other else {}))
            said.append(f"{what} is not noticed")
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        applied.train()
    sharding.close(applied)
    return said


def test_a_rank_that_calls_otherwise_between_two_checks_ends_the_call_on_all(ranks: Pools):
    on_first, on_second = ranks[2].run(refused_after_the_first_call)
    refused = "ValueError: the batch is refused on rank 1; see the error there"
    otherwise = "ValueError: rank 1 calls with a batch of other sizes than rank 0, or in another mode"
    assert on_first[:2] == [refused, refused]
    assert on_second[0].startswith("ValueError: inputs.0 (=[8, 6] torch.float32)")
    assert on_second[1].startswith("TypeError: ")
    for said in (*on_first[2:], *on_second[2:]):
        assert said.startswith(otherwise)


def local_on_ranks(mesh: dict[str, int]) -> list[str]:
    """What differs from one device that has the global batch, in steps and in evaluation of other sizes."""
    module, applied = applied_on(mesh, batch="local")
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (module, applied)]
    wrong = []
    for step in range(3):
        batch = batch_of(8, step)
        found, expected = applied(*rows_of_rank(batch)), module(*batch)
        for each, optimizer in zip((expected, found), optimizers, strict=True):
            optimizer.zero_grad()
            each["loss"].backward()
            optimizer.step()
        wrong += [f"{key} {step}" for key in found if not torch.allclose(found[key], expected[key], atol=1e-10)]
    batch = batch_of(8 * dist.get_world_size(), 7)  # a rank has as many rows as the plan's whole batch
    found, expected = applied.eval()(*rows_of_rank(batch)), module.eval()(*batch)
    wrong += [f"{key} evaluated" for key in found if not torch.allclose(found[key], expected[key], atol=1e-10)]
    sharding.close(applied)
    return wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{"a": 2}, {"a": 2, "b": 2}], ids=str)
def test_local_batches_are_rows_of_the_global_one(ranks: Pools, mesh: dict[str, int]):
    assert ranks[math.prod(mesh.values())].run(local_on_ranks, mesh) == [[]] * math.prod(mesh.values())


def unequal_on_ranks() -> str:
    _, applied = applied_on({"all": 2}, batch="local")
    with pytest.raises(ValueError) as error:
        applied(*batch_of(4 - dist.get_rank()))
    sharding.close(applied)
    return str(error.value)


def test_local_batches_of_other_sizes_by_rank_are_refused_on_all(ranks: Pools):
    for said in ranks[2].run(unequal_on_ranks):
        assert "{0: [4, 4], 1: [3, 3]}" in said


def applied_to_mappings() -> sharding.Applied:
    sample = {"rows": torch.ones(4, 6, dtype=torch.float64), "temperature": torch.ones((), dtype=torch.float64)}
    plan = sharding.plan(Scaled(), (sample,), cores(2), {"inputs.0": sharding.Split(0)}, mesh={"a": 2})
    return sharding.apply(Scaled(), plan, batch="local")


def unlike_on_ranks() -> list[str]:
    """Messages on this rank for lengths, dtypes, nesting and dimensions that differ from rank to rank."""
    applied, rank, said = applied_to_mappings(), dist.get_rank(), []
    rows, temperature = torch.ones(2, 6, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for other in (rows[:, : 6 - rank], rows.to(torch.float32) if rank else rows, rows[..., None] if rank else rows):
        with pytest.raises(ValueError) as error:
            applied({"rows": other, "temperature": temperature})
        said.append(str(error.value))
    with pytest.raises(ValueError) as error:
        applied({"rows": rows} if rank else {"rows": rows, "temperature": temperature})
    said.append(str(error.value))
    sharding.close(applied)
    return said


def test_local_batches_that_differ_in_more_than_values_are_refused_on_all(ranks: Pools):
    for rank, said in enumerate(ranks[2].run(unlike_on_ranks)):
        assert all("rows of inputs.0 have different shapes or dtypes" in words for words in said[:3])
        assert ("refused on rank 1" in said[3]) == (rank == 0)


def mapping_on_ranks() -> float:
    """Loss of a local batch whose keys are in another order than the sample's."""
    applied = applied_to_mappings()
    rows = torch.full((2, 6), 1.0 + 2 * dist.get_rank(), dtype=torch.float64)
    loss = applied({"temperature": torch.ones((), dtype=torch.float64), "rows": rows})
    sharding.close(applied)
    return loss.item()


def test_local_batches_of_mappings_have_keys_in_any_order(ranks: Pools):
    assert ranks[2].run(mapping_on_ranks) == [5.0, 5.0]  # the mean of 1 and 9


SIZES = (8, 5, 8, 1, 13, 5, 8)


def sizes_on_ranks(mesh: dict[str, int]) -> list[str]:
    """What differs from one device over batches of many sizes, in training and in evaluation."""
    module, applied = applied_on(mesh, max_programs=3)
    module.norm.eval()
    module_norm = copy.deepcopy(module)
    sharding.close(applied)
    plan = sharding.plan(module_norm, batch_of(8), cores(math.prod(mesh.values())), {"*.weight": sharding.Split(0)},
                         mesh=mesh)  # fmt: skip
    applied = sharding.apply(module_norm, plan, max_programs=3)
    optimizers = [torch.optim.Adam(each.parameters(), 0.1) for each in (module, applied)]
    wrong = []
    for step, num_rows in enumerate(SIZES):
        batch = batch_of(num_rows, step)
        found, expected = applied(*batch), module(*batch)
        for each, optimizer in zip((expected, found), optimizers, strict=True):
            optimizer.zero_grad()
            each["loss"].backward()
            optimizer.step()
        with torch.no_grad():
            found |= {f"{key} evaluated": each for key, each in applied.eval()(*batch).items()}
            expected |= {f"{key} evaluated": each for key, each in module.eval()(*batch).items()}
        applied.train()
        module.train()
        module.norm.eval()
        wrong += [f"{key} {step}" for key in found if not torch.allclose(found[key], expected[key], atol=1e-10)]
        if found["logits"].shape != expected["logits"].shape:
            wrong.append(f"shape {step}")
        if len(applied._programs._cache) > 3:
            wrong.append("more programs than the bound")
    sharding.close(applied)
    return wrong


@pytest.mark.parametrize("mesh", [{"a": 2}, pytest.param({"a": 2, "b": 2}, marks=pytest.mark.slow)], ids=str)
def test_batches_of_any_size_share_the_parameters(ranks: Pools, mesh: dict[str, int]):
    assert ranks[math.prod(mesh.values())].run(sizes_on_ranks, mesh) == [[]] * math.prod(mesh.values())


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(11, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return F.cross_entropy((self.layer(self.table(words)) @ self.table.weight.T).flatten(0, 1), words.flatten())


@pytest.mark.slow
def test_sequences_of_other_lengths():
    torch.manual_seed(0)
    module = Words().eval()
    words = torch.randint(0, 11, (4, 12))
    applied = sharding.apply(module, sharding.plan(module, (words,), cores(1), mesh={"a": 1}))
    for rows, length in ((4, 12), (4, 7), (2, 12), (3, 1)):
        found, expected = applied(words[:rows, :length]), module(words[:rows, :length])
        assert torch.allclose(found, expected)
        for each in (found, expected):
            each.backward()
    for name, parameter in module.named_parameters():
        assert torch.allclose(applied.get_parameter(name).grad, parameter.grad, atol=1e-6)


class Scaled(nn.Module):
    """Rows of any length times a number, and means of them, called by one mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor | dict[str, Tensor], times: float = 1.0) -> Tensor:
        rows = x["rows"] * x["temperature"] if isinstance(x, dict) else x
        return (rows * self.weight).square().mean() * times


def test_what_a_batch_may_not_differ_in():
    _, applied = applied_on({"all": 1})
    x, *rest = batch_of(8)
    for batch in ((x.float(), *rest), (x[None], *rest), (x, *rest[:2]), ("x", *rest)):
        with pytest.raises(ValueError, match=r"inputs\.0|has 3 values"):
            applied(*batch)
    plan = sharding.plan(Scaled(), (x, 2.0), cores(1), mesh={"a": 1})
    with pytest.raises(ValueError, match=r"inputs\.1"):
        sharding.apply(Scaled(), plan)(x, torch.ones(3))
    for options in ({"batch": "mine"}, {"max_programs": 0}):
        with pytest.raises(SpecError, match=next(iter(options))):
            applied_on({"all": 1}, **options)


def test_checksums_tell_values_and_places_apart():
    draw = torch.Generator().manual_seed(0)
    for dtype in (
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ):
        x = torch.randn(40, 50, generator=draw) * 50
        x = x > 0 if dtype == torch.bool else x.abs().to(dtype)
        assert checksum(x) == checksum(x.t().contiguous().t()) == checksum(x.clone())
        other = x.clone()
        other[[3, 4]] = other[[4, 3]]
        assert checksum(x) != checksum(other)
        other = x.clone()
        other[39, 49] = other[39, 49].logical_not() if dtype == torch.bool else 1
        assert checksum(x) != checksum(other) or torch.equal(x[39, 49].float(), other[39, 49].float())
    nan = torch.full((3,), math.nan)
    assert checksum(nan) == checksum(nan.clone())
    for one, other in (((2, 3), (3, 2)), ((6,), (2, 3)), ((0, 3), (0,))):
        assert checksum(torch.zeros(one)) != checksum(torch.zeros(other))
