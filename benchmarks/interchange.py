"""Load a folder in the Hugging Face format into two ranks and export it, compared with plain loops over the same bytes.

The folder has random bfloat16 weights of a Qwen3-MoE with many experts. Two gloo ranks load it into float32, experts
split between them and all other parameters sharded by FSDP; each reports its peak of anonymous memory beyond its part.
The plain loop is what a user would write with the safetensors library: each of two processes reads half of the tensors
one by one and converts them to float32 in our layout. An export streams parts of a float32 model in memory into a new
bfloat16 folder; the plain loop converts and transposes the same tensors and writes them with the library. Limits:
part + 1 GB, and half of the plain loop's rate.

    python -m benchmarks.interchange [GIGABYTES]        default: 0.5
"""

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from benchmarks import results
from moe.interchange.config import describe_config, new_config
from moe.interchange.families.qwen3_moe import QWEN3_MOE
from moe.interchange.fitting import expected_tensors
from moe.interchange.load import load_weights
from moe.interchange.pieces import Slices
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource, TensorSource
from moe.parallel import Layout, ParameterShard, extent
from moe.spec import LanguageModelSpec

RANKS = 2
MEMORY_LIMIT_BYTES, RATE_LIMIT = 10**9, 0.5


def spec_of(gigabytes: float) -> LanguageModelSpec:
    """A model of about this size in bfloat16, reached by its number of layers."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": 32_000, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 512, "num_hidden_layers": 1,
    }  # fmt: skip
    one_layer, two_layers = (
        LanguageModelSpec(**describe_config({**config, "num_hidden_layers": layers}, "").model_fields)
        for layers in (1, 2)
    )
    layer_parameters = two_layers.num_parameters() - one_layer.num_parameters()
    layers = max(1, round((gigabytes * 1e9 / 2 - one_layer.num_parameters()) / layer_parameters) + 1)
    return LanguageModelSpec(**describe_config({**config, "num_hidden_layers": layers}, "").model_fields)


class Random(TensorSource):
    """Random weights from a bounded pool."""

    def __init__(self) -> None:
        self._pool = torch.randn(1 << 24)

    def read(self, name: str, slices: Slices, dtype: torch.dtype | None = None) -> torch.Tensor:
        sizes = [end - first for first, end in slices]
        count = torch.Size(sizes).numel()
        return self._pool.repeat(-(-count // len(self._pool)))[:count].view(sizes)


def part_of_rank(spec: LanguageModelSpec, layout: Layout) -> nn.Module:
    """This rank's part of a model: parameters without layers that compute."""
    model = nn.Module()
    for declaration in expected_tensors(spec):
        *path, name = declaration.name.split(".")
        owner = model
        for step in path:
            if not hasattr(owner, step):
                owner.add_module(step, nn.Module())
            owner = getattr(owner, step)
        axis = "expert" if ".experts." in declaration.name else "fsdp"
        part = ParameterShard(torch.Size(declaration.shape), ((axis, 0),) if layout.world_size > 1 else ())
        parameter = nn.Parameter(torch.zeros([end - first for first, end in extent(part, layout)]))
        parameter.part = part  # type: ignore[attr-defined]
        owner.register_parameter(name, parameter)
    return model


class Peak:
    """Peak of anonymous memory of this process in the block, in bytes, sampled a hundred times a second."""

    def __enter__(self) -> "Peak":
        self.begin_bytes = self.peak_bytes = _anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.peak_bytes = max(self.peak_bytes, _anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def num_added_bytes(self) -> int:
        return self.peak_bytes - self.begin_bytes


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the system does not tell RssAnon")


def _rank(rank: int, folder: str, work: str, operation: str, spec: LanguageModelSpec) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/group", rank=rank, world_size=RANKS)
    layout = Layout.from_degrees({"fsdp": RANKS, "expert": RANKS})
    measurements: dict[str, Any] = {}
    if operation == "load":
        model = part_of_rank(spec, layout)
        with Peak() as peak:
            dist.barrier()
            began = time.perf_counter()
            load_weights(folder, model, spec, layout)
            dist.barrier()
            measurements = {"seconds": time.perf_counter() - began, "beyond_part_bytes": peak.num_added_bytes}
        measurements["part_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    elif operation == "plain":
        dist.barrier()
        began = time.perf_counter()
        _plain_read(folder, rank)
        dist.barrier()
        measurements = {"seconds": time.perf_counter() - began}
    elif operation == "save":
        model = part_of_rank(spec, layout)
        with Peak() as peak:
            dist.barrier()
            began = time.perf_counter()
            save_folder(spec, ModelSource(model, layout), f"{work}/saved")
            dist.barrier()
            measurements = {"seconds": time.perf_counter() - began, "beyond_part_bytes": peak.num_added_bytes}
    Path(f"{work}/{operation}.{rank}.json").write_text(json.dumps(measurements))
    layout.close()
    dist.destroy_process_group()


def _plain_read(folder: str, rank: int) -> None:
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys())[rank::RANKS]:
                tensor = file.get_tensor(name).to(torch.float32)
                if ".experts." in name:
                    tensor = tensor.t().contiguous()


def in_ranks(operation: str, folder: str, spec: LanguageModelSpec) -> list[dict[str, Any]]:
    """Report of each rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=str(Path(folder).parent)) as work:
        ranks = [context.Process(target=_rank, args=(rank, folder, work, operation, spec)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"a rank ended with {process.exitcode}")
        return [json.loads(Path(f"{work}/{operation}.{rank}.json").read_text()) for rank in range(RANKS)]


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _plain_write(spec: LanguageModelSpec, tensors: dict[str, torch.Tensor], target: Path) -> None:
    """Write every tensor of the hub's layout, file by file, in a plain loop."""
    target.mkdir()
    batch: dict[str, torch.Tensor] = {}
    number = size = 0

    def flush() -> None:
        nonlocal batch, number, size
        path = target / f"model-{number}.safetensors"
        save_file(batch, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())  # as an export does
        batch, number, size = {}, number + 1, 0

    for name, tensor in tensors.items():
        if ".experts." in name:
            for expert, matrix in enumerate(tensor):
                batch[f"{name}.{expert}"] = matrix.t().to(torch.bfloat16).contiguous()
        else:
            batch[name] = tensor.to(torch.bfloat16)
        size += tensor.numel() * 2
        if size > 5e8:
            flush()
    if batch:
        flush()


def main(gigabytes: float = 0.5) -> None:
    torch.set_num_threads(1)
    spec = spec_of(gigabytes)
    with tempfile.TemporaryDirectory(dir=os.environ.get("SHARDYARD_BENCH_DIR")) as work:
        folder = f"{work}/model"
        save_folder(spec, Random(), folder, dtype=torch.bfloat16)
        checked_load = in_ranks("load", folder, spec)
        Path(folder, "shardyard.json").unlink()  # folders from other tools have none
        num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        loads, plains = [], []
        for _ in range(3):
            loads.append(in_ranks("load", folder, spec))
            plains.append(in_ranks("plain", folder, spec))
        export_reports = in_ranks("save", folder, spec)
        model = part_of_rank(spec, Layout.single())
        with Peak() as peak:
            alone_s = _seconds(lambda: save_folder(spec, ModelSource(model), f"{work}/alone"))
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        plain_write_s = _seconds(lambda: _plain_write(spec, tensors, Path(work, "plain")))
    load_s = min(run[0]["seconds"] for run in loads)
    plain_s = min(run[0]["seconds"] for run in plains)
    figures = {
        "folder_bytes": num_bytes,
        "config": new_config(spec, QWEN3_MOE, "bfloat16"),
        "load": {
            "bytes_per_s": num_bytes / load_s,
            "plain_loop_bytes_per_s": num_bytes / plain_s,
            "of_plain_loop": plain_s / load_s,
            "with_checksums_bytes_per_s": num_bytes / checked_load[0]["seconds"],
            "part_bytes": [rank["part_bytes"] for rank in loads[0]],
            "beyond_part_bytes": max(rank["beyond_part_bytes"] for run in loads for rank in run),
        },
        "export": {
            "bytes_per_s": num_bytes / alone_s,
            "plain_loop_bytes_per_s": num_bytes / plain_write_s,
            "of_plain_loop": plain_write_s / alone_s,
            "beyond_model_bytes": peak.num_added_bytes,
            "of_two_ranks_bytes_per_s": num_bytes / export_reports[0]["seconds"],
            "of_two_ranks_beyond_part_bytes": max(rank["beyond_part_bytes"] for rank in export_reports),
        },
    }
    for operation in ("load", "export"):
        measurements = figures[operation]
        assert isinstance(measurements, dict)
        print(f"\n{operation}, {num_bytes / 1e9:.2f} GB")
        for name, value in measurements.items():
            text = value if isinstance(value, list) else f"{value:,.2f}" if value < 1e4 else f"{value / 1e6:,.0f} MB"
            print(f"  {name:34} {text}")
    print(f"\nlimits: {RATE_LIMIT} of the plain loop, {MEMORY_LIMIT_BYTES / 1e6:,.0f} MB beyond the part")
    results.write("interchange", figures)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.5)
