"""The search compared with trying every choice: the same best plans, and refusals only where nothing fits."""

import re
from dataclasses import replace
from itertools import islice
from math import lcm
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.published_rows import ROWS
from moe.plan import Cluster, Degrees, LayoutSearch, plan_job
from moe.plan.candidate import Candidate, Options
from moe.plan.cost.memory import ALLOWANCE, MemoryModel
from moe.plan.cost.time import TimeModel
from moe.plan.executable import not_yet
from moe.plan.profile import ProfileName, find_profile
from moe.plan.search.choices import LayoutChoices
from moe.plan.search.ranking import LEAST, RankedCandidate
from moe.plan.search.search import LOAD_SKEW
from moe.plan.search.smallest import Smallest
from moe.spec import JobSpec, SpecError
from tests.refusals import expect_problem
from tests.unit.every_layout import cut_in_part, every_layout, least_layouts
from tests.unit.shape_candidates import of_shape

GIB = 1024**3
MAX_CANDIDATES = 1200
_NODES = 48
"""Up to as many, the smallest cluster is looked for by trying every number."""


def all_that_fit(search: LayoutSearch, candidates: list[Candidate]) -> list[RankedCandidate]:
    layouts = []
    for candidate in candidates:
        if search.memory.estimate(candidate).total <= search.cluster.memory_bytes:
            shape = replace(candidate.degrees, fsdp=1, expert_fsdp=1)
            missing = not_yet(search.spec, candidate, search.profile.name)
            layouts.append(RankedCandidate(candidate, shape, search.time.step_s(candidate), missing))
    return sorted(layouts, key=lambda layout: layout.order)


def firsts(layouts: list[RankedCandidate], number: int) -> list[Candidate]:
    """The fastest layout of each of the fastest shapes."""
    fastest: dict[Degrees, Candidate] = {}
    for layout in layouts:
        fastest.setdefault(layout.shape, layout.candidate)
    return list(fastest.values())[:number]


LANGUAGE = st.fixed_dictionaries(
    {
        "kind": st.just("language"), "model_dim": st.sampled_from([256, 1024]), "num_layers": st.sampled_from([2, 5]),
        "attention": st.just({"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}),
        "ffn_dim": st.just(1024), "vocab_size": st.sampled_from([1000, 50_000]), "tie_embeddings": st.booleans(),
        "moe": st.none() | st.fixed_dictionaries(
            {"router": st.just("softmax_topk"), "top_k": st.just(2), "num_experts": st.sampled_from([4, 6]),
             "hidden_dim": st.just(512), "activation": st.just("swiglu"), "group_tokens": st.just(8192)}
        ),
    }
)  # fmt: skip
TRANSLATION = st.sampled_from(
    [{"preset": "gshard-tiny"}, {"preset": "gshard-tiny-dense"},
     {"preset": "gshard-tiny", "moe": {"num_experts": 6, "hidden_dim": 2048}}]
)  # fmt: skip
OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "adamw"}, {"name": "adafactor"}, {"name": "adamw", "moments": "bfloat16"},
    {"name": "adamw", "offload": True},
]  # fmt: skip
ASKED: dict[str, list[Any]] = {
    "pipeline": [1, 2, 3], "virtual_stages": [1, 2], "tensor": [1, 2], "context": [1], "expert": [1, 2, 4],
    "expert_tensor": [1, 2], "fsdp": [1, 2], "sharding": ["optimizer", "gradients", "parameters"],
    "recompute": ["none", "selective", "full"], "micro_batch_groups": [1, 2, 3], "overlap": [False, True],
    "num_chunks": [1, 2], "dispatch": ["hierarchical"],
}  # fmt: skip


def parse_or_skip(fields: dict[str, Any]) -> JobSpec:
    try:
        return JobSpec.parse(fields)
    except SpecError:  # degrees that contradict one another, or the model
        assume(False)
        raise


class Job(NamedTuple):
    """A job, a cluster, a number of workers and the profile that prices it."""

    spec: JobSpec
    cluster: Cluster
    workers: int
    profile: ProfileName


@st.composite
def jobs(draw: st.DrawFn, *, over_nodes: bool = False) -> Job:
    """A job with slightly less memory than the least that a layout takes, up to four times that; or a job `over_nodes`
    of several devices, without requested sharding."""
    language = draw(st.booleans())
    model = draw(LANGUAGE if language else TRANSLATION)
    names = sorted(ASKED.keys() - {"fsdp", "sharding"} if over_nodes else ASKED)
    axes = draw(st.lists(st.sampled_from(names), unique=True, max_size=2 if over_nodes else 5))
    parallel = {axis: draw(st.sampled_from(ASKED[axis])) for axis in axes}
    per_node = draw(st.sampled_from([2, 3, 4] if over_nodes else [1, 2, 3, 4]))
    num_nodes = draw(st.integers(2 if over_nodes else 1, 3))
    workers = per_node * num_nodes
    if not over_nodes:
        workers = draw(st.sampled_from([per_node, workers]))
    group = 8192 if language else 512
    spec = parse_or_skip(
        {
            "model": model,
            "data": {"corpus": "synthetic", "max_tokens": 8192} if language else {"corpus": "catalogs"},
            "train": {"num_steps": 1, "batch_tokens": draw(st.integers(1, 24)) * group,
                      "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
                      "dispatch_dtype": draw(st.sampled_from([None, "fp8"])) if model.get("moe") else None,
                      "optimizer": draw(st.sampled_from(OPTIMIZERS))},
            "resources": {"num_workers": workers},
            "parallel": parallel,
        }
    )  # fmt: skip
    device = draw(st.sampled_from(["h100", "a100-80"] if language else ["h100", "cpu"]))
    cluster = Cluster(num_nodes=num_nodes, devices_per_node=per_node, device=device)
    profile = draw(st.sampled_from(["ours", "peer"])) if language else "ours"
    memory = int(least_bytes(spec, cluster, workers, profile) / (1 - ALLOWANCE) * 2 ** draw(st.floats(-0.25, 2)))
    return Job(spec, cluster.model_copy(update={"memory_bytes": memory}), workers, profile)


def least_bytes(spec: JobSpec, cluster: Cluster, workers: int, profile: ProfileName) -> int:
    """Least bytes per device of a layout over so many workers, without the allowance."""
    memory = MemoryModel(spec, cluster, find_profile(profile), LOAD_SKEW)
    choices = LayoutChoices(spec, cluster, find_profile(profile))
    smallest = Smallest(spec, cluster, memory).candidate(choices, choices.shapes(workers))
    assume(smallest is not None)
    assert smallest is not None
    return memory.total(smallest) - memory.allowance


def search_of(job: Job) -> LayoutSearch:
    try:
        return LayoutSearch(job.spec, job.cluster, profile=job.profile)
    except SpecError:  # degrees that no cluster has
        assume(False)
        raise


@given(jobs())
def test_no_step_is_faster_than_its_bounds(job: Job) -> None:
    assert_bounded(search_of(job), job.workers, stride=7)


@pytest.mark.slow
def test_no_step_of_a_published_run_is_faster_than_its_bounds() -> None:
    row = ROWS[3]
    assert_bounded(LayoutSearch(row.job({}), row.cluster, 1.0), row.num_devices, stride=301, num_shapes=20)


def assert_bounded(search: LayoutSearch, workers: int, stride: int, num_shapes: int | None = None) -> None:
    """By the bounds of the shape and of its micro-batches."""
    choices = LayoutChoices(search.spec, search.cluster, search.profile)
    shapes = list(choices.shapes(workers))
    for shape in shapes[:: 1 if num_shapes is None else len(shapes) // num_shapes]:
        ranks_per_node, groups = choices.ranks_per_node(shape), -(-search.spec.num_groups // shape.data_ranks)
        bound_s = search.time.bound_s(Candidate(shape, Options(micro_batch_groups=groups)), ranks_per_node)
        for candidate in list(of_shape(choices, shape))[::stride]:
            one_s, options = search.time.bound_s(candidate, ranks_per_node), candidate.options
            assert bound_s <= (1 + 1e-9) * one_s * groups / options.micro_batch_groups
            bubble = (shape.pipeline - 1) / options.virtual_stages
            assert one_s * (options.num_micro_batches + bubble) <= (1 + 1e-9) * search.time.step_s(candidate)


@pytest.mark.slow
@given(jobs(), st.sampled_from([1, 2, 5]))
def test_the_best_are_those_of_trying_every_choice(job: Job, top: int) -> None:
    spec, cluster, workers, profile = job
    search = search_of(job)
    layouts = (
        candidate for candidate in every_layout(spec, cluster, workers, profile) if not cut_in_part(spec, candidate)
    )
    candidates = list(islice(layouts, MAX_CANDIDATES + 1))
    assume(0 < len(candidates) <= MAX_CANDIDATES)
    fitting = all_that_fit(search, candidates)
    for to_run in (False, True):
        any_fits = any(not (to_run and layout.not_yet) for layout in fitting)
        assert Smallest(spec, cluster, search.memory).holds(workers, to_run=to_run) == any_fits
    if not fitting:
        with pytest.raises(SpecError, match=" too much; ") as error:
            search.ranking(workers, top)
        (excess,) = re.findall(r"([-\d.,]+) [MG]iB too much", str(error.value))
        assert not excess.startswith("-")
        return
    ranking = search.ranking(workers, top)
    number = max(top, LEAST)
    best, runnable = firsts(fitting, number), firsts([layout for layout in fitting if not layout.not_yet], number)
    leading = [layout.candidate for layout in fitting if layout.candidate in {*best, *runnable}]
    result = [layout.candidate for layout in ranking.fitting]
    assert result[: len(leading)] == leading
    if len(best) < number:  # with few shapes, several layouts of each
        assert {layout.candidate for layout in fitting[:number]} <= set(result)


@given(jobs(over_nodes=True))
def test_what_is_not_gathered_is_best_cut_up_over_all_that_share_it(job: Job) -> None:
    """So the search need not shard over a node's ranks alone. Adafactor's sums over rows and columns may be slightly
    larger for thin shards of experts than for a few whole experts."""
    spec, cluster, workers, profile = job
    search = search_of(job)
    factor = 1.001 if spec.train.optimizer.name == "adafactor" else 1
    in_part = [candidate for candidate in every_layout(spec, cluster, workers, profile) if cut_in_part(spec, candidate)]
    assume(in_part)
    for candidate in in_part[:: len(in_part) // 100 + 1]:
        degrees = candidate.degrees
        fsdp, expert_fsdp = (
            degrees.replica_ranks if degrees.fsdp > 1 else 1,
            degrees.data if degrees.expert_fsdp > 1 else 1,
        )
        over_all = replace(candidate, degrees=replace(degrees, fsdp=fsdp, expert_fsdp=expert_fsdp))
        assert search.memory.total(over_all) <= factor * search.memory.total(candidate)
        assert search.time.step_s(over_all) <= (1 + 1e-9) * search.time.step_s(candidate)


OPTIONS = [(axis, value) for axis, values in ASKED.items() for value in values]


def with_asked(spec: JobSpec, axis: str, value: Any) -> JobSpec:
    fields = spec.model_dump(mode="json", exclude_unset=True)
    return parse_or_skip({**fields, "parallel": {**fields["parallel"], axis: value}})


@pytest.mark.slow
@given(jobs(), st.sampled_from(OPTIONS))
def test_nothing_that_is_asked_for_is_faster(job: Job, option: tuple[str, Any]) -> None:
    """Compared with unrequested options at the software's central constants; a plan may be another layout, which is
    closer to the best at both ends of their spread."""
    spec, cluster, workers, profile = job
    assume(getattr(spec.parallel, option[0]) is None)

    def fastest(spec: JobSpec) -> RankedCandidate:
        ranking = search_of(job._replace(spec=spec)).ranking(workers, 1)
        return (ranking.runnable or ranking.fitting)[0]

    try:
        with_option = fastest(with_asked(spec, *option))
    except SpecError:
        return
    default = fastest(spec)
    if default.order[:1] > with_option.order[:1] and (default.not_yet or not with_option.not_yet):
        default_degrees = (
            candidate.degrees
            for candidate in every_layout(spec, cluster, workers, profile)
            if not cut_in_part(spec, candidate)
        )
        assert with_option.candidate.degrees not in default_degrees


H100S = Cluster(num_nodes=131, devices_per_node=4, device="h100")


def llama_405b(num_workers: int, **parallel: Any) -> JobSpec:
    attention = {"kind": "grouped_query", "num_heads": 128, "num_kv_heads": 8, "head_dim": 128}
    return JobSpec.parse(
        {
            "model": {"kind": "language", "model_dim": 16_384, "num_layers": 126, "attention": attention,
                      "ffn_dim": 53_248, "vocab_size": 128_256},
            "data": {"corpus": "synthetic", "max_tokens": 4096},
            "train": {"num_steps": 1, "batch_tokens": 1024 * 4096, "dtype": "bfloat16"},
            "resources": {"num_workers": num_workers}, "parallel": parallel,
        }
    )  # fmt: skip


def test_a_plan_that_only_fits_with_full_recomputation_is_found() -> None:
    """With FSDP alone: stored activations do not fit, recomputed ones do."""
    plan = plan_job(llama_405b(524), H100S, top=1)
    assert plan.memory.total <= plan.memory.limit
    assert plan.options.recompute == "full"


@pytest.mark.slow
def test_a_requested_sharding_is_refused_where_it_does_not_fit() -> None:
    for profile in (None, "peer"):
        with expect_problem("does_not_fit", "resources", "524 workers"):
            plan_job(llama_405b(524, sharding="optimizer"), H100S, profile=profile)
    plan = plan_job(llama_405b(256, sharding="optimizer"), H100S.sized_for(256), top=1, profile="peer")
    assert plan.options.sharding == "optimizer"
    with expect_problem("requires", "parallel.sharding", "optimizer"):
        plan_job(llama_405b(524, sharding="optimizer", fsdp=1), H100S)


def test_a_refusal_predicts_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only memory decides that nothing fits."""
    monkeypatch.delattr(TimeModel, "bound_s")
    monkeypatch.delattr(TimeModel, "step_s")
    with expect_problem("does_not_fit", "resources", "8 workers"):
        plan_job(llama_405b(8), H100S.sized_for(8))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(jobs(), st.booleans())
def test_the_smallest_cluster_is_the_smallest(job: Job, to_run: bool) -> None:
    """Parts of a node, and whole nodes."""
    spec, cluster, _, profile = job
    smallest = search_of(job).smallest(to_run=to_run)
    unit = lcm(cluster.devices_per_node, LayoutChoices(spec, cluster, find_profile(profile)).multiple)
    sizes = [*range(1, cluster.devices_per_node), *(unit * number for number in range(1, _NODES + 1))]
    first = next((size for size in sizes if holds(spec, cluster.sized_for(size), size, profile, to_run=to_run)), None)
    if smallest is None:
        assert first is None or first > 16 * sizes[-1] // _NODES  # larger sizes are tried only where a doubling holds
    else:
        assert first == (smallest.num_devices if smallest.num_devices <= sizes[-1] else None)


def small(train: dict[str, Any], **parallel: Any) -> JobSpec:
    return JobSpec.parse(
        {
            "model": {"kind": "language", "model_dim": 1024, "num_layers": 5, "ffn_dim": 1024, "vocab_size": 1000,
                      "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
                      "tie_embeddings": False,
                      "moe": {"router": "softmax_topk", "top_k": 2, "num_experts": 4, "hidden_dim": 512,
                              "activation": "swiglu", "group_tokens": 8192}},
            "data": {"corpus": "synthetic", "max_tokens": 8192}, "train": {"num_steps": 1, **train},
            "resources": {"num_workers": 1}, "parallel": parallel,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "per_node", "memory_bytes", "nodes", "that_hold"),
    [
        # 11 and 13 divide nothing
        (small({"batch_tokens": 8192}), 1, 620_000_000, range(1, 15), [10, 12, 14]),
        (llama_405b(1, pipeline=1), 8, 45_500 * 1024**2, [16, 18, 20, 22, 23, 24, 32], [24, 32]),
    ],
    ids=["up to 16 nodes", "beyond"],
)
def test_the_smallest_of_many_nodes_is_found_where_others_do_not_hold(spec, per_node, memory_bytes, nodes, that_hold):
    cluster = Cluster(num_nodes=1, devices_per_node=per_node, device="h100", memory_bytes=memory_bytes)
    smallest = LayoutSearch(spec, cluster, profile="peer").smallest()
    assert smallest.num_nodes == that_hold[0]
    devices = {num_nodes: num_nodes * per_node for num_nodes in nodes}
    assert [
        num_nodes
        for num_nodes, num_devices in devices.items()
        if holds(spec, cluster.sized_for(num_devices), num_devices, "peer", to_run=False)
    ] == that_hold


def test_gradients_are_cut_up_in_a_pipeline_where_nothing_else_fits() -> None:
    """Stages of several layers gain: only one layer has unsharded gradients at a time. Only a peer runs such
    layouts."""
    train = {"batch_tokens": 16_384, "dtype": "float32", "optimizer": {"name": "adafactor"}}
    degrees = {"expert": 1, "fsdp": 1, "pipeline": 3}
    cluster = Cluster(num_nodes=3, devices_per_node=4, device="h100", memory_bytes=372_000_000)
    plan = plan_job(small(train, **degrees), cluster, 12, top=1, profile="peer")
    assert plan.memory.total <= plan.memory.limit
    assert plan.options.sharding == "gradients"
    for sharding in ("optimizer", "parameters"):
        with expect_problem("does_not_fit", "resources", "12 workers"):
            plan_job(small(train, **degrees, sharding=sharding), cluster, 12, top=1, profile="peer")


def test_micro_batches_take_turns_between_virtual_stages_or_without_a_pipeline() -> None:
    """Not between stages with one run of layers each; a spec that requests these is refused."""
    spec = small({"batch_tokens": 65_536}, overlap=True, virtual_stages=1)
    cluster = Cluster(num_nodes=1, devices_per_node=4, device="h100")
    degrees = {layout.candidate.degrees for layout in LayoutSearch(spec, cluster).ranking(4, 100).fitting}
    assert {item.pipeline for item in degrees} == {1}


def holds(spec: JobSpec, cluster: Cluster, workers: int, profile: ProfileName, *, to_run: bool) -> bool:
    """Whether any layout fits."""
    memory = MemoryModel(spec, cluster, find_profile(profile), LOAD_SKEW)
    return any(
        memory.total(candidate) <= cluster.memory_bytes
        for candidate in least_layouts(spec, cluster, workers, profile)
        if not (to_run and not_yet(spec, candidate, profile))
    )
