"""Checkpoints of applied modules: training resumes under any other plan as if uninterrupted."""

import json
import math
import random
import re
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe import sharding
from moe.sharding.applied.dtensors import local
from moe.sharding.saved import index, tensor_file
from moe.sharding.saved.load import Checkpoint
from moe.spec import ProblemCode
from moe.storage.folder import Folder
from tests.parity.gloo_ranks import Pools, forkserver_with_torch
from tests.refusals import expect_problem, expect_problems
from tests.sharding.modules import mean_square, perceptron
from tests.sharding.odd import Odd, random_hints
from tests.sharding.on_ranks import cores
from tests.sharding.test_materialise import BATCH, WithReset, on_meta

Mesh = dict[str, int]


class WithDropout(Odd):
    """`Odd` with random numbers that depend on seed and step."""

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return super().forward(ids, nn.functional.dropout(x, 0.3, self.training))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "amsgrad": True}, "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "RAdam": {"lr": torch.tensor(1e-2, dtype=torch.float64)}, "ASGD": {"lr": 1e-2}, "NAdam": {"lr": 1e-2},
}  # fmt: skip
STEPS = 3


def _model() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return WithDropout().double(), (torch.randint(0, 9, (6,)), torch.randn(6, 5, dtype=torch.float64))


def _plan(model: nn.Module, batch: Any, mesh: Mesh, seed: int) -> sharding.ShardingPlan:
    hints = random_hints(model, mesh, random.Random(seed))
    return sharding.plan(model, batch, cores(math.prod(mesh.values())), hints, mesh=mesh)


def _optimizer(applied: nn.Module, name: str, **options: Any) -> torch.optim.Optimizer:
    parameters = list(applied.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.1}]
    return getattr(torch.optim, name)(groups, **options)


def _train(applied: sharding.Applied, optimizer: torch.optim.Optimizer, batch: Any) -> list[float]:
    """Losses of some steps."""
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = applied(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def save_and_continue(mesh: Mesh, seed: int, name: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """(losses of steps after saving, full tensors at the end)"""
    model, batch = _model()
    applied = sharding.apply(model, _plan(model, batch, mesh, seed), seed=11)
    optimizer = _optimizer(applied, name, **OPTIMIZERS[name])
    _train(applied, optimizer, batch)
    sharding.save(applied, folder, optimizer, extra={"done": [STEPS, None]})
    losses, state = _train(applied, optimizer, batch), sharding.state_dict(applied)
    sharding.close(applied)
    return losses, state


def load_and_continue(
    mesh: Mesh, seed: int, name: str, folder: str, from_meta: bool
) -> tuple[list[float], dict[str, Tensor]]:
    model, batch = _model()
    if from_meta:
        with torch.device("meta"):
            model = WithDropout().double()
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    applied = sharding.apply(model, _plan(model, batch, mesh, seed), checkpoint=folder if from_meta else None)
    optimizer = _optimizer(applied, name, lr=1.0)
    assert sharding.load(applied, folder, optimizer) == {"done": [STEPS, None]}
    losses, state = _train(applied, optimizer, batch), sharding.state_dict(applied)
    sharding.close(applied)
    return losses, state


PAIRS: tuple[tuple[Mesh, Mesh, str], ...] = (
    ({"a": 1}, {"a": 4}, "AdamW"), ({"a": 4}, {"a": 3}, "AdamW"), ({"a": 3}, {"a": 2, "b": 2}, "SGD"),
    ({"a": 2, "b": 2}, {"a": 2, "b": 2}, "AdamW"), ({"a": 2, "b": 2}, {"a": 2}, "RAdam"), ({"a": 2}, {"a": 1}, "ASGD"),
    ({"a": 2}, {"a": 3}, "NAdam"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "name"), PAIRS, ids=str)
def test_training_resumes_under_another_plan(ranks: Pools, tmp_path: Path, before: Mesh, after: Mesh, name: str):
    folder, seed = str(tmp_path / "saved"), len(str(before)) + len(name)
    expected, *_ = ranks[math.prod(before.values())].run(save_and_continue, before, seed, name, folder)
    results = ranks[math.prod(after.values())].run(load_and_continue, after, seed + 1, name, folder, seed % 2 == 0)
    assert len({tuple(losses) for losses, _ in results}) == 1
    losses, state = results[0]
    assert losses == pytest.approx(expected[0], rel=1e-10)
    assert set(state) == set(expected[1]) == set(_model()[0].state_dict())
    for key, tensor in state.items():
        assert torch.allclose(tensor, expected[1][key], rtol=1e-9, atol=1e-10), key


def bytes_read(mesh: Mesh, folder: str) -> list[tuple[int, int, int]]:
    """(bytes read, bytes of this rank's shards, bytes of full tensors), split in each dimension in turn"""
    counts = []
    for dim in range(2):
        model, batch = perceptron(40, 30, 50).double(), (torch.zeros(4, 40, dtype=torch.float64),)
        hints = {"*.weight": sharding.Split(dim), "*.bias": sharding.Split(0)}
        plan = sharding.plan(model, batch, cores(math.prod(mesh.values())), hints, mesh=mesh)
        applied = sharding.apply(model, plan)
        if dim == 0:
            sharding.save(applied, folder)
        checkpoint = Checkpoint.open(folder)
        checkpoint.fill(applied)
        shard_bytes, full_bytes = (
            8 * sum(local(parameter).numel() for parameter in module.parameters()) for module in (applied, model)
        )
        counts.append((checkpoint.reader.bytes_read, shard_bytes, full_bytes))
        sharding.close(applied)
    return counts


def test_a_rank_reads_only_the_bytes_of_its_shards(ranks: Pools, tmp_path: Path):
    for counts in ranks[3].run(bytes_read, {"a": 3}, str(tmp_path)):
        for read, shard_bytes, full_bytes in counts:
            assert read == shard_bytes
            assert shard_bytes <= 0.4 * full_bytes


def small(seed: int = 0, hidden_dim: int = 3) -> sharding.Applied:
    torch.manual_seed(seed)
    return sharding.apply(two_layers(hidden_dim), small_plan(hidden_dim), loss=mean_square)


def two_layers(hidden_dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden_dim), nn.Linear(hidden_dim, 2))


@cache
def small_plan(hidden_dim: int) -> sharding.ShardingPlan:
    return sharding.plan(two_layers(hidden_dim), (torch.zeros(5, 4),), cores(1), loss=mean_square, mesh={"a": 1})


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def _only(folder: Path) -> Path:
    (path,) = folder.glob("part-*.safetensors")
    return path


def _as_version(folder: Path, version: int | None) -> None:
    """Give an index another version, or none, with a matching digest."""
    file = folder / "index.json"
    body = json.loads(file.read_text()) | {"version": version}
    del body["sha256"]
    if version is None:
        del body["version"]
    file.write_text(json.dumps({**body, "sha256": index._digest(body)}))


def _cut_plain_file(folder: Path) -> None:
    (folder / "index.json").unlink()
    file = _only(folder).rename(folder / "model.safetensors")
    file.write_bytes(file.read_bytes()[:20])


def _as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


TORN: dict[str, tuple[Callable[[Path], Any], ProblemCode]] = {
    "no index": (lambda folder: (folder / "index.json").unlink(), "not_found"),
    "no file at all": (lambda folder: [file.unlink() for file in folder.iterdir()], "not_found"),
    "a modified file": (lambda folder: _flip(_only(folder), -1), "corrupt"),
    "a shorter file": (lambda folder: _only(folder).write_bytes(_only(folder).read_bytes()[:-1]), "corrupt"),
    "a missing file": (lambda folder: _only(folder).unlink(), "corrupt"),
    "a modified index": (lambda folder: _flip(folder / "index.json", 40), "corrupt"),
    "an index of a later release": (lambda folder: _as_version(folder, 2), "wrong_version"),
    "an index without a version": (lambda folder: _as_version(folder, None), "corrupt"),
    "a truncated file of another tool": (_cut_plain_file, "corrupt"),
    "a file that cannot be read": (lambda folder: _as_folder(_only(folder)), "unreadable"),
}


@pytest.mark.slow
def test_incomplete_checkpoints_are_refused_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.sharding.saved.save.secrets", SimpleNamespace(token_hex=lambda _: "0" * 8))
    for number, (tear, code) in enumerate(TORN.values()):
        folder = tmp_path / str(number)
        sharding.save(small(), folder)
        tear(folder)
        applied = small(1)
        before = {name: tensor.clone() for name, tensor in applied.state_dict().items()}
        with expect_problem(code, "checkpoint", str(folder)):
            sharding.load(applied, folder)
        assert all(before[name].equal(tensor) for name, tensor in applied.state_dict().items())


def fails_on_one_rank(folder: str) -> tuple[str, list[str]]:
    """(the error if rank 1 cannot write over a checkpoint, files afterwards)"""
    model, batch = _model()
    applied = sharding.apply(model, _plan(model, batch, {"a": dist.get_world_size()}, 0))
    sharding.save(applied, folder)
    first = sharding.state_dict(applied)
    applied(*batch).backward()
    torch.optim.SGD(applied.parameters(), 0.1).step()

    def full(*_: Any) -> Any:
        raise OSError("no space is left")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(tensor_file, "write", full)
        with pytest.raises(sharding.SaveError) as error:
            sharding.save(applied, folder)
    sharding.load(applied, folder)
    assert all(first[name].equal(tensor) for name, tensor in sharding.state_dict(applied).items())
    sharding.save(applied, folder)
    sharding.close(applied)
    return str(error.value), sorted(file.name for file in Path(folder).iterdir())


@pytest.mark.slow
def test_a_save_that_fails_on_one_rank_fails_on_all_and_keeps_the_old_checkpoint(ranks: Pools, tmp_path: Path):
    for message, files in ranks[2].run(fails_on_one_rank, str(tmp_path)):
        assert "(rank 1: OSError: no space is left)" in message
        parts = [f"part-0000{rank}-of-00002.safetensors" for rank in range(2)]
        assert [re.sub(r"\.[0-9a-f]{8}\.", ".", file) for file in files] == ["index.json", *parts]


def _save_forever(folder: str, pipe: Any) -> None:
    applied = small(hidden_dim=20_000)
    for number in range(1_000_000):
        with torch.no_grad():
            for parameter in applied.parameters():
                parameter.fill_(number)
        sharding.save(applied, folder, extra=number)
        if number == 0:
            pipe.send("saved")


@pytest.mark.slow
def test_a_process_killed_while_saving_leaves_a_complete_checkpoint(tmp_path: Path):
    context = forkserver_with_torch()
    for attempt in range(4):
        parent_pipe, child_pipe = context.Pipe()
        process = context.Process(target=_save_forever, args=(str(tmp_path), child_pipe), daemon=True)
        process.start()
        assert parent_pipe.poll(120), "nothing was saved"
        time.sleep(0.013 * attempt)  # to kill it at another point each time
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        applied = small(hidden_dim=20_000)
        number = sharding.load(applied, tmp_path)
        assert all((parameter == number).all() for parameter in applied.parameters())


@pytest.mark.slow
def test_all_tensors_that_do_not_match_are_named(tmp_path: Path):
    sharding.save(small(), tmp_path)
    module = nn.Sequential(nn.Linear(4, 7), nn.Identity(), nn.Linear(7, 2, bias=False))
    module.register_buffer("seen", torch.zeros(2))
    plan = sharding.plan(module, (torch.zeros(5, 4),), cores(1), loss=mean_square, mesh={"a": 1})
    applied = sharding.apply(module, plan, loss=mean_square)
    for load in (
        lambda: sharding.load(applied, tmp_path),
        lambda: sharding.apply(module, plan, loss=mean_square, checkpoint=tmp_path),
    ):
        with expect_problems([
            ("shape_mismatch", "0.weight", [3, 4]), ("shape_mismatch", "0.bias", [3]), ("missing", "2.weight", None),
            ("missing", "seen", None), ("unknown_key", "1.weight", [2, 3]), ("unknown_key", "1.bias", [2]),
        ]) as error:  # fmt: skip
            load()
        rules = {problem.path: problem.rule for problem in error.value.problems}
        assert "[7, 4]" in rules["0.weight"]
        assert "[2, 7]" in rules["2.weight"]


def test_another_optimizers_state_is_refused(tmp_path: Path):
    applied = small()
    sharding.save(applied, tmp_path / "none")
    with expect_problem("missing", "optimizer", "SGD"):
        sharding.load(applied, tmp_path / "none", torch.optim.SGD(applied.parameters(), 0.1))
    sharding.save(applied, tmp_path / "adam", torch.optim.Adam(applied.parameters()))
    with expect_problem("mismatch", "optimizer", "SGD"):
        sharding.load(applied, tmp_path / "adam", torch.optim.SGD(applied.parameters(), 0.1))
    weights = [applied.get_parameter(f"{number}.weight") for number in range(2)]
    with expect_problems([("mismatch", "optimizer.param_groups[0]", f"{number}.bias") for number in range(2)]):
        sharding.load(applied, tmp_path / "adam", torch.optim.Adam(weights))
    with expect_problem("not_found", "optimizer.param_groups[0]", [2]):
        sharding.save(applied, tmp_path, torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1))
    with expect_problem("wrong_type", "extra", None):
        sharding.save(applied, tmp_path, extra=torch.zeros(2))


def test_optimizer_state_that_cannot_be_saved_is_refused_by_name(tmp_path: Path):
    applied = small()
    optimizer = torch.optim.LBFGS(applied.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = applied(torch.ones(5, 4))
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    with expect_problems([("wrong_type", f"optimizer.{slot}.0.weight", "list") for slot in ("old_dirs", "old_stps")]):
        sharding.save(applied, tmp_path, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_whole_tensors_of_other_tools_are_loaded(tmp_path: Path):
    torch.manual_seed(0)
    model = WithReset()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "second.weight"}  # which is tied
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    meta = on_meta()
    applied = sharding.apply(meta, sharding.plan(meta, BATCH, cores(1), mesh={"a": 1}), checkpoint=tmp_path)
    loaded_state = sharding.state_dict(applied)
    assert set(loaded_state) == set(model.state_dict())
    assert all(loaded_state[name].equal(tensor) for name, tensor in model.state_dict().items())
    assert applied.get_buffer("offsets").equal(torch.arange(7.0))  # not persistent: filled by reset_parameters


def test_files_are_those_of_safetensors(tmp_path: Path):
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(5, 7, 3), "b": torch.randn(4).bfloat16(), "c": torch.randint(0, 9, (3, 2)),
        "scalar": torch.tensor(2.5, dtype=torch.float64), "truth": torch.rand(6, 2) > 0.5, "empty": torch.zeros(0, 3),
        "half": torch.randn(2, 2).half(), "turned": torch.randn(4, 6).t(),
    }  # fmt: skip
    folder = Folder(str(tmp_path))
    tensor_file.write(folder, "ours", tensors)
    read = safetensors.torch.load_file(tmp_path / "ours")
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in read.items()} == {
        name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()
    }
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    draw = random.Random(0)
    for file in ("ours", "theirs"):
        reader = tensor_file.TensorFileReader(folder)
        expected_bytes = 0
        for name, full_tensor in tensors.items():
            for _ in range(20):
                starts = [draw.randint(0, size) for size in full_tensor.shape]
                sizes = [draw.randint(0, size - start) for size, start in zip(full_tensor.shape, starts, strict=True)]
                box = torch.zeros(sizes, dtype=full_tensor.dtype)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(tensor_file, "BLOCK_BYTES", draw.choice((1, 50, 1 << 20)))
                    for place, values in reader.read(file, name, starts, sizes):
                        box[place] = values
                expected_bytes += box.numel() * box.element_size()
                cut = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
                assert box.equal(full_tensor[cut])
        assert reader.bytes_read == expected_bytes
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}).encode()
    headers = b"[]", b"null", header
    contents = [b"", b"\x02", b"\xff" * 9, (20).to_bytes(8, "little") + b"[]"]
    for content in contents + [len(header).to_bytes(8, "little") + header for header in headers]:
        (tmp_path / "crafted").write_bytes(content)
        with pytest.raises(ValueError, match="crafted"):
            tensor_file.entries(folder, "crafted")
