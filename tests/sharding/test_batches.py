"""Batches of applied modules: the same on every rank or each rank's own rows, and of any size."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe import sharding
from moe.sharding.applied.checksum import EVERY_CALLS, checksum
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import apply_on_one_device, cores, unlike

D = torch.float64


class Classifier(nn.Module):
    """A module whose batch has rows, labels, a mask without rows and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(6, 10), nn.Linear(10, 4), nn.BatchNorm1d(10)

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor, temperature: Tensor) -> dict[str, Tensor]:
        logits = self.outer(torch.tanh(self.norm(self.inner(x * mask)))) / temperature
        return {"loss": F.cross_entropy(logits, labels), "logits": logits.detach()}


class ScaledRows(nn.Module):
    """Mean square of scaled rows, called with a tensor or a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=D))

    def forward(self, x: Tensor | dict[str, Tensor], times: float = 1.0) -> Tensor:
        rows = x["rows"] * x["temperature"] if isinstance(x, dict) else x
        return (rows * self.weight).square().mean() * times


def batch_of(num_rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(num_rows, 6, generator=draw, dtype=D), torch.randint(0, 4, (num_rows,), generator=draw)
    return x, labels, torch.ones(6, dtype=torch.bool), torch.tensor(2.0, dtype=D)


def rows_of_rank(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    rank, num_rows = dist.get_rank(), len(batch[0]) // dist.get_world_size()
    local_rows = slice(rank * num_rows, (rank + 1) * num_rows)
    return batch[0][local_rows], batch[1][local_rows], *batch[2:]


def applied_on(mesh: dict[str, int], is_training: bool = True, **options: Any) -> tuple[nn.Module, sharding.Applied]:
    """A module, whose norm may be in evaluation mode, planned for 8 rows and applied."""
    torch.manual_seed(0)
    module = Classifier().double()
    module.norm.train(is_training)
    hints = {"inputs.0": sharding.Split(0), "*.weight": sharding.Split(0)}
    plan = sharding.plan(module, batch_of(8), cores(math.prod(mesh.values())), hints, mesh=mesh)
    return module, sharding.apply(module, plan, **options)


def refusal(call: Callable[[], Any]) -> str:
    """The error of a call; "accepted" if there is none."""
    try:
        call()
        return "accepted"
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def different_on_ranks() -> list[str]:
    messages = []
    for first_calls, rank, number in ((0, 1, 0), (0, 0, 1), (EVERY_CALLS, 1, 3)):
        _, applied = applied_on({"all": dist.get_world_size()})
        for _ in range(first_calls):
            with torch.no_grad():
                applied(*batch_of(8))
        batch = list(batch_of(8))
        if dist.get_rank() == rank:
            batch[number] = batch[number] + 1
        messages.append(refusal(lambda batch=batch, applied=applied: applied(*batch)))
        sharding.close(applied)
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_batches_that_differ_on_one_rank_are_refused_on_all(ranks: Pools, world: int):
    later_ranks = "; ".join(f"rank {rank}: inputs.1" for rank in range(1, world))
    for messages in ranks[world].run(different_on_ranks):
        for message, place in zip(messages, ("rank 1: inputs.0", later_ranks, "rank 1: inputs.3"), strict=True):
            assert f" at {place})" in message
            assert 'batch="local"' in message


def refused_after_the_first_call() -> list[str]:
    """Errors on each rank where rank 1 alone calls differently, between correct calls."""
    module, applied = applied_on({"all": 2})
    right, messages, is_other = batch_of(8), [], dist.get_rank() == 1
    expected = module(*right)["loss"]
    wrong_calls: dict[str, tuple[tuple[Tensor, ...], dict[str, Tensor]]] = {
        "dtype": ((right[0].float(), *right[1:]), {}), "argument": (right, {"unknown": right[0]}),
        "size": (batch_of(6), {}), "mode": (right, {}), "no gradients": (right, {}),
    }  # fmt: skip
    for difference, (batch, keywords) in wrong_calls.items():
        assert torch.allclose(applied(*right)["loss"], expected)
        applied.train(difference != "mode" or not is_other)
        with torch.set_grad_enabled(difference != "no gradients" or not is_other):
            messages.append(refusal(lambda b=batch, n=keywords: applied(*b, **n) if is_other else applied(*right)))
        applied.train()
    sharding.close(applied)
    return messages


def test_a_rank_that_calls_differently_ends_the_call_on_all(ranks: Pools):
    on_first, on_second = ranks[2].run(refused_after_the_first_call)
    assert all("refused on rank 1" in message for message in on_first[:2])
    assert on_second[0].startswith("ValueError: inputs.0 (=[8, 6] torch.float32)")
    assert on_second[1].startswith("TypeError: ")
    assert all("of rank 1 differ" in message for message in (*on_first[2:], *on_second[2:]))


def refused_in_the_first_call() -> str:
    _, applied = applied_on({"all": 2})
    x, *rest = batch_of(8)
    message = refusal(lambda: applied(x.float() if dist.get_rank() == 1 else x, *rest))
    sharding.close(applied)
    return message


def test_a_first_batch_that_one_rank_refuses_ends_the_call_on_all(ranks: Pools):
    on_first, on_second = ranks[2].run(refused_in_the_first_call)
    assert "refused on rank 1" in on_first
    assert on_second.startswith("ValueError: inputs.0 (=[8, 6] torch.float32)")


def compare(module: nn.Module, applied: sharding.Applied, local_batch: Any, global_batch: Any, label: str) -> list[str]:
    """Results that differ from one device for this rank's batch and the global one; parameters get gradients."""
    results = [applied(*local_batch), module(*global_batch)]
    for result in results:
        if torch.is_grad_enabled():
            result["loss"].backward()
    return [f"{key} {label}" for key in results[0]
            if results[0][key].shape != results[1][key].shape
            or not torch.allclose(results[0][key], results[1][key], atol=1e-10)]  # fmt: skip


def local_on_ranks(mesh: dict[str, int]) -> list[str]:
    """Differences from one device with the global batch, in steps and in evaluation of another size."""
    module, applied = applied_on(mesh, batch="local")
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (module, applied)]
    wrong = []
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = batch_of(8, step)
        wrong += compare(module, applied, rows_of_rank(batch), batch, f"of step {step}")
        for optimizer in optimizers:
            optimizer.step()
    batch = batch_of(8 * dist.get_world_size(), 7)  # as many rows per rank as in the planned global batch
    wrong += compare(module.eval(), applied.eval(), rows_of_rank(batch), batch, "evaluated")
    sharding.close(applied)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"a": 2}, {"a": 2, "b": 2}], ids=str)
def test_local_batches_are_rows_of_the_global_one(ranks: Pools, mesh: dict[str, int]):
    assert ranks[math.prod(mesh.values())].run(local_on_ranks, mesh) == [[]] * math.prod(mesh.values())


def applied_to_mappings() -> sharding.Applied:
    sample = {"rows": torch.ones(4, 6, dtype=D), "temperature": torch.ones((), dtype=D)}
    plan = sharding.plan(ScaledRows(), (sample,), cores(2), {"inputs.0": sharding.Split(0)}, mesh={"a": 2})
    return sharding.apply(ScaledRows(), plan, batch="local")


def unequal_on_ranks() -> list[str]:
    """Errors on this rank for numbers of rows, lengths, dtypes, dimensions and nesting that differ between ranks."""
    _, applied = applied_on({"all": 2}, batch="local")
    rank = dist.get_rank()
    messages = [refusal(lambda: applied(*batch_of(4 - rank)))]
    sharding.close(applied)
    applied = applied_to_mappings()
    rows, temperature = torch.ones(2, 6, dtype=D), torch.ones((), dtype=D)
    for part in (rows[:, : 6 - rank], rows.to(torch.float32) if rank else rows, rows[..., None] if rank else rows):
        messages.append(refusal(lambda part=part: applied({"rows": part, "temperature": temperature})))
    messages.append(refusal(lambda: applied({"rows": rows} | ({} if rank else {"temperature": temperature}))))
    sharding.close(applied)
    return messages


@pytest.mark.slow
def test_local_batches_that_differ_in_more_than_values_are_refused_on_all(ranks: Pools):
    for rank, (numbers, *rows, nesting) in enumerate(ranks[2].run(unequal_on_ranks)):
        assert "{0: [4, 4], 1: [3, 3]}" in numbers
        assert all("rows of inputs.0 " in message for message in rows)
        assert ("refused on rank 1" in nesting) == (rank == 0)


def mapping_on_ranks() -> float:
    """Loss of a local batch with another order of keys than the sample's."""
    applied = applied_to_mappings()
    rows = torch.full((2, 6), 1.0 + 2 * dist.get_rank(), dtype=D)
    loss = applied({"temperature": torch.ones((), dtype=D), "rows": rows})
    sharding.close(applied)
    return loss.item()


def test_keys_of_local_batches_have_any_order(ranks: Pools):
    assert ranks[2].run(mapping_on_ranks) == [5.0, 5.0]  # the mean of 1 and 9


def sizes_on_ranks(mesh: dict[str, int]) -> list[str]:
    """Differences from one device over batches of many sizes, in training and in evaluation."""
    module, applied = applied_on(mesh, is_training=False, max_programs=3)
    optimizers = [torch.optim.Adam(model.parameters(), 0.1) for model in (module, applied)]
    wrong = []
    for step, num_rows in enumerate((8, 5, 8, 1, 13, 5, 8)):
        batch = batch_of(num_rows, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        wrong += compare(module, applied, batch, batch, f"of step {step}")
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            wrong += compare(module.eval(), applied.eval(), batch, batch, f"evaluated in step {step}")
        applied.train()
        module.train()
        module.norm.eval()
        wrong += ["more programs than the limit"] * (len(applied._programs._cache) > 3)
    sharding.close(applied)
    return wrong


@pytest.mark.slow
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
def test_sequences_of_any_length_share_the_parameters():
    torch.manual_seed(0)
    module, words = Words().eval(), torch.randint(0, 11, (4, 12))
    applied = apply_on_one_device(module, words)
    for rows, length in ((4, 12), (4, 7), (2, 12), (3, 1)):
        losses = [model(words[:rows, :length]) for model in (applied, module)]
        assert torch.allclose(*losses)
        for loss in losses:
            loss.backward()
    assert unlike(applied, module, ("gradient",), 1e-6) == []


@pytest.mark.slow
def test_batches_with_other_dtypes_dimensions_or_values_are_refused():
    _, applied = applied_on({"all": 1})
    x, *rest = batch_of(8)
    for batch in ((x.float(), *rest), (x[None], *rest), (x, *rest[:2]), ("x", *rest)):
        with pytest.raises(ValueError, match=r"inputs\.0|has 3 values"):
            applied(*batch)
    with pytest.raises(ValueError, match=r"inputs\.1"):
        apply_on_one_device(ScaledRows(), x, 2.0)(x, torch.ones(3))


def test_checksums_depend_on_values_and_positions():
    draw = torch.Generator().manual_seed(0)
    dtypes = D, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn
    for dtype in dtypes:
        x = torch.randn(40, 50, generator=draw) * 50
        x = x > 0 if dtype == torch.bool else x.abs().to(dtype)
        assert checksum(x) == checksum(x.t().contiguous().t()) == checksum(x.clone())
        swapped_x, changed_x = x.clone(), x.clone()
        swapped_x[[3, 4]] = swapped_x[[4, 3]]
        assert checksum(x) != checksum(swapped_x)
        changed_x[39, 49] = changed_x[39, 49].logical_not() if dtype == torch.bool else 1
        assert checksum(x) != checksum(changed_x) or torch.equal(x[39, 49].float(), changed_x[39, 49].float())
    nan = torch.full((3,), math.nan)
    assert checksum(nan) == checksum(nan.clone())
    for shape, other_shape in (((2, 3), (3, 2)), ((6,), (2, 3)), ((0, 3), (0,))):
        assert checksum(torch.zeros(shape)) != checksum(torch.zeros(other_shape))
