"""Published speed and memory of torchtitan (FSDP2): the profile `torchtitan` is fitted on some runs, others are held
out.

Sources: benchmarks/llama3_h100_202412_torchtitan.md and benchmarks/llama3_8b_h200_2025-06_torchtitan.md of its
repository. Llama 3.1 on H100 with 96 GB (HBM2e at 2.4 TB/s, limited to 500 W) and on H200; local batches of one
micro-batch, except in pipelines; memory is the peak that torch's allocator reserved on any rank. Asynchronous tensor
parallelism is priced as overlapped tensor gathers.

`python -m benchmarks.published_torchtitan` prints the constants and the errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.published_rows import DENSE
from moe.plan import Cluster, Plan, plan_job
from moe.plan.cost.time import TimeModel
from moe.plan.profile import ProfileName, find_profile
from moe.plan.software import SOFTWARE, Host, Software
from moe.spec import JobSpec

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class TitanRow:
    """A run: sequences per step, tokens per second and GPU, and peak reserved GiB of any GPU."""

    model: str
    num_devices: int
    global_batch: int
    parallel: Mapping[str, Any]
    tokens_per_s: float
    memory_gib: float
    is_fitted: bool = True
    dtype: str = "fp8"
    is_compiled: bool = True
    sequence_tokens: int = 8192
    device: str = "h100"
    name: str = field(default="", compare=False)

    @property
    def cluster(self) -> Cluster:
        memory = 96 if self.device == "h100" else 141
        return Cluster(num_nodes=self.num_devices // 8, devices_per_node=8, device=self.device,
                       memory_bytes=memory << 30)  # fmt: skip

    @property
    def job(self) -> JobSpec:
        parallel = {"tensor": 1, "context": 1, "pipeline": 1, **self.parallel}
        return JobSpec.parse(
            {
                "model": DENSE[self.model],
                "data": {"corpus": "synthetic", "max_tokens": self.sequence_tokens},
                "train": {"num_steps": 1, "batch_tokens": self.global_batch * self.sequence_tokens,
                          "dtype": self.dtype},
                "resources": {"num_workers": self.num_devices},
                "parallel": {"sharding": "parameters", **parallel},
            }
        )  # fmt: skip

    @property
    def measured_step_s(self) -> float:
        return self.global_batch * self.sequence_tokens / self.tokens_per_s / self.num_devices

    @property
    def profile(self) -> ProfileName:
        """Profile of the release; the H200 ran a later one."""
        return "torchtitan" if self.device == "h100" else "torchtitan-25.06"

    def plan(self) -> Plan:
        roomy = self.cluster.model_copy(update={"memory_bytes": 1 << 40})
        return plan_job(self.job, roomy, load_skew=1.0, profile=self.profile)

    def error(self, software: Software) -> float:
        """ln(predicted / published) of its step."""
        model = TimeModel(self.job, self.cluster, find_profile(self.profile), software)
        return log(model.step_s(self.plan().candidate) / self.measured_step_s)


def _8b(devices: int, tokens: float, gib: float, **fields: Any) -> TitanRow:
    parallel = {"fsdp": devices, "recompute": "selective", "micro_batch_groups": 2}
    return TitanRow("llama3-8b", devices, 2 * devices, parallel, tokens, gib, **fields)


def _long(model: str, context: int, tokens: float, gib: float, **fields: Any) -> TitanRow:
    parallel = {"fsdp": 8, "context": context, "recompute": "full", "micro_batch_groups": 1}
    return TitanRow(model, 8, 8 // context, parallel, tokens, gib, sequence_tokens=32_768 * context, **fields)


def _405b(batch: int, virtual: int, tokens: float, gib: float, length: int, context: int = 1) -> TitanRow:
    """Run in a pipeline: a local batch is split into as many micro-batches as there are pipeline ranks (the default of
    `pipeline_parallel_microbatches`), and FSDP keeps parameters gathered and gradients unsharded until the end of the
    step (`reshard_after_forward`), as in ZeRO's first stage."""
    groups = batch * context // 8 // 8
    parallel = {"tensor": 8, "pipeline": 8, "context": context, "fsdp": 8, "virtual_stages": virtual,
                "recompute": "full", "micro_batch_groups": groups, "sharding": "optimizer"}  # fmt: skip
    return TitanRow("llama3-405b", 512, batch, parallel, tokens, gib, is_fitted=False, sequence_tokens=length)


ROWS: tuple[TitanRow, ...] = (
    _8b(8, 5762, 82.4, dtype="bfloat16", is_compiled=False, is_fitted=False),
    _8b(8, 6667, 77.0, dtype="bfloat16"),
    _8b(8, 8532, 76.8),
    _long("llama3-8b", 1, 3890, 83.9),
    _long("llama3-8b", 2, 2540, 84.2, is_fitted=False),
    _long("llama3-8b", 4, 1071, 84.0, is_fitted=False),
    _long("llama3-8b", 8, 548, 84.5, is_fitted=False),
    _8b(128, 5605, 67.0, dtype="bfloat16", is_compiled=False, is_fitted=False),
    _8b(128, 6514, 62.0, dtype="bfloat16", is_fitted=False),
    _8b(128, 8380, 61.8, is_fitted=False),
    TitanRow("llama3-70b", 256, 512, {"tensor": 8, "fsdp": 32, "recompute": "full", "micro_batch_groups": 16}, 829,
             71.9),
    _405b(256, 1, 100, 82.5, 8192),
    _405b(256, 2, 128, 72.7, 8192),
    _405b(64, 1, 76, 75.3, 32_768),
    _405b(32, 1, 47, 75.9, 65_536, context=2),
    _405b(16, 1, 31, 77.1, 131_072, context=4),
    _405b(8, 1, 16, 84.9, 262_144, context=8),
    _8b(32, 10_938, 47.96, device="h200"),
    _8b(64, 10_753, 46.97, is_fitted=False, device="h200"),
)  # fmt: skip


AT_500_W = 0.81
"""Speed of an H100 limited to 500 W as a share of full power; fitted, but not part of the profile."""
_BEGIN, _MOST = (3.0, 0.8, 0.8, 0.6), ([0, 0.3, 0.3, 0.2], [40, 1, 1, 1])


def titan_by(constants: Vector, row: TitanRow) -> Software:
    """Software with constants: a layer in 100 us, sustained share, its factor at 500 W, share of attention's rate."""
    layer, sustained_share, at_500_w, attention = constants.tolist()
    power = at_500_w if row.device == "h100" else 1.0
    host = Host(layer_s=1e-4 * layer, expert_s=0.0, run_s=0.0, sustained=sustained_share * power)
    return replace(SOFTWARE["torchtitan"], host=host, attention_share=attention)


def titan_errors(constants: Vector, rows: Sequence[TitanRow]) -> Vector:
    return np.array([row.error(titan_by(constants, row)) for row in rows])


def fitted_titan(rows: Sequence[TitanRow]) -> Vector:
    solution = least_squares(
        titan_errors, _BEGIN, args=(rows,), bounds=_MOST, loss="soft_l1", f_scale=0.1, diff_step=1e-3
    )
    return np.asarray(solution.x)


CONSTANTS = np.array([0.0, 0.77, AT_500_W, 0.68])
"""Constants of plans (`moe/plan/software.py`)."""


def table(constants: Vector = CONSTANTS) -> list[str]:
    """Predicted and published speed and memory, of fitted and held-out runs."""
    lines = ["| Model, GPUs, layout | dtype, sequence | published tokens/s a GPU | error | part in the fit | "
             "GiB reserved | predicted | error |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    errors: dict[str, list[float]] = {"fitted": [], "held out": [], "memory": []}
    for row in ROWS:
        error, gib = row.error(titan_by(constants, row)), row.plan().memory.job_bytes / 2**30
        errors["fitted" if row.is_fitted else "held out"].append(error)
        errors["memory"].append(log(gib / row.memory_gib))
        layout = " ".join(f"{name} {value}" for name, value in row.parallel.items() if value != 1)
        settings = f"{row.dtype} {row.sequence_tokens:,}{'' if row.is_compiled else ', eager'}"
        lines.append(
            f"| {row.model}, {row.num_devices} {row.device}, {layout} | {settings} | {row.tokens_per_s:,.0f} | "
            f"{exp(-error) - 1:+.0%} | {'yes' if row.is_fitted else 'held out'} | {row.memory_gib:.1f} | {gib:.1f} | "
            f"{gib / row.memory_gib - 1:+.0%} |"
        )
    summary = "; ".join(
        f"{name} {fmean(map(abs, values)):.3f}, {median(values):+.3f}, {exp(max(values, key=abs)):.2f}"
        for name, values in errors.items()
    )
    return [f"Mean |ln(predicted / published)|, median and worst as a factor: {summary}.", "", *lines]


def main() -> None:
    rows = [row for row in ROWS if row.is_fitted]
    constants = fitted_titan(rows)
    fits = [fitted_titan([fit_row for fit_row in rows if fit_row != row]) for row in rows]
    print("fitted", constants, "each left out", *fits)
    print("\n".join(table(constants)))


if __name__ == "__main__":
    main()
