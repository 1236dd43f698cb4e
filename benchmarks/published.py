"""The planner beside published runs: the same layouts predicted, and what it would choose instead.

Writes the tables of docs/planner.md.

Sequences of 4,096 tokens, loads that were forced to be even. What a row does not say (recomputation, dispatch, overlap
of exchanges) is left to the planner under the row's degrees.
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe.plan import Cluster, Plan, plan_job
from moe.plan.candidate import Candidate
from moe.plan.degrees import Degrees
from moe.plan.search import Search
from moe.spec import JobSpec

PAGE = Path(__file__).parents[1] / "docs" / "planner.md"
SEQUENCE_TOKENS = 4096


@dataclass(frozen=True)
class Row:
    """A published configuration: TP · EP · PP · VPP, micro-batch and global batch in sequences, TFLOP/s a GPU."""

    model: str
    device: str
    num_devices: int
    degrees: tuple[int, int, int, int]
    micro_batch: int
    global_batch: int
    tflops: float | None
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict)
    fitted: str = ""
    """The constant that was fitted on this row."""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.num_devices:,} {self.device}, {'·'.join(map(str, self.degrees))}"

    @property
    def cluster(self) -> Cluster:
        each = 64 if self.device == "gb200" else 8
        return Cluster(num_nodes=self.num_devices // each, devices_per_node=each, device=self.device)

    def job(self, parallel: dict[str, Any]) -> JobSpec:
        return JobSpec.parse(
            {
                "model": {"preset": self.model},
                "data": {"corpus": "synthetic", "max_tokens": SEQUENCE_TOKENS},
                "train": {
                    "num_steps": 1,
                    "batch_tokens": self.global_batch * SEQUENCE_TOKENS,
                    "dtype": self.dtype,
                },
                "resources": {"num_workers": self.num_devices},
                "parallel": parallel,
            }
        )

    def plan(self) -> Plan:
        """Of the published degrees."""
        tensor, expert, pipeline, virtual = self.degrees
        parallel = {
            "tensor": tensor, "expert": expert, "pipeline": pipeline, "virtual_stages": virtual, "context": 1,
            "expert_tensor": 1, "micro_batch_groups": self.micro_batch, **self.options,
        }  # fmt: skip
        return plan_job(self.job(parallel), self.cluster, load_skew=1.0)

    def best(self, top: int = 5) -> Plan:
        """The planner's own."""
        return plan_job(self.job({}), self.cluster, load_skew=1.0, top=top)


_FSDP = {"recompute": "full", "sharding": "parameters"}
ROWS = (
    Row("qwen3-235b-a22b", "h100", 256, (2, 32, 8, 4), 1, 2048, 245, options={"overlap": False},
        fitted="expert_half_rows"),
    Row("qwen3-235b-a22b", "h100", 256, (2, 32, 8, 4), 1, 2048, 276, fitted="exchange_overlap"),
    Row("qwen3-235b-a22b", "h100", 256, (2, 8, 1, 1), 4, 2048, 276, options=_FSDP, fitted="overlap"),
    Row("qwen3-235b-a22b", "h100", 256, (2, 8, 32, 3), 1, 2048, 200),
    Row("qwen3-235b-a22b", "h100", 256, (4, 8, 8, 4), 1, 2048, 167, fitted="layer_s"),
    Row("mixtral-8x7b", "h100", 64, (1, 8, 4, 8), 1, 256, None),
    Row("deepseek-v3", "h100", 1024, (2, 64, 8, 4), 1, 8192, 338),
    Row("deepseek-v3", "b200", 256, (1, 8, 16, 1), 1, 4096, 732, dtype="fp8"),
    Row("deepseek-v3", "b200", 256, (1, 32, 8, 2), 1, 4096, 864, dtype="fp8"),
    Row("qwen3-235b-a22b", "gb200", 256, (1, 32, 8, 3), 1, 8192, 728),
    Row("qwen3-235b-a22b", "gb200", 256, (1, 8, 8, 1), 1, 8192, 750),
    Row("gpt-oss-120b", "h100", 64, (1, 8, 4, 1), 1, 1280, 158),
)  # fmt: skip


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's Table 3: one expert of each layer a core."""

    num_experts: int
    num_layers: int
    batch_tokens: int
    steps_per_s: float

    @property
    def search(self) -> Search:
        spec = JobSpec.parse(
            {
                "model": {"preset": f"gshard-{self.num_experts}e-{self.num_layers}l"},
                "data": {"corpus": "catalogs"},
                "train": {
                    "num_steps": 1,
                    "batch_tokens": self.batch_tokens,
                    "optimizer": {"name": "adafactor"},
                },
                "resources": {"num_workers": self.num_experts},
            }
        )
        cluster = Cluster(num_nodes=self.num_experts // 8, devices_per_node=8, device="tpu-v3")
        return Search(spec, cluster, load_skew=1.0)

    @property
    def candidate(self) -> Candidate:
        groups = self.search.spec.num_groups // self.num_experts
        return Candidate(Degrees(expert=self.num_experts), micro_batch_groups=max(1, groups))


PAPER = (
    PaperRow(2048, 36, 1 << 22, 0.72), PaperRow(2048, 12, 1 << 22, 2.15), PaperRow(512, 36, 1 << 20, 1.05),
    PaperRow(512, 12, 1 << 20, 3.28), PaperRow(128, 36, 1 << 20, 0.67), PaperRow(128, 12, 1 << 20, 2.16),
)  # fmt: skip


def table_of_gpus() -> list[str]:
    lines = [
        "| Model, GPUs, TP·EP·PP·VPP | micro / global batch | published TFLOP/s | predicted | error | memory | "
        "fitted on it | the planner's own | faster by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        plan, began = row.plan(), time.perf_counter()
        best = row.best()
        seconds = time.perf_counter() - began
        predicted = plan.flops_per_s_per_device / 1e12
        error = "" if row.tflops is None else f"{predicted / row.tflops - 1:+.0%}"
        gain = plan.predicted.step_s / best.predicted.step_s - 1
        mesh = f"{best.tensor}·{best.expert}·{best.pipeline}·{best.virtual_stages}"
        extra = " FSDP" if best.sharding == "parameters" and best.fsdp > 1 else ""
        lines.append(
            f"| {row.name}{' FSDP' if row.options == _FSDP else ''} | {row.micro_batch} / {row.global_batch} | "
            f"{row.tflops or '–'} | {predicted:.0f} | {error} | {plan.memory.total / 2**30:.0f} of "
            f"{plan.memory.limit / 2**30:.0f} GiB | {row.fitted} | {mesh}{extra}, recompute {best.recompute}: "
            f"{best.flops_per_s_per_device / 1e12:.0f} | {gain:.0%} |"
        )
        print(lines[-1], f"({seconds:.1f} s)", file=sys.stderr)
    return lines


def table_of_the_paper() -> list[str]:
    lines = [
        "| Experts, layers | published s | predicted | error | of it all-to-all |",
        "|---|---|---|---|---|",
    ]
    for row in PAPER:
        predicted = row.search.time.of(row.candidate)
        published = 1 / row.steps_per_s
        lines.append(
            f"| {row.num_experts}, {row.num_layers} | {published:.2f} | {predicted.step_s:.2f} | "
            f"{predicted.step_s / published - 1:+.0%} | {predicted.all_to_all_s / predicted.step_s:.0%} |"
        )
    return lines


def main() -> None:
    head = (
        PAGE.read_text().partition("<!-- tables -->")[0]
        if PAGE.exists()
        else "# The planner beside publication\n\n"
    )
    gpus = table_of_gpus()
    page = [head.rstrip(), "", "<!-- tables -->", "", "## GPUs", "", *gpus, "",
            "## The paper's family on TPU v3", "", *table_of_the_paper(), ""]  # fmt: skip
    PAGE.write_text("\n".join(page))
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
