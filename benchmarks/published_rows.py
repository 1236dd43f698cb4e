"""Training runs with published speeds and what is known of their settings.

Sources: the performance summaries of Megatron-Bridge for its containers 25.09, 25.11, 26.02 and 26.04, with its recipes
for dispatchers, CUDA graphs, overlap and recomputation, and Megatron-MoE-ModelZoo for Qwen3-235B in bfloat16 (`zoo`).
Loads were forced to be even, and no token was dropped. Left out are rows of 25.09 with dropped tokens, and rows with
the Muon optimizer, NVFP4, Mamba layers, or activations offloaded to the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe.plan import Cluster, Plan, plan_job
from moe.plan.software import SoftwareName
from moe.spec import JobSpec

NVL_DEVICES = 64
"""Devices that a job of a power of two uses of the 72 in an NVLink domain of GB200 or GB300."""


@dataclass(frozen=True)
class Row:
    """A published run: TP · EP · PP · VPP, micro-batch and global batch in sequences, tokens per second and GPU."""

    model: str
    device: str
    num_devices: int
    degrees: tuple[int, int, int, int]
    micro_batch: int
    global_batch: int
    tokens_per_s: float
    software: SoftwareName
    release: str
    dtype: str = "fp8"
    sequence_tokens: int = 4096
    parallel: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `parallel`: overlap, recomputation, sharding, context ranks."""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.num_devices:,} {self.device}, {'·'.join(map(str, self.degrees))}"

    @property
    def settings(self) -> str:
        """Release, dtype and options, which distinguish rows of the same name."""
        parts = [self.release, self.dtype, f"mb {self.micro_batch}"]
        parts += ["FSDP"] * (self.parallel.get("sharding") == "parameters")
        parts += ["overlap"] * bool(self.parallel.get("overlap"))
        return " ".join(parts)

    @property
    def workload(self) -> tuple[object, ...]:
        """Model, GPUs, dtype and length of sequences."""
        return self.model, self.device, self.num_devices, self.dtype, self.sequence_tokens

    @property
    def run_as(self) -> tuple[object, ...]:
        """Layout, options and software."""
        return self.degrees, self.micro_batch, self.software, self.parallel

    @property
    def measured_step_s(self) -> float:
        return self.global_batch * self.sequence_tokens / self.tokens_per_s / self.num_devices

    @property
    def cluster(self) -> Cluster:
        devices_per_node = min(self.num_devices, NVL_DEVICES if self.device.startswith("gb") else 8)
        return Cluster(
            num_nodes=self.num_devices // devices_per_node, devices_per_node=devices_per_node, device=self.device
        )

    def job(self, parallel: Mapping[str, Any]) -> JobSpec:
        return JobSpec.parse(
            {
                "model": self._model,
                "data": {"corpus": "synthetic", "max_tokens": self.sequence_tokens},
                "train": {
                    "num_steps": 1,
                    "batch_tokens": self.global_batch * self.sequence_tokens,
                    "dtype": self.dtype,
                },
                "resources": {"num_workers": self.num_devices},
                "parallel": dict(parallel),
            }
        )

    @property
    def known_parallel(self) -> dict[str, Any]:
        """`parallel` of its job, as far as the published run's settings are known."""
        tensor, expert, pipeline, virtual = self.degrees
        parallel = {"tensor": tensor, "pipeline": pipeline, "virtual_stages": virtual, "context": 1,
                 "micro_batch_groups": self.micro_batch}  # fmt: skip
        if self.is_sparse:
            parallel |= {"expert": expert, "expert_tensor": 1, "num_chunks": 1, "dispatch": "flat"}
        return {**parallel, **self.parallel}

    @property
    def _model(self) -> dict[str, Any]:
        """Model fields; token groups are sequences."""
        fields = MODELS[self.model]
        return fields if self.model in DENSE else {**fields, "moe": {"group_tokens": self.sequence_tokens}}

    @property
    def is_sparse(self) -> bool:
        return self.model not in DENSE

    def plan(self, software: SoftwareName | None = None) -> Plan:
        """The plan of the published layout, as it was run or by other software."""
        return plan_job(self.job(self.known_parallel), self.cluster, load_skew=1.0, profile="peer",
                        software=software or self.software)  # fmt: skip


def llama(model_dim: int, num_layers: int, ffn_dim: int, num_heads: int) -> dict[str, Any]:
    """A dense model with 8 heads of keys and values."""
    attention = {"kind": "grouped_query", "num_heads": num_heads, "num_kv_heads": 8, "head_dim": 128}
    return {"kind": "language", "model_dim": model_dim, "num_layers": num_layers, "attention": attention,
            "ffn_dim": ffn_dim, "vocab_size": 128_256}  # fmt: skip


DENSE: dict[str, dict[str, Any]] = {
    "llama3-8b": llama(4096, 32, 14_336, 32),
    "llama3-70b": llama(8192, 80, 28_672, 64),
    "llama3-405b": llama(16_384, 126, 53_248, 128),
}
MODELS: dict[str, dict[str, Any]] = {
    **DENSE,
    "qwen3-235b-a22b": {"preset": "qwen3-235b-a22b"},
    "qwen3-30b-a3b": {"preset": "qwen3-30b-a3b"},
    "gpt-oss-120b": {"preset": "gpt-oss-120b"},
    "deepseek-v3": {"preset": "deepseek-v3"},
    "deepseek-v3-mtp": {"preset": "deepseek-v3", "num_layers": 62},
}
"""`deepseek-v3-mtp` predicts a second token with one more layer; nothing else of it is counted."""

_V3, _V3_MTP, _QWEN, _SMALL, _GPT = (
    "deepseek-v3",
    "deepseek-v3-mtp",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
    "gpt-oss-120b",
)
_IN_TURN, _AT_ONCE = {"overlap": False}, {"overlap": True}
_EAGER: SoftwareName = "megatron-eager"
_FUSED: SoftwareName = "megatron-deepep"
_GRAPHS: SoftwareName = "megatron-graphs"
_ZOO_FLOPS = 0.1481
"""TFLOP per token of Qwen3-235B, as the source counts them."""


def _zoo(tflops: float) -> float:
    return tflops / _ZOO_FLOPS


ROWS: tuple[Row, ...] = (
    # Megatron-MoE-ModelZoo and Megatron-Bridge 25.09
    Row(_QWEN, "h100", 256, (2, 32, 8, 4), 1, 2048, _zoo(245), _FUSED, "zoo", "bfloat16", parallel=_IN_TURN),
    Row(_QWEN, "h100", 256, (2, 32, 8, 4), 1, 2048, _zoo(276), _FUSED, "zoo", "bfloat16", parallel=_AT_ONCE),
    Row(_QWEN, "h100", 256, (2, 8, 1, 1), 4, 2048, _zoo(276), _EAGER, "zoo", "bfloat16",
        parallel={"recompute": "full", "sharding": "parameters", **_IN_TURN}),
    Row(_QWEN, "h100", 256, (2, 8, 32, 3), 1, 2048, _zoo(200), _EAGER, "zoo", "bfloat16", parallel=_IN_TURN),
    Row(_QWEN, "h100", 256, (4, 8, 8, 4), 1, 2048, _zoo(167), _EAGER, "zoo", "bfloat16", parallel=_IN_TURN),
    Row(_QWEN, "gb200", 256, (1, 8, 8, 1), 1, 8192, _zoo(750), _GRAPHS, "zoo", "bfloat16", parallel=_IN_TURN),
    Row(_V3, "h100", 1024, (2, 64, 8, 4), 1, 8192, 1297, _FUSED, "25.09",
        parallel={"recompute": "selective", **_AT_ONCE}),
    # 25.11
    Row("llama3-8b", "gb200", 8, (1, 1, 1, 1), 2, 128, 31508, _GRAPHS, "25.11", sequence_tokens=8192),
    Row("llama3-8b", "b200", 8, (1, 1, 1, 1), 2, 128, 30624, _GRAPHS, "25.11", sequence_tokens=8192),
    Row(_V3, "gb200", 256, (1, 64, 4, 4), 1, 4096, 3139, _GRAPHS, "25.11", "bfloat16",
        parallel=_IN_TURN),
    Row(_V3, "gb200", 256, (1, 32, 8, 4), 1, 4096, 4018, _GRAPHS, "25.11",
        parallel=_IN_TURN),
    Row(_V3_MTP, "b200", 256, (1, 8, 16, 1), 1, 2048, 2139, _FUSED, "25.11", parallel=_IN_TURN),
    Row(_GPT, "gb200", 64, (1, 64, 1, 1), 1, 1280, 15876, _GRAPHS, "25.11", "bfloat16", 8192, _IN_TURN),
    Row(_GPT, "b200", 64, (1, 8, 1, 1), 4, 512, 8213, _EAGER, "25.11", "bfloat16", parallel=_IN_TURN),
    Row(_GPT, "h100", 64, (1, 8, 4, 1), 4, 512, 5630, _EAGER, "25.11", "bfloat16", parallel=_IN_TURN),
    Row(_SMALL, "gb200", 8, (1, 8, 1, 1), 4, 512, 23766, _GRAPHS, "25.11", parallel=_IN_TURN),
    Row(_SMALL, "b200", 8, (1, 8, 1, 1), 1, 512, 9299, _EAGER, "25.11", parallel=_IN_TURN),
    Row(_SMALL, "h100", 16, (1, 8, 2, 24), 2, 512, 5275, _EAGER, "25.11", parallel=_IN_TURN),
    Row(_QWEN, "gb200", 256, (1, 32, 8, 3), 1, 8192, 4916, _GRAPHS, "25.11", "bfloat16", parallel=_IN_TURN),
    Row(_QWEN, "b200", 64, (1, 8, 8, 2), 1, 1024, 3269, _EAGER, "25.11", parallel=_IN_TURN),
    Row(_QWEN, "h100", 256, (2, 32, 8, 4), 1, 2048, 1575, _EAGER, "25.11", parallel=_AT_ONCE),
    Row("llama3-8b", "gb300", 8, (1, 1, 1, 1), 2, 128, 37556, _GRAPHS, "25.11", sequence_tokens=8192),
    Row(_V3, "gb300", 256, (1, 32, 2, 4), 1, 4096, 3848, _GRAPHS, "25.11", "bfloat16", parallel=_IN_TURN),
    Row(_V3, "gb300", 256, (1, 32, 2, 4), 1, 4096, 4357, _GRAPHS, "25.11", parallel=_IN_TURN),
    Row(_GPT, "gb300", 64, (1, 64, 1, 1), 2, 1280, 18347, _GRAPHS, "25.11", "bfloat16", 8192, _IN_TURN),
    Row(_SMALL, "gb300", 8, (1, 8, 1, 1), 4, 512, 28934, _GRAPHS, "25.11", parallel=_IN_TURN),
    Row(_QWEN, "gb300", 256, (1, 16, 4, 12), 2, 8192, 6131, _GRAPHS, "25.11", "bfloat16", parallel=_IN_TURN),
    # 26.02
    Row(_V3_MTP, "gb200", 256, (1, 64, 4, 4), 1, 4096, 3955, _GRAPHS, "26.02",
        parallel=_IN_TURN),
    Row(_V3_MTP, "b200", 256, (1, 8, 16, 1), 1, 4096, 2689, _FUSED, "26.02", parallel=_IN_TURN),
    Row(_GPT, "gb200", 64, (1, 64, 1, 1), 4, 1280, 15784, _GRAPHS, "26.02", "bfloat16", parallel=_IN_TURN),
    Row(_GPT, "b200", 64, (1, 64, 1, 1), 4, 1280, 8047, _EAGER, "26.02", "bfloat16", parallel=_IN_TURN),
    Row(_GPT, "h100", 64, (1, 8, 4, 1), 1, 1280, 5993, _EAGER, "26.02", "bfloat16", parallel=_IN_TURN),
    Row(_SMALL, "gb200", 8, (1, 8, 1, 1), 4, 512, 26084, _GRAPHS, "26.02", parallel=_IN_TURN),
    Row(_SMALL, "b200", 8, (1, 8, 1, 1), 1, 512, 9691, _EAGER, "26.02", parallel=_IN_TURN),
    Row(_SMALL, "h100", 16, (1, 8, 2, 12), 1, 1024, 5113, _EAGER, "26.02", parallel=_IN_TURN),
    Row(_QWEN, "gb200", 256, (1, 32, 8, 1), 1, 8192, 5448, _GRAPHS, "26.02", parallel=_IN_TURN),
    Row(_QWEN, "b200", 256, (1, 8, 8, 1), 1, 8192, 3805, _EAGER, "26.02", parallel=_IN_TURN),
    Row(_QWEN, "h100", 256, (2, 32, 8, 4), 1, 8192, 1633, _EAGER, "26.02", parallel=_AT_ONCE),
    Row(_V3_MTP, "b300", 256, (1, 8, 16, 1), 1, 4096, 2983, _FUSED, "26.02", parallel=_IN_TURN),
    Row(_GPT, "gb300", 64, (1, 64, 1, 1), 4, 1280, 19412, _GRAPHS, "26.02", "bfloat16", parallel=_IN_TURN),
    Row(_GPT, "b300", 64, (1, 64, 1, 1), 4, 1280, 8359, _EAGER, "26.02", "bfloat16", parallel=_IN_TURN),
    Row(_SMALL, "gb300", 8, (1, 8, 1, 1), 8, 512, 30376, _GRAPHS, "26.02", parallel=_IN_TURN),
    Row(_SMALL, "b300", 8, (1, 8, 1, 1), 8, 512, 29521, _GRAPHS, "26.02", parallel=_IN_TURN),
    Row(_QWEN, "gb300", 256, (1, 32, 4, 1), 2, 8192, 6583, _GRAPHS, "26.02", parallel=_IN_TURN),
    Row(_QWEN, "b300", 256, (1, 8, 8, 4), 1, 8192, 2691, _EAGER, "26.02", parallel=_IN_TURN),
    Row("llama3-405b", "h100", 1024, (8, 1, 8, 8), 1, 1536, 311, _EAGER, "26.02", sequence_tokens=8192,
        parallel={"context": 2}),
    # 26.04
    Row("llama3-70b", "gb300", 64, (1, 1, 4, 5), 1, 256, 4742, _EAGER, "26.04", sequence_tokens=8192),
    Row("llama3-70b", "gb200", 64, (2, 1, 4, 5), 1, 256, 3828, _EAGER, "26.04", sequence_tokens=8192),
    Row("llama3-70b", "h100", 64, (4, 1, 8, 5), 1, 256, 1633, _EAGER, "26.04", sequence_tokens=8192),
    Row("llama3-405b", "gb300", 256, (2, 1, 8, 4), 1, 1536, 968, _EAGER, "26.04", sequence_tokens=8192,
        parallel={"context": 2}),
    Row("llama3-405b", "gb200", 256, (4, 1, 16, 8), 1, 1536, 793, _EAGER, "26.04", sequence_tokens=8192),
    Row("llama3-405b", "gb300", 256, (4, 1, 8, 4), 1, 1536, 1036, _EAGER, "26.04", sequence_tokens=8192),
    Row("llama3-405b", "gb200", 256, (4, 1, 16, 4), 1, 1536, 842, _EAGER, "26.04", sequence_tokens=8192),
    Row(_V3_MTP, "gb300", 256, (1, 32, 2, 8), 2, 4096, 4965, _GRAPHS, "26.04",
        parallel=_IN_TURN),
    Row(_V3_MTP, "gb200", 256, (1, 64, 4, 4), 1, 4096, 4193, _GRAPHS, "26.04",
        parallel=_IN_TURN),
    Row(_V3_MTP, "b300", 256, (1, 8, 16, 1), 1, 4096, 3131, _FUSED, "26.04", parallel=_IN_TURN),
    Row(_V3_MTP, "b200", 256, (1, 8, 16, 1), 1, 4096, 2815, _FUSED, "26.04", parallel=_IN_TURN),
    Row(_V3_MTP, "b200", 256, (1, 32, 8, 2), 1, 4096, 3323, _GRAPHS, "26.04", parallel=_AT_ONCE),
    Row(_GPT, "gb300", 64, (1, 64, 1, 1), 4, 1280, 19275, _GRAPHS, "26.04", "bfloat16", parallel=_IN_TURN),
    Row(_GPT, "gb200", 64, (1, 64, 1, 1), 4, 1280, 15938, _GRAPHS, "26.04", "bfloat16", parallel=_IN_TURN),
    Row(_GPT, "b300", 64, (1, 8, 1, 1), 4, 1280, 15114, _GRAPHS, "26.04", "bfloat16", parallel=_IN_TURN),
    Row(_GPT, "b200", 64, (1, 8, 1, 1), 4, 1280, 13045, _EAGER, "26.04", "bfloat16", parallel=_IN_TURN),
    Row(_GPT, "h100", 64, (1, 8, 4, 1), 1, 1280, 5810, _EAGER, "26.04", "bfloat16", parallel=_IN_TURN),
    Row(_SMALL, "gb300", 8, (1, 8, 1, 1), 8, 512, 31470, _GRAPHS, "26.04", parallel=_IN_TURN),
    Row(_SMALL, "gb200", 8, (1, 8, 1, 1), 4, 512, 26032, _GRAPHS, "26.04", parallel=_IN_TURN),
    Row(_SMALL, "b300", 8, (1, 8, 1, 1), 8, 512, 30553, _GRAPHS, "26.04", parallel=_IN_TURN),
    Row(_SMALL, "b200", 8, (1, 8, 1, 1), 4, 512, 26859, _GRAPHS, "26.04", parallel=_IN_TURN),
    Row(_SMALL, "h100", 16, (1, 16, 1, 1), 1, 1024, 8901, _FUSED, "26.04", parallel=_IN_TURN),
    Row(_QWEN, "gb300", 256, (1, 32, 4, 12), 2, 8192, 6994, _GRAPHS, "26.04", parallel=_IN_TURN),
    Row(_QWEN, "gb200", 256, (1, 32, 8, 3), 1, 8192, 5672, _GRAPHS, "26.04", parallel=_IN_TURN),
    Row(_QWEN, "b300", 256, (1, 8, 8, 1), 2, 8192, 4865, _EAGER, "26.04", parallel=_IN_TURN),
    Row(_QWEN, "h100", 256, (2, 32, 8, 4), 1, 8192, 1686, _EAGER, "26.04", parallel=_AT_ONCE),
)  # fmt: skip
