"""Bounds that the search prunes by: none exceeds the value that it bounds."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from math import inf
from operator import add

import pytest
from hypothesis import given

from benchmarks.published_rows import ROWS
from moe.plan import Degrees, LayoutSearch
from moe.plan.candidate import Candidate
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.run_choices import StateOptions
from moe.plan.cost.stages import PipelineChoices
from moe.plan.profile import ProfileName, find_profile
from moe.plan.search.choices import LayoutChoices
from moe.plan.search.ranking import Ranker
from moe.plan.search.search import LOAD_SKEW
from tests.unit.every_layout import least_layouts
from tests.unit.shape_candidates import of_shape
from tests.unit.test_search_is_complete import Job, jobs, search_of

NEARLY = 1 + 1e-9
EVERY = 5


def shape_of(candidate: Candidate) -> Degrees:
    return replace(candidate.degrees, fsdp=1, expert_fsdp=1)


def some_of(choices: LayoutChoices, workers: int) -> Iterator[Candidate]:
    """Some of the candidates that the search considers."""
    for shape in choices.shapes(workers):
        yield from islice(of_shape(choices, shape), 0, None, EVERY)


@given(jobs())
def test_no_layout_takes_less_memory_than_its_bounds(job: Job) -> None:
    assert_room(
        search_of(job).memory, some_of(LayoutChoices(job.spec, job.cluster, find_profile(job.profile)), job.workers)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("profile", ["ours", "peer", "torchtitan"])
def test_no_published_layout_takes_less_memory_than_its_bounds(profile: ProfileName) -> None:
    """In deep pipelines."""
    row = next(row for row in ROWS if row.model == "qwen3-30b-a3b")
    search = LayoutSearch(row.job({}), row.cluster, profile=profile)
    choices = LayoutChoices(row.job({}), row.cluster, search.profile)
    shapes = list(choices.shapes(row.num_devices))
    for shape in shapes[:: len(shapes) // 8]:
        assert_room(search.memory, islice(of_shape(choices, shape), 7, 40_000, 799))


def assert_room(memory: MemoryModel, candidates: Iterable[Candidate]) -> None:
    """Bounds of a shape's state, even shares and early stages, with and without a placement."""
    for candidate in candidates:
        total, shape = memory.total(candidate), shape_of(candidate)
        state_options = StateOptions.from_degrees(
            candidate.degrees, candidate.options.sharding, candidate.options.recompute
        )
        state = memory.state_bytes(state_options, PipelineChoices.from_candidate(candidate))
        assert memory.min_state_bytes(shape) <= max(state)
        shares = map(add, memory.share_state_bytes(state_options), memory.non_state_shares(candidate))
        assert max(shares) + memory.allowance <= total
        assert not memory.exceeds(candidate, total)
        assert not memory.exceeds_unplaced(Candidate(shape, candidate.options), total - memory.allowance)


@given(jobs())
def test_bounds_of_memory_do_not_fall_in_larger_micro_batches(job: Job) -> None:
    """So the largest size that fits is found by bisection."""
    choices, memory = LayoutChoices(job.spec, job.cluster, find_profile(job.profile)), search_of(job).memory
    for shape in choices.shapes(job.workers):
        for recompute in choices.recomputes():
            runs = [
                choices.plain(shape).with_options(recompute=recompute, micro_batch_groups=size, num_micro_batches=times)
                for size, times in choices.micro_batches(shape)
            ]
            for larger, smaller in pairwise(memory.non_state_shares(run) for run in runs):
                assert all(small <= large for small, large in zip(smaller, larger, strict=True))


@pytest.mark.slow
@given(jobs())
def test_no_layout_needs_fewer_workers_than_its_bound(job: Job) -> None:
    """On devices that are just large enough."""
    spec, cluster, workers, profile = job
    memory = search_of(job).memory
    overlaps = bool(spec.parallel.overlap)
    for layout in list(least_layouts(spec, cluster, workers, profile))[::EVERY]:
        enough = int((memory.total(layout) - memory.allowance) / 0.9) + 1
        on_just_enough = cluster.model_copy(update={"memory_bytes": enough})
        degrees, recompute = layout.degrees, layout.options.recompute
        tight_memory = MemoryModel(spec, on_just_enough, find_profile(profile), LOAD_SKEW)
        assert tight_memory.total(layout) <= enough
        assert tight_memory.min_workers(degrees.pipeline, degrees.split, recompute, overlaps=overlaps) <= workers
        fewest = tight_memory.min_state_bytes(Degrees()) // max(1, enough - tight_memory.allowance)
        assert fewest <= workers


@pytest.mark.slow
@given(jobs())
def test_no_step_is_faster_than_its_bounds(job: Job) -> None:
    """Bounds of the shape, of even and of actual stages, and of work outside micro-batches; nor than bounds of larger
    micro-batches, per group."""
    search, choices = search_of(job), LayoutChoices(job.spec, job.cluster, find_profile(job.profile))
    time = search.time
    ranker = Ranker(job.spec, job.cluster.memory_bytes, choices, search.memory, time)
    for candidate in some_of(choices, job.workers):
        shape, options = shape_of(candidate), candidate.options
        plain, ranks_per_node = Candidate(shape, options), choices.ranks_per_node(shape)
        overlaps = options.recompute != "full"
        overlap_bounds = time.min_unit_seconds(plain, ranks_per_node, overlaps=overlaps)
        of_units = time.min_unit_seconds(plain, ranks_per_node, overlaps=choices.can_overlap(candidate))
        assert all(low <= NEARLY * high for low, high in zip(overlap_bounds, of_units, strict=True))
        unit_seconds = tuple(map(add, of_units, time.min_gather_seconds(candidate)))
        even_s = time.on_even_stages_s(unit_seconds, shape.pipeline)
        staged_s = time.on_stages_s(unit_seconds, PipelineChoices.from_candidate(candidate))
        assert even_s <= NEARLY * staged_s
        turns = options.num_micro_batches + (shape.pipeline - 1) / options.virtual_stages
        step_s = time.step_s(candidate)
        assert staged_s * turns + time.min_extra_s(candidate) <= NEARLY * step_s
        assert ranker.bound_s(shape) <= NEARLY * step_s
    for shape in choices.shapes(job.workers):
        for recompute in choices.recomputes():
            of_a_group = [
                time.on_even_stages_s(
                    time.min_unit_seconds(run, choices.ranks_per_node(shape), overlaps=recompute != "full"),
                    shape.pipeline,
                )
                / size
                for size, times in choices.micro_batches(shape)
                for run in [choices.plain(shape).with_options(recompute=recompute, micro_batch_groups=size)]
            ]
            assert all(larger <= NEARLY * smaller for larger, smaller in pairwise(of_a_group))


@pytest.mark.slow
@given(jobs())
def test_the_fastest_under_a_limit_is_that_of_the_ranking(job: Job) -> None:
    """And there is none where all layouts take longer."""
    search, choices = search_of(job), LayoutChoices(job.spec, job.cluster, find_profile(job.profile))
    ranker = Ranker(job.spec, job.cluster.memory_bytes, choices, search.memory, search.time)
    shapes = list(choices.shapes(job.workers))
    ranking = ranker.rank(shapes, 1)
    for to_run, layouts in ((False, ranking.fitting), (True, ranking.runnable)):
        if not layouts:
            assert ranker.fastest(shapes, to_run=to_run) is None
            continue
        first = layouts[0]
        for limit_s in (inf, first.step_s):
            assert ranker.fastest(shapes, limit_s, to_run=to_run) == first
        assert ranker.fastest(shapes, 0.99 * first.step_s, to_run=to_run) is None
