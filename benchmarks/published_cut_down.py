"""Models with fewer layers on eight B200: memory and time of a step, as SimuMax measured them with Megatron-Core.

SimuMax's table of its release 1.2 (docs/b200 of its repository): bfloat16 with float32 gradients, one sequence of 4,096
tokens at a time, no recomputation, optimizer states sharded over data ranks, sequence parallelism, fused
cross-entropy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.published_rows import llama
from moe.plan import Cluster, Degrees, LayoutSearch
from moe.plan.candidate import Candidate, Options
from moe.spec import JobSpec

SEQUENCE_TOKENS = 4096


def _deepseek(
    model_dim: int, ffn_dim: int, vocab_size: int, num_experts: int, hidden_dim: int, shared_dim: int, top_k: int
) -> dict[str, Any]:
    return {
        "kind": "language", "model_dim": model_dim, "num_layers": 4, "first_dense_layers": 1, "ffn_dim": ffn_dim,
        "vocab_size": vocab_size,
        "attention": {"kind": "latent", "num_heads": 128, "query_rank": 1536, "key_value_rank": 512, "head_dim": 128,
                      "rope_dim": 64, "value_dim": 128},
        "moe": {"router": "softmax_topk", "top_k": top_k, "num_experts": num_experts, "hidden_dim": hidden_dim,
                "activation": "swiglu", "shared_hidden_dim": shared_dim, "group_tokens": SEQUENCE_TOKENS},
    }  # fmt: skip


CUT_DOWN: dict[str, dict[str, Any]] = {
    "llama3-70b, 12 layers": llama(8192, 12, 28_672, 64),
    "llama3-405b, 4 layers": llama(16_384, 4, 53_248, 128),
    "deepseek-v2, 4 layers": _deepseek(5120, 12_288, 102_400, 160, 1536, 3072, 6),
    "deepseek-v3, 4 layers": _deepseek(7168, 18_432, 129_280, 256, 2048, 2048, 8),
}


@dataclass(frozen=True)
class CutDown:
    """One layout: peak memory that torch allocated on any rank, and milliseconds of a step by number of
    micro-batches."""

    model: str
    degrees: Degrees
    measured_gib: float
    measured_ms: Mapping[int, float]

    @property
    def name(self) -> str:
        return f"{self.model}, {self.degrees.tensor}·{self.degrees.expert}·{self.degrees.pipeline}"

    def search(self, num_micro_batches: int) -> tuple[LayoutSearch, Candidate]:
        """(search of its job, its layout) with a number of micro-batches per step."""
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
        options = Options(num_micro_batches=num_micro_batches, sharding="optimizer")
        search = LayoutSearch(spec, cluster, load_skew=1.0, profile="peer", software="megatron-plain")
        return search, Candidate(self.degrees, options)

    @property
    def predicted_gib(self) -> float:
        """Predicted GiB without the allowance for the framework and fragmentation."""
        search, candidate = self.search(4)
        memory = search.memory.estimate(candidate)
        return (memory.total - memory.allowance) / 2**30

    def predicted_ms(self, num_micro_batches: int) -> float:
        search, candidate = self.search(num_micro_batches)
        return 1000 * search.time.step_s(candidate)


def _over_tensor_ranks(model: str, *measurements: tuple[float, float, float, float]) -> list[CutDown]:
    """Layouts with 1 (in two stages), 2, 4 and 8 tensor ranks: GiB, and milliseconds with 4, 8 and 32 micro-batches."""
    layouts = [Degrees(data=4, fsdp=4, pipeline=2)]
    layouts += [Degrees(data=8, tensor=tensor, fsdp=8 // tensor) for tensor in (2, 4, 8)]
    return [
        CutDown(model, degrees, gib, dict(zip((4, 8, 32), ms, strict=True)))
        for degrees, (gib, *ms) in zip(layouts, measurements, strict=True)
    ]


def _over_expert_ranks(model: str, *measurements: tuple[float, float, float, float]) -> list[CutDown]:
    """Layouts with one stage and with two."""
    layouts = (Degrees(expert=8, data=1, fsdp=8), Degrees(expert=4, data=1, fsdp=4, pipeline=2))
    return [
        CutDown(model, degrees, gib, dict(zip((4, 8, 32), ms, strict=True)))
        for degrees, (gib, *ms) in zip(layouts, measurements, strict=True)
    ]


MEASURED = (
    *_over_tensor_ranks("llama3-70b, 12 layers", (66.55, 843.0, 1476.8, 5436.5), (60.68, 725.5, 1387.0, 5376.5),
                        (39.07, 409.8, 765.6, 2964.6), (28.29, 280.9, 556.7, 2073.7)),
    *_over_tensor_ranks("llama3-405b, 4 layers", (87.08, 1074.6, 1935.4, 7046.4), (81.59, 907.3, 1716.8, 6604.1),
                        (52.89, 476.0, 899.6, 3455.4), (38.57, 258.8, 488.1, 1901.8)),
    *_over_expert_ranks("deepseek-v2, 4 layers", (45.63, 366.6, 676.2, 2721.3), (44.70, 282.1, 492.6, 1727.7)),
    *_over_expert_ranks("deepseek-v3, 4 layers", (104.30, 603.2, 1101.7, 4141.2), (114.00, 452.2, 771.6, 2718.6)),
)  # fmt: skip


def table() -> list[str]:
    """Memory, and steps of 4, 8 and 32 micro-batches."""
    lines = ["| Model, TP·EP·PP | measured GiB | predicted | error | measured ms (4, 8, 32) | predicted | errors |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in MEASURED:
        gib = row.predicted_gib
        predicted_ms = {times: row.predicted_ms(times) for times in row.measured_ms}
        lines.append(
            f"| {row.name} | {row.measured_gib:.1f} | {gib:.1f} | {gib / row.measured_gib - 1:+.1%} | "
            f"{', '.join(f'{ms:,.0f}' for ms in row.measured_ms.values())} | "
            f"{', '.join(f'{ms:,.0f}' for ms in predicted_ms.values())} | "
            f"{', '.join(f'{predicted_ms[times] / ms - 1:+.0%}' for times, ms in row.measured_ms.items())} |"
        )
    return lines
