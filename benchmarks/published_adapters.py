"""Published speeds of adapters (LoRA) on dense models, all held out.

Sources: docs/source/performance/performance_summary.md of NVIDIA's NeMo (24.07, Megatron-Core in fp8, SQuAD packed to
4,096 tokens, priced as documents of 256); docs/performance-summary.md of NeMo AutoModel (October 2025, FSDP2
and Hugging Face's modules in bfloat16); README.md of torchtune (September 2024, FSDP2, compiled, 2 sequences of 2,048
tokens per device); and llama3/finetune/README.md of NVIDIA's dgxc-benchmarking (Megatron-Bridge in bfloat16). Settings
that a source does not give are those that are predicted to be fastest.

`python -m benchmarks.published_adapters` prints the errors.
"""

from dataclasses import dataclass
from math import exp, log
from typing import Any

from benchmarks.published_mpt import summary
from benchmarks.published_rows import DENSE
from moe.plan import Cluster, Plan, plan_job
from moe.plan.profile import ProfileName
from moe.plan.software import SoftwareName
from moe.spec import JobSpec


def _llama2(width: int, layers: int, ffn_dim: int, heads: int, kv_heads: int) -> dict[str, Any]:
    attention = {"kind": "grouped_query", "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128}
    return {"kind": "language", "model_dim": width, "num_layers": layers, "attention": attention, "ffn_dim": ffn_dim,
            "vocab_size": 32_000}  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    **DENSE,
    "llama2-7b": _llama2(4096, 32, 11_008, 32, 32),
    "llama2-13b": _llama2(5120, 40, 13_824, 40, 40),
    "llama2-70b": _llama2(8192, 80, 28_672, 64, 8),
    "qwen2.5-7b": {**_llama2(3584, 28, 18_944, 28, 4), "vocab_size": 152_064},
    "qwen2.5-32b": {**_llama2(5120, 64, 27_648, 40, 8), "vocab_size": 152_064},
}


@dataclass(frozen=True)
class AdapterRow:
    """A run: sequences per micro-batch and per step (for AutoModel's pipelines, per pass through all stages), degrees,
    and tokens per second and GPU."""

    model: str
    release: str
    device: str
    num_devices: int
    micro_batch: int
    global_batch: int
    tokens_per_s: float
    parallel: tuple[tuple[str, Any], ...] = ()
    dtype: str = "bfloat16"
    sequence_tokens: int = 4096

    @property
    def name(self) -> str:
        degrees = "".join(f", {name} {value}" for name, value in self.parallel)
        return f"{self.model}, {self.num_devices} {self.device}{degrees}, micro-batch {self.micro_batch}"

    @property
    def run_as(self) -> tuple[ProfileName, SoftwareName]:
        """Profile and software of Megatron-Core or of FSDP2."""
        is_megatron = self.release in ("NeMo 24.07", "Megatron-Bridge")
        return ("peer", "megatron-eager") if is_megatron else ("torchtitan-25.06", "torchtitan")

    @property
    def job(self) -> JobSpec:
        parallel = {"tensor": 1, "context": 1, "pipeline": 1, "micro_batch_groups": self.micro_batch}
        return JobSpec.parse(
            {
                "model": {**MODELS[self.model], "adapter": {"rank": 16, "base": "bfloat16"}},
                "data": {"corpus": "synthetic", "max_tokens": self.sequence_tokens},
                "train": {"num_steps": 1, "batch_tokens": self.global_batch * self.sequence_tokens,
                          "dtype": self.dtype},
                "resources": {"num_workers": self.num_devices},
                "parallel": {**parallel, **dict(self.parallel)},
            }
        )  # fmt: skip

    def plan(self) -> Plan:
        cluster = Cluster(
            num_nodes=-(-self.num_devices // 8), devices_per_node=min(8, self.num_devices), device=self.device
        )
        profile, software = self.run_as
        return plan_job(self.job, cluster, load_skew=1.0, profile=profile, software=software, top=1)

    @property
    def error(self) -> float:
        """ln(predicted / published) of its step."""
        return -log(self.plan().tokens_per_s / self.num_devices / self.tokens_per_s)


def _stages(tensor: int, pipeline: int, virtual: int) -> tuple[tuple[str, int], ...]:
    return (("tensor", tensor), ("pipeline", pipeline), ("virtual_stages", virtual))


_FSDP = (("fsdp", 8), ("sharding", "parameters"), ("recompute", "full"))
ROWS: tuple[AdapterRow, ...] = (
    AdapterRow("llama2-7b", "NeMo 24.07", "h100", 8, 16, 512, 25_206, (), "fp8", 256),
    AdapterRow("llama2-13b", "NeMo 24.07", "h100", 8, 16, 512, 14_161, (), "fp8", 256),
    AdapterRow("llama2-70b", "NeMo 24.07", "h100", 8, 16, 512, 2557, _stages(2, 4, 20), "fp8", 256),
    AdapterRow("llama3-70b", "Megatron-Bridge", "gb300", 8, 1, 32, 32 * 4096 / 3.3142 / 8),
    AdapterRow("llama3-8b", "AutoModel", "h100", 1, 2, 32, 12_473),
    AdapterRow("qwen2.5-7b", "AutoModel", "h100", 1, 2, 32, 14_110),
    AdapterRow("llama3-70b", "AutoModel", "h100", 8, 1, 4, 658.6, _stages(2, 4, 10)),
    AdapterRow("qwen2.5-32b", "AutoModel", "h100", 8, 1, 16, 1951, _stages(1, 4, 8)),
    AdapterRow("llama3-70b", "torchtune", "a100-80", 8, 2, 16, 3497 / 8, _FSDP, sequence_tokens=2048),
)


def table() -> list[str]:
    """Predicted and published speeds."""
    errors = [row.error for row in ROWS]
    lines = [
        f"Mean |ln(predicted / published)|, median and worst as a factor: {summary(errors)}.",
        "",
        "| Model, GPUs, layout | release, dtype | software | published tokens/s a GPU | error |",
        "|---|---|---|---|---|",
    ]
    for row, error in zip(ROWS, errors, strict=True):
        lines.append(
            f"| {row.name} | {row.release} {row.dtype} | {row.run_as[1]} | {row.tokens_per_s:,.0f} | "
            f"{exp(-error) - 1:+.0%} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
