"""Speeds of dense MPT models with FSDP on A100 and H100, published by MosaicML, all held out.

Source: scripts/train/benchmarking/README.md of llm-foundry (2023): PyTorch's first FSDP over all GPUs (`FULL_SHARD`),
bfloat16, FlashAttention's first kernels in Triton, without compilation; nodes of 8 are connected at 1,600 Gb/s.
Activation checkpointing recomputes whole blocks.

`python -m benchmarks.published_mpt` prints the errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean, median

from moe.plan import Cluster, Plan, plan_job
from moe.plan.software import SoftwareName
from moe.spec import JobSpec

_SHAPES = {"1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40),
           "30b": (7168, 48, 56), "70b": (8192, 80, 64)}  # fmt: skip
"""Model dimension, layers and heads."""
SOFTWARE: SoftwareName = "torchtitan"


@dataclass(frozen=True)
class MptRow:
    """A run: tokens per sequence, sequences per micro-batch and per step, and tokens per second and GPU."""

    model: str
    device: str
    num_devices: int
    sequence_tokens: int
    micro_batch: int
    global_batch: int
    recomputes: bool
    tokens_per_s: float

    @property
    def name(self) -> str:
        recompute = ", recomputed blocks" if self.recomputes else ""
        return f"mpt-{self.model}, {self.num_devices} {self.device}, micro-batch {self.micro_batch}{recompute}"

    @property
    def job(self) -> JobSpec:
        width, layers, heads = _SHAPES[self.model]
        attention = {"kind": "grouped_query", "num_heads": heads, "num_kv_heads": heads, "head_dim": width // heads}
        return JobSpec.parse(
            {
                "model": {"kind": "language", "model_dim": width, "num_layers": layers, "attention": attention,
                          "ffn_dim": 4 * width, "ffn_activation": "gelu", "tie_embeddings": True,
                          "vocab_size": 50_368},
                "data": {"corpus": "synthetic", "max_tokens": self.sequence_tokens},
                "train": {"num_steps": 1, "batch_tokens": self.global_batch * self.sequence_tokens,
                          "dtype": "bfloat16"},
                "resources": {"num_workers": self.num_devices},
                "parallel": {"tensor": 1, "context": 1, "pipeline": 1, "sharding": "parameters",
                             "fsdp": self.num_devices, "recompute": "full" if self.recomputes else "none",
                             "micro_batch_groups": self.micro_batch},
            }
        )  # fmt: skip

    def plan(self, software: SoftwareName = SOFTWARE) -> Plan:
        cluster = Cluster(num_nodes=-(-self.num_devices // 8), devices_per_node=min(8, self.num_devices),
                          device=self.device, memory_bytes=1 << 40)  # fmt: skip
        return plan_job(self.job, cluster, load_skew=1.0, profile="torchtitan", software=software, top=1)

    def error(self, software: SoftwareName = SOFTWARE) -> float:
        """ln(predicted / published) of its step."""
        published_s = self.global_batch * self.sequence_tokens / self.tokens_per_s / self.num_devices
        return log(self.plan(software).predicted.step_s / published_s)


def _rows(model: str, device: str, *runs: tuple[int, int, int, bool, float], devices: int = 8) -> list[MptRow]:
    return [MptRow(model, device, devices, *run) for run in runs]


ROWS: tuple[MptRow, ...] = (
    *_rows("30b", "a100-80", (8192, 1, 168, True, 574), (4096, 1, 168, True, 814), (2048, 3, 504, True, 916),
           (1024, 6, 1008, True, 946)),
    *_rows("13b", "a100-80", (32_768, 1, 24, True, 1016), (16_384, 3, 72, True, 1431), (8192, 5, 120, True, 1795),
           (4096, 10, 240, True, 2060), (2048, 2, 48, False, 2262), (1024, 40, 960, True, 2330)),
    *_rows("7b", "a100-80", (65_536, 1, 16, True, 1013), (16_384, 4, 64, True, 2453), (8192, 8, 128, True, 3206),
           (4096, 16, 256, True, 3684), (2048, 6, 96, False, 4641), (1024, 64, 1024, True, 4357)),
    *_rows("3b", "a100-80", (16_384, 1, 48, False, 5529), (8192, 3, 144, False, 7695), (4096, 5, 240, False, 9457),
           (2048, 10, 160, False, 10_811)),
    *_rows("1b", "a100-80", (8192, 3, 96, False, 13_814), (4096, 7, 224, False, 17_807),
           (2048, 14, 448, False, 20_513)),
    *_rows("70b", "a100-80", (2048, 8, 2048, True, 410), devices=64),
    *_rows("70b", "a100-80", (2048, 2, 1024, True, 373), devices=32),
    *_rows("30b", "h100", (4096, 1, 168, True, 1802), (2048, 3, 504, True, 2002)),
    *_rows("13b", "h100", (4096, 10, 240, True, 4717), (2048, 2, 16, False, 4792)),
    *_rows("7b", "h100", (8192, 8, 128, True, 6935), (4096, 16, 256, True, 8611), (2048, 6, 48, False, 10_643)),
    *_rows("3b", "h100", (4096, 5, 240, False, 20_964)),
    *_rows("70b", "h100", (2048, 8, 2048, True, 1039), devices=64),
)  # fmt: skip


def summary(errors: Sequence[float]) -> str:
    """Mean |ln(predicted / published)|, median and worst as a factor."""
    return f"{fmean(map(abs, errors)):.3f}, {median(errors):+.3f}, {exp(max(errors, key=abs)):.2f}"


def table() -> list[str]:
    """Predicted and published speeds, with errors by device."""
    errors = {row: row.error() for row in ROWS}
    by_device = "; ".join(
        f"{device} {summary([errors[row] for row in ROWS if row.device == device])}"
        for device in dict.fromkeys(row.device for row in ROWS)
    )
    lines = [
        f"Mean |ln(predicted / published)|, median and worst as a factor: {by_device}.",
        "",
        "| Model, GPUs | sequence | published tokens/s a GPU | error |",
        "|---|---|---|---|",
    ]
    for row, error in errors.items():
        lines.append(f"| {row.name} | {row.sequence_tokens:,} | {row.tokens_per_s:,.0f} | {exp(-error) - 1:+.0%} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
