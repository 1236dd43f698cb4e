"""Ranks exchange plain values, which are the same on every rank, and never a pickle."""

import random
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from moe.parallel import json_collectives
from moe.spec import SpecError
from moe.train.loop import require_same_data
from tests.parity.gloo_ranks import Pools
from tests.unit.train_runs import corpus, job, run

ROUNDS = 20


def random_value(draws: random.Random, depth: int = 3) -> Any:
    """A plain value: JSON's kinds, in any order and nesting, with text of any alphabet and floats of any size."""
    kind = draws.randrange(8 if depth else 6)
    if kind == 0:
        return draws.choice([None, True, False])
    if kind == 1:
        return draws.randrange(-(2**60), 2**60)
    if kind in (2, 3):
        return draws.choice([0.0, -0.0, float("inf"), 5e-324, draws.random() * 10.0 ** draws.randrange(-300, 300)])
    if kind in (4, 5):
        return "".join(draws.choices('a "\\\n é字😀\x00', k=draws.randrange(200)))
    if kind == 6:
        return [random_value(draws, depth - 1) for _ in range(draws.randrange(4))]
    return {str(number): random_value(draws, depth - 1) for number in range(draws.randrange(4))}


def value_of(rank: int, number: int) -> Any:
    return random_value(random.Random(f"{rank} {number}"))


def exchange() -> None:
    """Exchange random values by every collective and check the results."""
    this_rank, all_ranks = json_collectives.rank(), range(json_collectives.world_size())
    for number in range(ROUNDS):
        values = [value_of(rank, number) for rank in all_ranks]
        assert json_collectives.broadcast_from_rank0(lambda number=number: value_of(this_rank, number)) == values[0]
        assert json_collectives.all_gather_json(values[this_rank]) == values
        assert json_collectives.gather_json(values[this_rank]) == (values if this_rank == 0 else None)
        assert json_collectives.scatter_json(values if this_rank == 0 else None) == values[this_rank]
    assert json_collectives.all_reduce_sum(float(this_rank), 1.0) == [sum(all_ranks), len(all_ranks)]


def test_values_arrive_as_they_were_sent(ranks: Pools) -> None:
    exchange()
    for workers in (2, 4):
        ranks[workers].run(exchange)


def without_pickling(function: Any, *arguments: Any) -> Any:
    """Result of the function on this rank, while torch must not pickle for other ranks."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("an object is pickled for other ranks")

    originals = c10d._object_to_tensor, c10d._tensor_to_object
    c10d._object_to_tensor = c10d._tensor_to_object = refuse  # type: ignore[assignment]
    try:
        return function(*arguments)
    finally:
        c10d._object_to_tensor, c10d._tensor_to_object = originals


def whole_run(spec: Any, storage: str, cache: str) -> str:
    """Train, save and evaluate; then resume, which loads."""
    outcome, _ = without_pickling(run, spec, storage, Path(cache))
    longer = spec.model_copy(update={"train": spec.train.model_copy(update={"num_steps": 10})})
    resumed_outcome, _ = without_pickling(lambda: run(longer, storage, Path(cache), group=1))
    return f"{outcome.kind} at {outcome.step}, {resumed_outcome.kind} at {resumed_outcome.step}"


def pickle_object() -> None:
    without_pickling(dist.all_gather_object, [None] * dist.get_world_size(), "an object")


@pytest.mark.slow
def test_a_whole_run_and_its_resuming_pickle_nothing(ranks: Pools, tmp_path: Path) -> None:
    spec = job(corpus(tmp_path), workers=2, expert=2)
    outcomes = ranks[2].run(whole_run, spec, f"{tmp_path}/storage", f"{tmp_path}/cache")
    assert outcomes == ["succeeded at 8, succeeded at 10"] * 2
    with pytest.raises(AssertionError, match="an object is pickled for other ranks"):
        ranks[2].run(pickle_object)


def prepared_as(names: list[str]) -> str:
    try:
        require_same_data(SimpleNamespace(key=names[dist.get_rank()]))  # type: ignore[arg-type]
    except SpecError as error:
        return str(error)
    return ""


def test_ranks_that_read_other_content_do_not_train(ranks: Pools) -> None:
    assert ranks[2].run(prepared_as, ["one", "one"]) == ["", ""]
    messages = ranks[2].run(prepared_as, ["one", "another"])
    assert messages[0] == messages[1]
    assert messages[0].startswith("data differs between workers (prepared as another and as one)")


def failing_broadcast() -> str:
    try:
        json_collectives.broadcast_from_rank0(lambda: {}["answer"])
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "an answer"


def slow_answer(timeout_s: float) -> str:
    """Rank 0's answer, which takes three times the timeout of process groups."""
    c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    try:
        return json_collectives.broadcast_from_rank0(lambda: (time.sleep(3 * timeout_s), "an answer")[1])
    finally:
        c10d._set_pg_timeout(default_pg_timeout)


@pytest.mark.slow
def test_where_rank_0_fails_or_is_slow_no_rank_hangs_and_keys_of_its_answers_are_deleted(ranks: Pools) -> None:
    assert ranks[2].run(failing_broadcast) == ["KeyError: 'answer'", "RuntimeError: rank 0 failed: KeyError: 'answer'"]
    assert ranks[2].run(slow_answer, 0.7) == ["an answer"] * 2
    before, after = ranks[2].run(num_keys)[0]
    assert after == before


def num_keys() -> tuple[int, int]:
    """(number of keys in the store after rank 0's first answer, and after its second)"""
    store = c10d._get_default_store()
    counts = []
    for _ in range(2):
        json_collectives.broadcast_from_rank0(lambda: time.sleep(1.2))
        dist.barrier()
        counts.append(store.num_keys())
    return counts[0], counts[1]
