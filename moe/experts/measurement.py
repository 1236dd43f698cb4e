"""Measurement of the backends of grouped products for these experts on this machine.

Measured once per device type, number of threads, dtype and shape, and stored. Of two concurrent measurements the first
stored decides, so that a machine always makes the same choice.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.experts.experts import BACKENDS, FUSED, Cost, Costs
from moe.experts.products import GroupedProducts
from moe.parallel.accelerator import accelerator

_FLOPS_MEASURED = {"cpu": 8e9, "cuda": 2e12}
_ROUNDS = 5
"""Measurement rounds; fewer, but at least one, if even the fewest rows exceed `_FLOPS_MEASURED`."""


@dataclass(frozen=True)
class Shape:
    """Widths, dtype and device of experts, which determine the cost together with the loads."""

    device: str
    num_threads: int
    dtype: str
    num_experts: int
    model_dim: int
    hidden_dim: int
    row_multiple: int = 1
    """`row_multiple` of the segments backend."""

    @classmethod
    def from_weight(cls, w_in: Tensor) -> "Shape":
        """Shape of experts whose first matrices are `w_in` `[E, M, H]`."""
        name = accelerator(w_in.device).name
        device = f"cpu {processor()}" if name is None else name
        threads = torch.get_num_threads() if name is None else 0
        multiple = BACKENDS["segments"].row_multiple(w_in.dtype, w_in.device.type)
        num_experts, model_dim, hidden_dim = w_in.shape
        dtype = str(w_in.dtype).removeprefix("torch.")
        return cls(device, threads, dtype, num_experts, model_dim, hidden_dim, multiple)

    @property
    def key(self) -> str:
        device = "".join(c if c.isalnum() else "-" for c in f"{self.device} torch {torch.__version__}")
        rows = f"-rows{self.row_multiple}" if self.row_multiple > 1 else ""
        # The key changed when kernels were added, and again with TMA, so that older costs are measured again.
        kernels = "" if self.device.startswith("cpu ") else "-kernels-tma"
        sizes = f"e{self.num_experts}-m{self.model_dim}-h{self.hidden_dim}"
        return f"{device}-{self.num_threads}t-{self.dtype}{rows}{kernels}-{sizes}"


def processor() -> str:
    """Model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def measure(w_in: Tensor) -> Costs:
    """Measure every backend that supports experts like `w_in` `[E, M, H]`, at equal loads of two sizes."""
    num_experts, model_dim, hidden_dim = w_in.shape
    flops_per_row = 6 * model_dim * hidden_dim
    dtype, device_type = w_in.dtype, accelerator(w_in.device).kind
    max_rows = int(_FLOPS_MEASURED[device_type] / flops_per_row / num_experts)
    able = [
        name for name, products in BACKENDS.items() if products.supports(dtype, device_type, (model_dim, hidden_dim))
    ]
    multiples = {name: BACKENDS[name].row_multiple(dtype, device_type) for name in able}
    multiple = max(multiples.values())
    few_rows = max(4, multiple)
    many_rows = max(2 * few_rows, min(512, max_rows) // multiple * multiple)
    rounds = max(1, min(_ROUNDS, _ROUNDS * max_rows // many_rows))
    few_rows_s, many_rows_s = (_seconds(able, w_in, rows_each, rounds) for rows_each in (few_rows, many_rows))
    costs = {}
    for name in able:
        rows_of_few, rows_of_many = (
            sum(BACKENDS[name].num_product_rows([rows_each] * num_experts, multiples[name]))
            for rows_each in (few_rows, many_rows)
        )
        per_row_s = max(0.0, (many_rows_s[name] - few_rows_s[name]) / (rows_of_many - rows_of_few))
        fixed_s = max(0.0, few_rows_s[name] - per_row_s * rows_of_few)
        costs[name] = Cost(fixed_s, per_row_s, multiples[name])
    return costs


@torch.no_grad()
def _seconds(backends: list[str], w_in: Tensor, rows_each: int, num_rounds: int) -> dict[str, float]:
    """Shortest of `num_rounds` times per backend. Backends take turns, so background load slows all of them."""
    counts = [rows_each] * w_in.shape[0]
    x = w_in.new_ones(sum(counts), w_in.shape[1])
    d_y = w_in.new_ones(sum(counts), w_in.shape[2])
    gradient = torch.empty_like(w_in, dtype=torch.promote_types(w_in.dtype, torch.float32))

    def once(products: GroupedProducts) -> float:
        accelerator(w_in.device).synchronize()
        began = time.perf_counter()
        products.forward(x, w_in, counts)
        products.input_gradient(d_y, w_in, counts)
        products.weight_gradient(x, d_y, counts, gradient)
        accelerator(w_in.device).synchronize()
        return time.perf_counter() - began

    rounds = [{name: once(BACKENDS[name]) for name in backends} for _ in range(1 + num_rounds)]
    return {name: min(timings[name] for timings in rounds[1:]) for name in backends}


def stored_or_measured(w_in: Tensor, folder: Path, measure_costs: Callable[[Tensor], Costs] = measure) -> Costs:
    """Costs for experts like `w_in`, read from `folder`, or measured and, if it is writable, stored there."""
    path = folder / f"{Shape.from_weight(w_in).key}.json"
    return _read(path) or _store(path, measure_costs(w_in))


def _store(path: Path, costs: Costs) -> Costs:
    draft = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(to_json(costs), indent=1))
        os.link(draft, path)
    except FileExistsError:
        return _read(path) or costs
    except OSError:
        return costs
    finally:
        with suppress(OSError):
            draft.unlink()
    return costs


def _read(path: Path) -> Costs | None:
    try:
        costs = from_json(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # missing or invalid: measure
    return costs if "segments" in costs else None


def to_json(costs: Costs) -> dict[str, dict[str, Any]]:
    return {name: asdict(cost) for name, cost in costs.items()}


def from_json(costs: dict[str, dict[str, Any]]) -> Costs:
    return {name: Cost(**cost) for name, cost in costs.items() if name in BACKENDS or name == FUSED}
