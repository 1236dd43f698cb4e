"""A run in one process: its records, and how it resumes, stops and fails."""

import gzip
import json
import math
import pickle
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from moe.data.pairs import Sampler, TokenStore
from moe.experts.experts import FUSED, Cost
from moe.parallel import Layout
from moe.plan import Cluster, plan_job
from moe.spec import JobSpec
from moe.storage.folder import Folder
from moe.tasks.translation import build_model
from moe.train import expert_costs
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint import shards
from moe.train.loop import require_all_groups
from moe.train.moe_layers import MoELayers
from moe.train.nonfinite import NonFiniteLoss
from service.wire.file_kinds import kind_of
from tests.refusals import expect_problem, expect_problems
from tests.unit.train_runs import RequestAfter, corpus, course, job, prepare_pairs, rewrite, run


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def reference_run(data, cache, tmp_path_factory):
    storage = tmp_path_factory.mktemp("undisturbed")
    outcome, recorder = run(job(data), storage, cache)
    return outcome, recorder, storage


def state(storage, step):
    """Return every tensor of the newest checkpoint, which must be that of `step`."""
    checkpoints = Folder(f"{storage}/checkpoints")
    newest = markers.list_committed(checkpoints)[0]
    assert markers.order(newest)[0] == step
    folder = checkpoints.subfolder(newest)
    metadata = shards.stored_tensors(folder).items()
    tensors = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in metadata}
    shards.load(folder, tensors)
    return tensors


@pytest.fixture
def storage_copy(reference_run, tmp_path):
    """Copy of the storage of a finished run."""
    return shutil.copytree(reference_run[2], tmp_path, dirs_exist_ok=True)


def test_records_every_step_checkpoints_and_a_report(data, cache, reference_run):
    outcome, recorder, storage = reference_run
    sampler = Sampler(prepare_pairs(job(data), cache).train, job(data))
    assert (outcome.kind, outcome.step) == ("succeeded", 8)
    assert [record.step for record in recorder.metrics] == list(range(1, 9))
    for record in recorder.metrics:
        assert record.loss > record.nll > 0
        assert 0 < record.tokens <= 256
        assert record.tokens_per_s == pytest.approx(record.tokens / record.step_s)
        batch = sampler.batch(record.step - 1)
        assert record.tokens == batch.num_tokens
        choices = {1: 2 * batch.num_source_tokens, 3: 2 * batch.num_target_tokens}  # two per token of each stack
        assert [layer.layer for layer in record.layers] == list(choices)
        for layer in record.layers:
            assert len(layer.load) == 4
            num_accepted = (1 - layer.rejected - layer.dropped) * choices[layer.layer]
            assert sum(layer.load) == pytest.approx(num_accepted)
            assert layer.max_over_mean == pytest.approx(max(layer.load) * 4 / sum(layer.load))
            assert 0 < layer.entropy <= math.log(4)
    assert [record.step for record in recorder.checkpoints] == [2, 4, 6, 8]
    assert json.loads((storage / "report.json").read_text()) == outcome.report.to_plain()


@pytest.mark.parametrize(("request_", "kind"), [("pause", "paused"), ("cancel", "cancelled")])
def test_stops_on_request_with_a_checkpoint_and_resumes_bit_by_bit(
    data, cache, tmp_path, reference_run, request_, kind
):
    first, before = run(job(data), tmp_path, cache, control=RequestAfter(request_, 3))
    assert (first.kind, first.step, first.report, before.resumed_at) == (kind, 3, None, (0, None))
    second, after = run(job(data), tmp_path, cache, attempt=2)
    assert (second.kind, after.resumed_at) == ("succeeded", (3, "step-00000003.a1.g0"))
    assert (before.finish, after.finish) == ([], [(second.step, "saving"), (second.step, "evaluating")])
    assert "resumed at step 3 from step-00000003.a1.g0 of 1 workers on 1" in after.logs[0]["message"]
    assert course(before) + course(after) == course(reference_run[1])
    expected, actual = state(reference_run[2], 8), state(tmp_path, 8)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert second.report.sets == reference_run[0].report.sets


def test_pauses_at_the_steps_of_rungs_and_resumes_bit_by_bit(data, cache, tmp_path, reference_run):
    """Also where an attempt begins at its rung, and takes no step."""
    parts = [
        run(job(data), tmp_path, cache, attempt=attempt, pause_at=step)
        for attempt, step in enumerate([3, 3, 5, 20], start=1)
    ]
    assert [(outcome.kind, outcome.step) for outcome, _ in parts] == [
        ("paused", 3), ("paused", 3), ("paused", 5), ("succeeded", 8),
    ]  # fmt: skip
    assert [recorder.resumed_at[0] for _, recorder in parts] == [0, 3, 3, 5]
    assert [step for _, recorder in parts for step in course(recorder)] == course(reference_run[1])
    assert parts[-1][0].report.sets == reference_run[0].report.sets


def test_a_finished_run_only_evaluates_again(data, cache, storage_copy, reference_run):
    outcome, recorder = run(job(data), storage_copy, cache, attempt=5)
    assert (outcome.kind, outcome.step, recorder.metrics, recorder.checkpoints) == ("succeeded", 8, [], [])
    assert outcome.report.sets == reference_run[0].report.sets


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_resumes_bit_by_bit_in_every_precision(data, cache, tmp_path, optimizer, dtype):
    spec = job(data, train={"num_steps": 4, "optimizer": {"name": optimizer}, "dtype": dtype})
    _, full = run(spec, tmp_path / "whole", cache)
    run(spec, tmp_path / "parts", cache, control=RequestAfter("pause", 1))
    _, rest = run(spec, tmp_path / "parts", cache, group=1)
    assert course(rest) == course(full)[1:]
    state_dtype = torch.float64 if dtype == "float64" else torch.float32
    assert {tensor.dtype for tensor in state(tmp_path / "parts", 4).values()} == {state_dtype}


@pytest.mark.parametrize(("fields", "num_warnings"), [({"renormalize_gates": True}, 1), ({}, 0)])
def test_a_run_warns_that_its_router_is_never_trained(data, cache, tmp_path, fields, num_warnings):
    """Jobs accepted by an older release and jobs started from them warn; a new job is refused."""
    moe = {"router": "sigmoid_topk", "num_experts": 4, "hidden_dim": 24, "group_tokens": 64, "top_k": 1}
    spec = job(data, model={"moe": moe}).model_dump(mode="json")
    spec["model"]["moe"] |= fields
    _, recorder = run(JobSpec.parse(spec, accepted=True), tmp_path, cache, control=RequestAfter("pause", 1))
    warnings = [log["message"] for log in recorder.logs if log["level"] == "warning"]
    assert len(warnings) == num_warnings
    assert all(warning.startswith("model.moe.renormalize_gates (=True)") for warning in warnings)


def test_without_an_intact_checkpoint_a_run_starts_over_and_says_so(data, cache, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-00000004.a1.g0.commit.json").write_text("{")
    outcome, recorder = run(job(data), tmp_path, cache, group=1, control=RequestAfter("pause", 1))
    assert (outcome.kind, outcome.step) == ("paused", 1)
    assert "no complete checkpoint: the run starts over at step 0" in [log["message"] for log in recorder.logs]


def test_the_reported_step_is_that_of_the_checkpoint_that_was_loaded(data, cache, tmp_path):
    run(job(data), tmp_path, cache, control=RequestAfter("pause", 3))
    for file in (tmp_path / "checkpoints/step-00000003.a1.g0").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-1])
    _, recorder = run(job(data), tmp_path, cache, group=1, control=RequestAfter("pause", 1))
    assert recorder.resumed_at == (2, "step-00000002.a1.g0")


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_run_that_starts_from_a_checkpoint_never_starts_over(data, cache, tmp_path, damage):
    if damage == "damaged":
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints/step-00000004.a0.g0.commit.json").write_text("{")
    with expect_problem("not_found", "start_from.job", "job-abc"):
        run(job(data, start_from={"job": "job-abc"}), tmp_path, cache)


def test_resumes_router_state_and_measured_expert_costs(data, cache, tmp_path):
    """Checkpoints contain the bias and the loads of the last step. A run uses its first measured costs to its end,
    whatever another machine's cache says."""
    moe = {"router": "sigmoid_topk", "bias_update_rate": 0.1, "aux_scope": "global_batch", "aux_coefficient": 0.1}
    spec = job(data, model={"moe": {"num_experts": 4, "hidden_dim": 24, "group_tokens": 64, **moe}})
    _, full = run(spec, tmp_path / "whole", cache)
    run(spec, tmp_path / "parts", cache, control=RequestAfter("pause", 3))
    costs = tmp_path / "parts" / expert_costs.FILE
    first_costs = costs.read_text()
    assert first_costs == (tmp_path / "whole" / expert_costs.FILE).read_text(), "one machine measures once"
    other_cache = shutil.copytree(cache, tmp_path / "other")
    for file in (other_cache / "experts").iterdir():
        file.write_text('{"segments": {"fixed_s": 9.0, "per_row_s": 9.0}}')
    _, rest = run(spec, tmp_path / "parts", other_cache, group=1)
    assert costs.read_text() == first_costs
    assert course(rest) == course(full)[3:]
    tensors = state(tmp_path / "parts", 8)
    layer = next(name.removesuffix(".router_bias") for name in tensors if name.endswith(".router_bias"))
    assert tensors[f"{layer}.router_bias"].abs().max() > 0
    assert tensors[f"{layer}.last_load"].sum() > 0


def test_stored_expert_costs_take_precedence_over_the_cache(data, tmp_path):
    model, storage = build_model(job(data).model), Folder(f"{tmp_path}/run")
    layers = list(MoELayers(model, Layout.single()).local_layers.values())

    def decide(storage):
        expert_costs.decide(layers, torch.device("cpu"), torch.float32, storage, tmp_path / "one")

    decide(storage)
    first = layers[0].experts.costs
    new_costs = {name: {"fixed_s": 1.0, "per_row_s": 2.0} for name in first}
    (key,) = json.loads(storage.read(expert_costs.FILE))
    storage.write(expert_costs.FILE, json.dumps({key: new_costs, "another": {}}).encode())
    decide(storage)
    assert all(layer.experts.costs == dict.fromkeys(first, Cost(1.0, 2.0)) for layer in layers)
    decide(Folder(f"{tmp_path}/another"))
    assert layers[0].experts.costs == first, "another run takes what the machine has measured"


def test_a_run_logs_the_backends_of_its_experts(reference_run):
    _, recorder, _ = reference_run
    (line,) = [log["message"] for log in recorder.logs if log["message"].startswith("expert backends for")]
    assert all(f"{name} " in line for name in ("segments", "batched"))
    assert "fused" not in line, "kernels are for GPUs"
    costs = {
        "segments": Cost(0.0, 3e-6),
        FUSED: Cost(0.0, 2e-6, config_overrides={"product": (64, 128, 32, 4, 4, True)}),
    }
    (line,) = expert_costs.describe({(8, 64, 96): costs})
    assert "product in tiles of 64 x 128 x 32 by TMA" in line


def test_divergence_names_step_place_and_last_good_checkpoint(data, cache, tmp_path):
    train = {"optimizer": {"name": "adamw", "peak_lr": 100, "weight_decay": 1e30}, "schedule": {"warmup_steps": 0}}
    spec = job(data, train={**train, "num_steps": 50}, checkpoint={"every_steps": 1})
    with pytest.raises(NonFiniteLoss) as excinfo:
        run(spec, tmp_path, cache)
    error = excinfo.value
    assert error.last_checkpoint == f"step-{error.step - 1:08d}.a1.g0"
    assert error.location is not None
    assert f"loss or gradient of step {error.step} is not finite, first in {error.location}" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))
    # The update that would have ruined the weights was skipped, and the checkpoint is older.
    assert markers.list_committed(Folder(f"{tmp_path}/checkpoints"))[0] == error.last_checkpoint


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"model": {"ffn_dim": 48}, "train": {"seed": 3}}, {"model.ffn_dim": 48, "train.seed": 3}),
        (
            {
                "train": {
                    "optimizer": {"name": "adamw", "peak_lr": 1e-2, "weight_decay": 0.1},
                    "schedule": {"decay": "linear"}, "label_smoothing": 0.2, "clip_norm": 0.5,
                }
            },
            {
                "train.optimizer.weight_decay": 0.1, "train.schedule.decay": "linear", "train.label_smoothing": 0.2,
                "train.clip_norm": 0.5,
            },
        ),
    ],
    ids=["another model", "another optimization"],
)  # fmt: skip
def test_storage_of_another_run_is_refused(data, cache, storage_copy, parts, expected):
    with expect_problems([("conflict", path, value) for path, value in expected.items()]):
        run(job(data, **parts), storage_copy, cache, attempt=7)


def test_more_steps_and_another_name_are_the_same_run(data, cache, storage_copy):
    assert run(job(data, train={"num_steps": 9}, name="longer"), storage_copy, cache, attempt=8)[0].step == 9


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        (
            "spec.json",
            lambda content: content.replace(b'"label_smoothing"', b'"label_softness"'),
            ("wrong_version", "storage"),
        ),
        ("tokenizers/tokenizer.json", lambda content: content + b" ", ("changed", "data", None)),
    ],
)
def test_a_checkpoint_of_unreadable_specs_or_other_tokenizers_is_refused(
    data, cache, storage_copy, file, change, problem
):
    rewrite(storage_copy, file, change)
    with expect_problem(*problem):
        run(job(data), storage_copy, cache, attempt=2)


@pytest.mark.slow
def test_data_that_changed_between_attempts_is_refused(cache, tmp_path):
    spec = job(corpus(tmp_path))
    run(spec, tmp_path / "storage", cache, control=RequestAfter("pause", 2))
    file = tmp_path / "corpus.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-8]))
    with expect_problem("changed", "data", None):
        run(spec, tmp_path / "storage", cache, attempt=2)
    file.write_text("".join(lines))
    assert run(spec, tmp_path / "storage", cache, attempt=3)[0].step == 8


@pytest.mark.sample(1)
@pytest.mark.parametrize("groups", [2, 4])
def test_micro_batches_of_any_number_of_groups_make_the_same_steps(data, cache, tmp_path, groups):
    """With the real batches: four groups, one, two or four at a time, with dropout."""
    spec = job(data, model={"dropout": 0.2}, train={"dtype": "float64", "num_steps": 4})
    assert spec.num_groups == 4
    expected = course(run(spec, tmp_path / "one", cache, micro_batch_groups=1)[1])
    steps = course(run(spec, tmp_path / "many", cache, micro_batch_groups=groups)[1])
    for step, expected_step in zip(steps, expected, strict=True):
        for layer, expected_layer in zip(step["layers"], expected_step["layers"], strict=True):
            assert layer.pop("load") == expected_layer.pop("load")
            assert layer == pytest.approx(expected_layer, rel=1e-12)
        for value in ("loss", "nll", "aux_loss", "grad_norm"):
            assert step[value] == pytest.approx(expected_step[value], rel=1e-12)


def test_micro_batches_that_leave_out_groups_are_refused(data):
    spec = job(data, train={"num_steps": 1})
    plan = plan_job(spec, Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=4 << 30), 1)
    for groups, number, is_refused in ((1, 3, True), (3, 1, True), (2, 2, False), (3, 2, False)):
        options = replace(plan.options, micro_batch_groups=groups, num_micro_batches=number)
        with expect_problem("out_of_range", "plan.options.num_micro_batches") if is_refused else nullcontext():
            require_all_groups(spec, plan.model_copy(update={"options": options}), Layout.single())


def test_held_out_loss_along_the_way(data, cache, tmp_path):
    evaluation = {"every_steps": 2, "max_pairs_along_the_way": 5, "max_pairs": 4, "num_examples": 0}
    _, recorder = run(job(data, train={"num_steps": 4, "evaluation": evaluation}), tmp_path, cache)
    assert [record.step for record in recorder.metrics if record.held_out is not None] == [2, 4]
    assert all(0 < loss < 10 for loss in recorder.metrics[1].held_out.values())
    assert set(recorder.metrics[1].held_out) == {"unseen", "seen"}


def test_an_error_while_a_batch_is_made_is_raised(data, cache, tmp_path, monkeypatch):
    # The read of a store is made to fail: no damage to a file makes a mapped page unreadable.
    def fail(*_):
        raise OSError("disk gone")

    monkeypatch.setattr(TokenStore, "pad_rows", fail)
    with pytest.raises(OSError, match="disk gone"):
        run(job(data), tmp_path, cache)


def test_works_in_memory_storage(data, cache, tmp_path):
    storage = f"memory://{tmp_path.name}"
    try:
        run(job(data), storage, cache, control=RequestAfter("pause", 2))
        outcome, recorder = run(job(data), storage, cache, group=1)
        assert (outcome.kind, recorder.metrics[0].step) == ("succeeded", 3)
        assert json.loads(Folder(storage).read("report.json")) == outcome.report.to_plain()
    finally:
        Folder(storage).remove("")


def test_a_run_ends_with_its_evaluation_when_its_time_is_over(data, cache, tmp_path):
    spec = job(data, train={"max_duration": "1s", "num_steps": 100_000})
    outcome, recorder = run(spec, tmp_path, cache)
    assert outcome.kind == "succeeded"
    assert 1 <= outcome.step < 100_000
    assert outcome.report.sets["seen"].loss > 0
    assert markers.list_committed(Folder(f"{tmp_path}/checkpoints"))[0].startswith(f"step-{outcome.step:08d}")
    seconds = [record.step_s for record in recorder.metrics]
    assert sum(seconds) >= 1.0 - 0.1 * len(seconds)
    # Time of earlier attempts counts: the next one takes a single step, in which all ranks learn that time is over.
    next_outcome, next_recorder = run(spec, tmp_path, cache, attempt=2)
    assert (next_outcome.step, len(next_recorder.metrics)) == (outcome.step + 1, 1)


@pytest.mark.parametrize("duration", ["", "0s", "1 h", "10", "-1s", "1w", "1h30"])
def test_a_wrong_duration_is_refused(data, duration):
    with expect_problem("invalid_value", "train.max_duration"):
        job(data, train={"max_duration": duration})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("first", "number", "last"), [(3, 2, 4), (7, 100, 8)], ids=["within", "to the end"])
def test_chosen_steps_are_traced_into_the_storage(data, cache, tmp_path, reference_run, first, number, last):
    _, recorder = run(job(data, train={"profile": {"from_step": first, "num_steps": number}}), tmp_path, cache)
    assert course(recorder) == course(reference_run[1])
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == f"steps-{first}-{last}.rank-0.json.gz"
    assert kind_of(f"profile/{path.name}") is not None
    names = {event.get("name") or "" for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {f"step {first}", f"step {last}"} <= names
    assert not {f"step {first - 1}", f"step {last + 1}"} & names
    assert any(name.startswith("aten::") for name in names)


def test_a_trace_beyond_the_last_step_is_refused(data):
    with expect_problem("out_of_range", "train", None):
        job(data, train={"profile": {"from_step": 9}})
