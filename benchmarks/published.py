"""The planner beside published runs: the same layouts predicted, and what it would choose instead.

Writes the tables of docs/planner.md. Language models are priced as peers ran them, the paper's family as we do.

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
from moe.plan.candidate import Candidate, Options
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
        return plan_job(self.job(parallel), self.cluster, load_skew=1.0, profile="peer")

    @property
    def mesh(self) -> str:
        return mesh_of(*self.degrees[:3])


def mesh_of(tensor: int, expert: int, pipeline: int, context: int = 1, expert_tensor: int = 1) -> str:
    """Degrees without those that are one, but for TP·EP·PP."""
    extra = (f"·CP{context}" if context > 1 else "") + (f"·ETP{expert_tensor}" if expert_tensor > 1 else "")
    return f"{tensor}·{expert}·{pipeline}{extra}"


def mesh_of_plan(plan: Plan) -> str:
    return mesh_of(
        plan.degrees.tensor,
        plan.degrees.expert,
        plan.degrees.pipeline,
        plan.degrees.context,
        plan.degrees.expert_tensor,
    )


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
        return Candidate(Degrees(expert=self.num_experts), Options(micro_batch_groups=max(1, groups)))


PAPER = (
    PaperRow(2048, 36, 1 << 22, 0.72), PaperRow(2048, 12, 1 << 22, 2.15), PaperRow(512, 36, 1 << 20, 1.05),
    PaperRow(512, 12, 1 << 20, 3.28), PaperRow(128, 36, 1 << 20, 0.67), PaperRow(128, 12, 1 << 20, 2.16),
)  # fmt: skip


def _llama(model_dim: int, num_layers: int, ffn_dim: int, num_heads: int) -> dict[str, Any]:
    attention = {
        "kind": "grouped_query",
        "num_heads": num_heads,
        "num_kv_heads": num_heads // 8,
        "head_dim": 128,
    }
    return {"kind": "language", "model_dim": model_dim, "num_layers": num_layers, "attention": attention,
            "ffn_dim": ffn_dim, "vocab_size": 128_256}  # fmt: skip


def _deepseek(
    model_dim: int, ffn_dim: int, vocab_size: int, num_experts: int, hidden_dim: int, shared: int, top_k: int
) -> dict[str, Any]:
    return {
        "kind": "language", "model_dim": model_dim, "num_layers": 4, "first_dense_layers": 1, "ffn_dim": ffn_dim,
        "vocab_size": vocab_size,
        "attention": {"kind": "latent", "num_heads": 128, "query_rank": 1536, "key_value_rank": 512, "head_dim": 128,
                      "rope_dim": 64, "value_dim": 128},
        "moe": {"router": "softmax_topk", "top_k": top_k, "num_experts": num_experts, "hidden_dim": hidden_dim,
                "activation": "swiglu", "shared_hidden_dim": shared, "group_tokens": SEQUENCE_TOKENS},
    }  # fmt: skip


CUT_DOWN: dict[str, dict[str, Any]] = {
    "llama3-70b, 12 layers": _llama(8192, 12, 28_672, 64),
    "llama3-405b, 4 layers": _llama(16_384, 4, 53_248, 128),
    "deepseek-v2, 4 layers": _deepseek(5120, 12_288, 102_400, 160, 1536, 3072, 6),
    "deepseek-v3, 4 layers": _deepseek(7168, 18_432, 129_280, 256, 2048, 2048, 8),
}


@dataclass(frozen=True)
class MemoryRow:
    """The most that torch had allocated on any of eight B200 while Megatron-Core trained in bfloat16: one sequence at
    a time, nothing computed again, optimizer states cut up over data ranks."""

    model: str
    degrees: Degrees
    measured_gib: float

    @property
    def name(self) -> str:
        return f"{self.model}, {self.degrees.tensor}·{self.degrees.expert}·{self.degrees.pipeline}"

    @property
    def predicted_gib(self) -> float:
        """Without what is left to the framework and to fragmentation."""
        num_micro_batches = 4
        sequences = num_micro_batches * self.degrees.data_ranks
        spec = JobSpec.parse(
            {
                "model": CUT_DOWN[self.model],
                "data": {"corpus": "synthetic", "max_tokens": SEQUENCE_TOKENS},
                "train": {"num_steps": 1, "batch_tokens": sequences * SEQUENCE_TOKENS, "dtype": "bfloat16"},
                "resources": {"num_workers": 8},
            }
        )
        cluster = Cluster(num_nodes=1, devices_per_node=8, device="b200")
        candidate = Candidate(
            self.degrees, Options(num_micro_batches=num_micro_batches, sharding="optimizer")
        )
        memory = Search(spec, cluster, load_skew=1.0, profile="peer").memory.of(candidate)
        return (memory.total - memory.allowance) / 2**30


def _over_tensor_ranks(model: str, measured_gib: tuple[float, ...]) -> list[MemoryRow]:
    """Over 1 of two stages, 2, 4 and 8 tensor ranks."""
    every = [Degrees(data=4, fsdp=4, pipeline=2)]
    every += [Degrees(data=8, tensor=tensor, fsdp=8 // tensor) for tensor in (2, 4, 8)]
    return [MemoryRow(model, degrees, gib) for degrees, gib in zip(every, measured_gib, strict=True)]


def _over_expert_ranks(model: str, one_stage_gib: float, two_stages_gib: float) -> list[MemoryRow]:
    return [MemoryRow(model, Degrees(expert=8, data=1, fsdp=8), one_stage_gib),
            MemoryRow(model, Degrees(expert=4, data=1, fsdp=4, pipeline=2), two_stages_gib)]  # fmt: skip


MEMORY = (
    *_over_tensor_ranks("llama3-70b, 12 layers", (66.55, 60.68, 39.07, 28.29)),
    *_over_tensor_ranks("llama3-405b, 4 layers", (87.08, 81.59, 52.89, 38.57)),
    *_over_expert_ranks("deepseek-v2, 4 layers", 45.63, 44.70),
    *_over_expert_ranks("deepseek-v3, 4 layers", 104.30, 114.00),
)
"""SimuMax's table of its release 1.2 (docs/b200 of its repository), of models with fewer layers."""


def table_of_memory() -> list[str]:
    lines = ["| Model, TP·EP·PP | measured GiB | predicted | error |", "|---|---|---|---|"]
    for row in MEMORY:
        predicted = row.predicted_gib
        lines.append(
            f"| {row.name} | {row.measured_gib:.1f} | {predicted:.1f} | {predicted / row.measured_gib - 1:+.1%} |"
        )
    return lines


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
    asked: dict[str, Any] = field(default_factory=dict)
    """Fields of `parallel` that its own are held to."""

    @cached_property
    def best(self) -> list[Plan]:
        """The planner's own five, of different shapes."""
        row = self.rows[0]
        search = Search(row.job(self.asked), row.cluster, load_skew=1.0, profile="peer")
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
        of = first.options
        how = f"micro-batch {of.micro_batch_groups}, recompute {of.recompute}, VPP {of.virtual_stages}"
        how += ", FSDP" if first.candidate.gathers else ""
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
            "## Memory of a device, 8 B200", "", *table_of_memory(), "",
            "## The paper's family on TPU v3", "", *table_of_the_paper(), ""]  # fmt: skip
    PAGE.write_text("\n".join(page))
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
