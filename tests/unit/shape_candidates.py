"""The search's candidates of one shape."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from moe.plan import Degrees
from moe.plan.candidate import Candidate
from moe.plan.search.choices import LayoutChoices


def of_shape(choices: LayoutChoices, shape: Degrees) -> Iterator[Candidate]:
    """Candidates of one shape that the search evaluates."""
    sizes = [
        (size, times, virtual_stages)
        for size, times in choices.micro_batches(shape)
        for virtual_stages in choices.virtual_stages(shape.pipeline, times)
    ]
    ways = product(choices.data_shardings(shape), choices.recomputes(), sizes)
    for (degrees, sharding), recompute, (size, times, virtual_stages) in ways:
        options = replace(
            choices.plain(shape).options, sharding=sharding, recompute=recompute, virtual_stages=virtual_stages,
            micro_batch_groups=size, num_micro_batches=times,
        )  # fmt: skip
        plain = Candidate(degrees, options)
        yield plain
        yield from choices.dispatches(plain)
