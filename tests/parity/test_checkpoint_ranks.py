"""Checkpoints loaded by other numbers of ranks, and runs on several ranks: the same tensors, the same course."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moe.data.pairs import Tokenizers
from moe.export.load import load_trained
from moe.parallel import Layout, ParameterShard
from moe.plan import Cluster, plan_job
from moe.storage.folder import Folder
from moe.tasks.build import build_task
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint import shards
from moe.train.checkpoint.checkpointer import Checkpointer
from moe.train.checkpoint.state import run_tensors
from moe.train.nonfinite import NonFiniteLoss
from moe.train.recorder import MemoryRecorder
from moe.train.train_state import TrainState
from tests.parity.full_tensors import local_indices
from tests.unit.train_runs import PreemptedAfter, RequestAfter, corpus, course, job, run

EIGHT = {"num_experts": 8, "hidden_dim": 24, "group_tokens": 64}


def layout_and_tensors(spec, **degrees):
    """(layout, tensors) on this rank, for any number of ranks"""
    workers = dist.get_world_size() if dist.is_initialized() else 1
    cluster = Cluster(num_nodes=1, devices_per_node=workers, device="cpu", memory_bytes=4 << 30)
    parallel = spec.parallel.model_copy(update=degrees)
    layout = Layout.build(plan_job(spec.model_copy(update={"parallel": parallel}), cluster, workers))
    assert layout.degree("expert") == degrees["expert"]
    state = TrainState.build(build_task(spec), layout)
    return layout, run_tensors(state.model, state.parameters, state.optimizer, layout, updated=state.shards.parameters)


def number(tensors, layout):
    """Give every element a value of its own, which depends only on its place in the full tensor."""
    for position, (_, tensor) in enumerate(sorted(tensors.items())):
        values = torch.arange(tensor.numel()).view(tensor.shape)
        if isinstance(tensor, DTensor):
            cuts = zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True)
            part = ParameterShard(tensor.shape, tuple((axis, placement.dim) for axis, placement in cuts))
            values = local_indices(part, layout)
        _local(tensor).copy_(values.to(tensor.dtype) + position / 1024)


def save_numbered(spec, degrees, url):
    layout, tensors = layout_and_tensors(spec, **degrees)
    number(tensors, layout)
    checkpointer = Checkpointer(
        Folder(url), layout, tensors, attempt=1, group=0, keep=1, files={}, recorder=MemoryRecorder()
    )
    checkpointer.save(3, b"{}")
    layout.close()
    return sorted(tensors)


def load_numbered(spec, degrees, url):
    """Names of the tensors that do not have the numbers of `number` on this rank."""
    layout, tensors = layout_and_tensors(spec, **degrees)
    checkpointer = Checkpointer(
        Folder(url), layout, tensors, attempt=1, group=1, keep=1, files={}, recorder=MemoryRecorder()
    )
    assert checkpointer.restore().step == 3
    loaded_tensors = {name: _local(tensor).clone() for name, tensor in tensors.items()}
    number(tensors, layout)
    layout.close()
    return [name for name, tensor in tensors.items() if not torch.equal(loaded_tensors[name], _local(tensor))]


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


LOADED_BY = [
    (1, {"expert": 1}),
    (2, {"expert": 2}),
    (2, {"expert": 1, "fsdp": 2, "expert_fsdp": 2}),
    (4, {"expert": 4, "fsdp": 4}),
    (4, {"expert": 2, "fsdp": 2, "tensor": 2, "expert_fsdp": 2}),
    (4, {"expert": 2, "expert_tensor": 2, "tensor": 2}),
    (8, {"expert": 8}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "optimizer"),
    [
        ({"expert": 4}, "adamw"),
        ({"expert": 2, "fsdp": 4, "expert_fsdp": 2}, "adamw"),
        ({"expert": 2, "fsdp": 4, "expert_fsdp": 2}, "adafactor"),
        ({"expert": 2, "tensor": 2}, "adafactor"),
        ({"expert": 2, "fsdp": 4, "expert_fsdp": 2}, "muon"),
    ],
    ids=str,
)
def test_saved_by_4_ranks_loads_at_any_degree_with_its_moments(ranks, tmp_path, optimizer, saved_by):
    """Bit for bit, into expert, FSDP, HSDP, tensor and expert-tensor layouts of 1 to 8 ranks."""
    data, url = corpus(tmp_path), f"{tmp_path}/saved"
    spec = job(data, workers=4, model={"moe": EIGHT}, train={"optimizer": {"name": optimizer}})
    sharding = {"sharding": "parameters"} if "fsdp" in saved_by else {}  # the planner may keep them whole
    names = ranks[4].run(save_numbered, spec, {**saved_by, **sharding}, url)
    assert names[0] == names[3]
    assert any(name.startswith("optimizer.") and "experts" in name for name in names[0])
    for workers, degrees in LOADED_BY:
        if workers == 1:
            assert load_numbered(spec, degrees, url) == []
        else:
            assert ranks[workers].run(load_numbered, spec, degrees, url) == [[]] * workers, degrees
    experts = shards.stored_tensors(Folder(f"{url}/step-00000003.a1.g0"))[
        "model.encoder.1.feed_forward.moe.experts.w_in"
    ]
    assert experts.size == (8, 16, 24)
    assert len(experts.chunks) == (4 if "fsdp" in saved_by or saved_by["expert"] == 4 else 2)


def run_course(spec, storage, cache, group=0, stop_after=None, preempted_rank=None):
    """(kind, course, warnings, steps of announced checkpoints, report) of a run on these ranks. With `preempted_rank`,
    that rank's node is told to end, instead of a pause."""
    control = RequestAfter("pause", stop_after) if stop_after else None
    if preempted_rank is not None:
        control = PreemptedAfter(stop_after) if dist.get_rank() == preempted_rank else None
    outcome, recorder = run(spec, storage, cache, group=group, control=control)
    return (
        outcome.kind,
        course(recorder),
        [line["message"] for line in recorder.logs],
        [record.step for record in recorder.checkpoints],
        outcome.report.to_plain() if outcome.report else None,
    )


def assert_same_course(actual, expected):
    """Losses, loads, also by label, and gradient norms of two layouts in float64."""
    for actual_record, expected_record in zip(actual, expected, strict=True):
        assert actual_record.get("label_loads") == expected_record.get("label_loads")
        assert [row["load"] for row in expected_record["layers"]] == [row["load"] for row in actual_record["layers"]]
        assert actual_record.get("held_out", {}) == pytest.approx(expected_record.get("held_out", {}), rel=1e-10)
        for value in ("loss", "nll", "aux_loss", "grad_norm"):
            assert actual_record[value] == pytest.approx(expected_record[value], rel=1e-10)


def assert_same_sets(actual, expected):
    """Losses of the evaluation's sets."""
    for name, expected_set in expected["sets"].items():
        assert actual["sets"][name]["loss"] == pytest.approx(expected_set["loss"], rel=1e-10)
        assert actual["sets"][name]["subsets"] == expected_set["subsets"]


def test_all_ranks_save_when_the_node_of_one_is_about_to_end(ranks, tmp_path):
    spec = job(corpus(tmp_path), workers=2, expert=2)
    first, second = ranks[2].run(run_course, spec, f"{tmp_path}/parts", tmp_path / "cache", 0, 3, 1)
    assert (first[0], second[0]) == ("preempted", "preempted")
    assert (len(first[1]), first[3]) == (3, [2, 3])


def test_two_ranks_resume_bit_by_bit_and_report_the_same(ranks, tmp_path):
    spec = job(corpus(tmp_path), workers=2, expert=2)
    full_run = ranks[2].run(run_course, spec, f"{tmp_path}/whole", tmp_path / "cache")
    first = ranks[2].run(run_course, spec, f"{tmp_path}/parts", tmp_path / "cache", 0, 3)
    second = ranks[2].run(run_course, spec, f"{tmp_path}/parts", tmp_path / "cache", 1)
    assert [kind for kind, *_ in (*first, *second)] == ["paused", "paused", "succeeded", "succeeded"]
    assert first[0][1] + second[0][1] == full_run[0][1]
    assert first[0][3] == [2, 3]
    assert second[0][2][0] == "resumed at step 3 from step-00000003.a1.g0 of 2 workers on 2"
    for rank_0, rank_1 in (full_run, first, second):
        assert rank_0[4] == rank_1[4]  # every rank has the report
        assert rank_1[1] == rank_1[3] == []  # but only rank 0 records metrics and checkpoints
    assert second[0][4]["sets"] == full_run[0][4]["sets"]
    # One process translates with the checkpoint of two.
    (folder,) = (path for path in tmp_path.glob("whole/checkpoints/step-00000008.*") if path.is_dir())
    examples = full_run[0][4]["examples"]
    translations = load_trained(str(folder)).generate([row["source"] for row in examples])
    assert translations == [row["translation"] for row in examples]
    assert Tokenizers.load(f"{folder}/tokenizers").source.vocab_size <= 400


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_ranks(ranks, tmp_path):
    """In float64, where layouts agree: 2 ranks, then 1, then 4 (one without a group) compute what one process does."""
    data, folders = corpus(tmp_path), (f"{tmp_path}/many", tmp_path / "cache")
    spec = job(data, workers=2, train={"dtype": "float64", "num_steps": 6, "batch_tokens": 192})
    _, expected, *_, report = run_course(spec, f"{tmp_path}/one", tmp_path / "cache")
    steps = ranks[2].run(run_course, spec, *folders, 0, 2)[0][1] + run_course(spec, *folders, 1, 2)[1]
    last = ranks[4].run(run_course, spec, *folders, 2)[0]
    assert last[2][0] == "resumed at step 4 from step-00000004.a1.g1 of 1 workers on 4"
    assert_same_course(steps + last[1], expected)
    assert_same_sets(last[4], report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"fsdp": 2, "expert_fsdp": 2, "expert": 1},
        {"tensor": 2, "expert": 2},
        {"expert": 2, "expert_tensor": 2, "tensor": 2, "fsdp": 2, "recompute": "full", "num_chunks": 2},
        {"context": 2, "expert": 2, "fsdp": 2},
    ],
    ids=str,
)
def test_a_run_goes_on_in_another_layout(ranks, tmp_path, parallel):
    """Two steps by one process, the rest and the report by several, each with parts of everything."""
    data, workers = corpus(tmp_path), parallel.get("expert_tensor", 1) * 2
    train = {"dtype": "float64", "num_steps": 4, "evaluation": {"every_steps": 3, "max_pairs": 6, "num_examples": 2}}
    spec = job(data, workers=1, train=train)
    _, expected, *_, report = run_course(spec, f"{tmp_path}/one", tmp_path / "cache")
    steps = run_course(spec, f"{tmp_path}/many", tmp_path / "cache", 0, 2)[1]
    spread_spec = job(data, workers=workers, train=train, parallel=parallel)
    last = ranks[workers].run(run_course, spread_spec, f"{tmp_path}/many", tmp_path / "cache", 1)[0]
    assert len(steps + last[1]) == 4
    assert_same_course(steps + last[1], expected)
    assert_same_sets(last[4], report)


def diverge(spec, storage, cache):
    with pytest.raises(NonFiniteLoss) as error:
        run(spec, storage, cache)
    return str(error.value), pickle.loads(pickle.dumps(error.value)).location


def test_divergence_is_raised_on_all_ranks_together(ranks, tmp_path):
    spec = job(
        corpus(tmp_path), workers=2, expert=2, checkpoint={"every_steps": 1},
        train={
            "optimizer": {"name": "adamw", "peak_lr": 100, "weight_decay": 1e30},
            "schedule": {"warmup_steps": 0}, "num_steps": 50,
        },
    )  # fmt: skip
    first, second = ranks[2].run(diverge, spec, f"{tmp_path}/storage", tmp_path / "cache")
    assert first == second
    assert markers.list_committed(Folder(f"{tmp_path}/storage/checkpoints"))[0] in first[0]
