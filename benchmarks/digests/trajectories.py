"""Short training runs of every router under every layout: losses, routing, gradients, moments and parameters."""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt
from random import Random
from typing import Any

import torch

from benchmarks.digests.item import Item, Items
from moe.spec import TrainSpec
from tests.parity.combinations import LAYOUTS, ROUTERS, model_of, run_on, train_of, train_with, with_option
from tests.parity.digests import digests_of
from tests.parity.gloo_ranks import Pools
from tests.parity.grid import adapted
from tests.parity.language_models import ATTENTIONS, dense, language_model
from tests.parity.sequences import PAIRS, SOME
from tests.parity.trajectory import Degrees, Model, Shape

NUM_STEPS = 2
"""The second step starts from the state after the first: moments, router biases, gradient buffers."""
FLOAT32_LAYOUTS = ("one process", "expert x tensor", "expert x FSDP")
ADAPTER_LAYOUTS = ("expert x FSDP", "expert x tensor")


@dataclass(frozen=True)
class Run:
    """A training run: arguments of `tests.parity.trajectory.run`."""

    name: str
    model: Model
    train: TrainSpec
    degrees: Degrees
    targets: str = "all"
    one_expert: bool = False
    backend: str | None = None

    def item(self, ranks: Pools) -> Item:
        """Train and digest the records. A failure is content too."""
        shape = Shape(learned=self.targets)
        arguments = (self.model, self.train, shape, NUM_STEPS, False, self.one_expert, self.backend)
        try:
            records = run_on(ranks, self.degrees, *arguments)
        except Exception as error:
            print(f"{self.name}: {traceback.format_exc()[-2000:]}", flush=True)
            return Item(self.name, {"failed": type(error).__name__})
        return Item(self.name, digests_of(records), numbers_of(records))


def numbers_of(records: list[dict[str, Any]]) -> tuple[float, ...]:
    """Losses and gradient norm of each step, and the norm of all parameters at the end."""
    losses = [record[name] for record in records for name in ("loss", "nll", "aux_loss", "grad_norm")]
    return (*losses, sqrt(sum(norm * norm for norm in records[-1]["parameters"].values())))


def layouts(quick: bool) -> Iterator[tuple[str, Degrees]]:
    """(kind, layout) of all layouts, or of the first of each kind with `--quick`."""
    for kind, members in LAYOUTS.items():
        for degrees in members[:1] if quick else members:
            yield kind, degrees


def in_float64(quick: bool) -> Iterator[Run]:
    """Both models with every router under the layouts, without and with the options of a plan.

    With `--quick`: on one process, and a third of the routers under each sharded layout.
    """
    for index, (kind, degrees) in enumerate(layouts(quick)):
        for number, router in enumerate(ROUTERS):
            attention = list(ATTENTIONS)[(index + number) % len(ATTENTIONS)]
            models: dict[str, Model] = {
                "translation": model_of(**ROUTERS[router]),
                f"language, {attention}": language_model(attention, **ROUTERS[router]),
            }
            for turn, (name, model) in enumerate(models.items()):
                if quick and degrees.workers > 1 and (index + number + 3 * turn) % 6:
                    continue
                options = ("without", "all")
                for option in (options[(number + turn) % 2],) if quick else (*options, "Adafactor"):
                    option_degrees = with_option(degrees, option)
                    assert option_degrees is not None
                    run_name = f"{kind}: {degrees}: {router}: {name}: {option}"
                    yield Run(run_name, model, train_with(option), option_degrees)


def in_float32(quick: bool) -> Iterator[Run]:
    """Both models with every router: under one layout of each kind; one kind per router with `--quick`."""
    for number, router in enumerate(ROUTERS):
        attention = list(ATTENTIONS)[number % len(ATTENTIONS)]
        kinds = (FLOAT32_LAYOUTS[number % 3],) if quick else tuple(LAYOUTS)
        for kind in kinds:
            degrees = LAYOUTS[kind][0]
            for name, model in (
                ("translation", model_of(**ROUTERS[router])),
                (f"language, {attention}", language_model(attention, **ROUTERS[router])),
            ):
                yield Run(f"float32: {kind}: {degrees}: {router}: {name}", model, train_of("float32"), degrees)


def special_runs(quick: bool) -> Iterator[Run]:
    """Dense models, adapters, preferences, labels of some tokens, ties, backends of experts, bfloat16."""
    one_rank, two_ranks = Degrees(), Degrees(expert=2)
    sharded_degrees = Degrees(data=2, tensor=2) if not quick else Degrees(data=2, fsdp=2)
    twin = model_of().model_copy(update={"moe": None, "dense_twin_ffn_dim": 48})
    yield Run("dense: translation, one process", twin, train_of(), one_rank)
    yield Run(f"dense: translation, {sharded_degrees}", twin, train_of(), sharded_degrees)
    for attention in ATTENTIONS:
        model = language_model(attention, router="softmax_topk")
        for degrees in (one_rank, sharded_degrees):
            yield Run(f"dense: language, {attention}, {degrees}", dense(model), train_of(), degrees)
        for targets in (SOME, PAIRS):
            if quick and targets == SOME:
                continue
            run_model = adapted(model, Random(attention)) if targets == PAIRS else model
            yield Run(f"learned {targets}: language, {attention}", run_model, train_of(), two_ranks, targets)
        for kind in ADAPTER_LAYOUTS:
            degrees = LAYOUTS[kind][0]
            for router in ("softmax", "sigmoid with a frozen bias"):
                model = language_model(attention, **ROUTERS[router])
                run_name = f"adapter: {kind}: {degrees}: {router}: language, {attention}"
                yield Run(run_name, adapted(model, Random(run_name)), train_of(), degrees)
    for router in list(ROUTERS)[:: 5 if quick else 1]:
        model = model_of(**ROUTERS[router])
        for backend in ("batched", "grouped_mm"):
            yield Run(f"backend {backend}: {router}", model, train_of("float32"), one_rank, backend=backend)
        yield Run(f"bfloat16: {router}", model, train_of("bfloat16"), one_rank)
    for degrees in (one_rank, two_ranks):
        run_name = f"all tokens to one expert: {degrees}"
        yield Run(run_name, model_of(capacity_factor=0.42, second_expert="all"), train_of(), degrees, one_expert=True)
    if not quick:
        for degrees in (
            replace(two_ranks, micro_batch_groups=3),
            replace(two_ranks, num_chunks=3),
            replace(two_ranks, max_rows=9),
        ):
            yield Run(f"options: {degrees}", model_of(), train_of(), degrees)


def items(quick: bool) -> Items:
    """All runs, one after another."""
    torch.set_num_threads(1)
    ranks = Pools()
    try:
        for runs in (in_float64, special_runs, in_float32):
            for run in runs(quick):
                yield run.item(ranks)
    finally:
        ranks.close()
