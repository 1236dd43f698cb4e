"""The planner beside published runs: the same layouts predicted, and what it would choose instead.

Writes the tables of docs/planner.md.

Sequences of 4,096 tokens, loads that were forced to be even. What is not known of a row (recomputation, dispatch, in
some whether exchanges overlap) is left to the planner under the row's degrees.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from moe.plan import Cluster, Plan, Search, plan_job
from moe.plan.candidate import Candidate
from moe.plan.degrees import Degrees
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
        each = min(self.num_devices, 64 if self.device == "gb200" else 8)
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

    @property
    def mesh(self) -> str:
        return mesh_of(*self.degrees[:3])


def mesh_of(tensor: int, expert: int, pipeline: int, context: int = 1, expert_tensor: int = 1) -> str:
    """Degrees without those that are one, but for TP·EP·PP."""
    extra = (f"·CP{context}" if context > 1 else "") + (f"·ETP{expert_tensor}" if expert_tensor > 1 else "")
    return f"{tensor}·{expert}·{pipeline}{extra}"


def mesh_of_plan(plan: Plan) -> str:
    return mesh_of(plan.tensor, plan.expert, plan.pipeline, plan.context, plan.expert_tensor)


_IN_TURN, _AT_ONCE = {"overlap": False}, {"overlap": True}
_FSDP = {"recompute": "full", "sharding": "parameters", **_IN_TURN}
_QWEN, _DEEPSEEK, _GPT_OSS, _SMALL = "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-120b", "qwen3-30b-a3b"
_TOGETHER = "with three others: layer_s, expert_s, expert_half_rows"
ROWS = (
    Row(_QWEN, "h100", 256, (2, 32, 8, 4), 1, 2048, 245, options=_IN_TURN, fitted=_TOGETHER),
    Row(_QWEN, "h100", 256, (2, 32, 8, 4), 1, 2048, 276, options=_AT_ONCE, fitted="exchange_overlap"),
    Row(_QWEN, "h100", 256, (2, 8, 1, 1), 4, 2048, 276, options=_FSDP, fitted="overlap"),
    Row(_QWEN, "h100", 256, (2, 8, 32, 3), 1, 2048, 200, options=_IN_TURN),
    Row(_QWEN, "h100", 256, (4, 8, 8, 4), 1, 2048, 167, options=_IN_TURN, fitted=_TOGETHER),
    Row("mixtral-8x7b", "h100", 64, (1, 8, 4, 8), 1, 256, None),
    Row(_DEEPSEEK, "h100", 1024, (2, 64, 8, 4), 1, 8192, 338, dtype="fp8", options=_AT_ONCE),
    Row(_DEEPSEEK, "b200", 256, (1, 8, 16, 1), 1, 4096, 732, dtype="fp8", options=_IN_TURN),
    Row(_DEEPSEEK, "b200", 256, (1, 32, 8, 2), 1, 4096, 864, dtype="fp8", options=_AT_ONCE),
    Row(_QWEN, "gb200", 256, (1, 32, 8, 3), 1, 8192, 728),
    Row(_QWEN, "gb200", 256, (1, 8, 8, 1), 1, 8192, 750, fitted="expert_s of GB200"),
    Row(_GPT_OSS, "h100", 64, (1, 8, 4, 1), 1, 1280, 158, options=_IN_TURN),
)  # fmt: skip

LATER = (
    Row(_DEEPSEEK, "gb200", 256, (1, 64, 4, 4), 1, 4096, 782),
    Row(_DEEPSEEK, "gb200", 256, (1, 64, 4, 4), 1, 4096, 1028, dtype="fp8"),
    Row(_QWEN, "b200", 256, (1, 8, 8, 1), 1, 8192, 563, dtype="fp8"),
    Row(_QWEN, "gb200", 256, (1, 32, 8, 1), 1, 8192, 806, dtype="fp8"),
    Row(_SMALL, "h100", 16, (1, 8, 2, 12), 1, 1024, 118, dtype="fp8"),
    Row(_SMALL, "b200", 8, (1, 8, 1, 1), 1, 512, 223, dtype="fp8"),
    Row(_SMALL, "gb200", 8, (1, 8, 1, 1), 4, 512, 600, dtype="fp8"),
    Row(_GPT_OSS, "b200", 64, (1, 64, 1, 1), 4, 1280, 219),
    Row(_GPT_OSS, "gb200", 64, (1, 64, 1, 1), 4, 1280, 428),
)
"""Rows that nothing was fitted on: Megatron-Bridge's summaries of its releases 25.11 and 26.02."""


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


def table_of_gpus(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| Model, GPUs, TP·EP·PP·VPP | micro / global batch | published TFLOP/s | predicted | error | memory | "
        "fitted on it |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plan = row.plan()
        predicted = plan.flops_per_s_per_device / 1e12
        error = "" if row.tflops is None else f"{predicted / row.tflops - 1:+.0%}"
        how = " fp8" if row.dtype == "fp8" else ""
        how += " FSDP" if row.options is _FSDP else " exchanges overlap" if row.options is _AT_ONCE else ""
        lines.append(
            f"| {row.name}{how} | {row.micro_batch} / {row.global_batch} | "
            f"{row.tflops or '–'} | {predicted:.0f} | {error} | {plan.memory.total / 2**30:.0f} of "
            f"{plan.memory.limit / 2**30:.0f} GiB | {row.fitted} |"
        )
        print(lines[-1], file=sys.stderr)
    return lines


@dataclass(frozen=True)
class Choice:
    """What the planner would choose where layouts were published of a model on a cluster."""

    rows: list[Row]

    @cached_property
    def best(self) -> list[Plan]:
        """The planner's own five, of different shapes."""
        row = self.rows[0]
        search = Search(row.job({}), row.cluster, load_skew=1.0)
        ranking = search.ranking(row.num_devices, 5)
        return [search.plan_of(each.candidate) for each in ranking.fitting[:5]]

    @property
    def gain(self) -> float:
        """By how much its best is predicted faster than the fastest of the published layouts is."""
        return min(row.plan().predicted.step_s for row in self.rows) / self.best[0].predicted.step_s - 1

    @property
    def places(self) -> list[int]:
        """Of published degrees among its five, from 1."""
        meshes = [mesh_of_plan(plan) for plan in self.best]
        return sorted({meshes.index(row.mesh) + 1 for row in self.rows if row.mesh in meshes})


def choices(rows: Sequence[Row]) -> list[Choice]:
    alike: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.model, row.device, row.num_devices, row.dtype), []).append(row)
    return [Choice(of) for of in alike.values()]


def table_of_choices(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| Model | the planner's five (TP·EP·PP) | the first of them | published | faster by | place of a published "
        "layout |",
        "|---|---|---|---|---|---|",
    ]
    for choice in choices(rows):
        first, row = choice.best[0], choice.rows[0]
        how = (
            f"micro-batch {first.micro_batch_groups}, recompute {first.recompute}, VPP {first.virtual_stages}"
        )
        how += ", FSDP" if first.sharding == "parameters" and first.fsdp * first.expert_fsdp > 1 else ""
        meshes = dict.fromkeys(each.mesh for each in choice.rows)
        lines.append(
            f"| {row.model}, {row.num_devices:,} {row.device} | {', '.join(map(mesh_of_plan, choice.best))} | {how}: "
            f"{first.flops_per_s_per_device / 1e12:.0f} TFLOP/s | {', '.join(meshes)} | {choice.gain:.0%} | "
            f"{', '.join(map(str, choice.places)) or '–'} |"
        )
        print(lines[-1], file=sys.stderr)
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
    page = [head.rstrip(), "", "<!-- tables -->", "", "## GPUs", "", *table_of_gpus(ROWS), "",
            "## GPUs, rows that came later", "", *table_of_gpus(LATER), "",
            "## What the planner would choose", "", *table_of_choices([*ROWS, *LATER]), "",
            "## The paper's family on TPU v3", "", *table_of_the_paper(), ""]  # fmt: skip
    PAGE.write_text("\n".join(page))
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
