"""Steps measured on a GPU, ours and another eager trainer's, compared with the predictions of plans.

benchmarks/results/decoder_step_gpu.json has the measurements: one NVIDIA H200, Qwen3-30B-A3B's shape cut to four
layers, two rows of 4,096 tokens a micro-batch, float32 weights with bfloat16 arithmetic, AdamW, clipping. The constants
of `ours-eager` come from the kernels of the first step; the second, of four micro-batches, was not used for them.

OLMoE-1B-7B was trained by OLMo, whose blocks are eager PyTorch under FSDP too, with MegaBlocks' experts, at 23,600
tokens per second and GPU (arXiv 2409.02060, section 4.1). Its layout is that of allenai/OLMoE's
configs/olmoe-8x1b-newhp-newds-cx5-fine1-normreorder.yml: 1,024 sequences of 4,096 tokens, over the paper's 256 H100
four on each, all parameters sharded, without compilation or recomputation. Nothing was fitted on it.
"""

from dataclasses import dataclass
from math import exp, log

from moe.plan import Cluster, Plan, plan_job
from moe.spec import JobSpec

ROWS_PER_MICRO_BATCH, SEQUENCE_TOKENS = 2, 4096


@dataclass(frozen=True)
class MeasuredStep:
    """A step: milliseconds, and peak GiB allocated by torch."""

    num_micro_batches: int
    measured_ms: float
    measured_gib: float

    def plan(self) -> Plan:
        """Plan of the measured layout on one H200."""
        batch_tokens = self.num_micro_batches * ROWS_PER_MICRO_BATCH * SEQUENCE_TOKENS
        spec = JobSpec.parse(
            {
                "model": {"preset": "qwen3-30b-a3b", "num_layers": 4, "vocab_size": 32_768},
                "data": {"corpus": "synthetic", "max_tokens": SEQUENCE_TOKENS},
                "train": {"num_steps": 1, "batch_tokens": batch_tokens, "dtype": "bfloat16"},
                "resources": {"num_workers": 1},
                "parallel": {"micro_batch_groups": ROWS_PER_MICRO_BATCH, "recompute": "none"},
            }
        )
        return plan_job(spec, Cluster(num_nodes=1, devices_per_node=1, device="h200"), load_skew=1.0)

    def error(self) -> float:
        """ln(predicted / measured) of its step."""
        return log(1000 * self.plan().predicted.step_s / self.measured_ms)


STEPS = (MeasuredStep(1, 115.8, 48.7), MeasuredStep(4, 361.5, 49.2))
OLMOE_STEP_S = 1024 * 4096 / 256 / 23_600


def olmoe_plan() -> Plan:
    """Plan of OLMoE's layout with our software."""
    spec = JobSpec.parse(
        {
            "model": {"preset": "olmoe-1b-7b"},
            "data": {"corpus": "synthetic", "max_tokens": 4096},
            "train": {"num_steps": 1, "batch_tokens": 1024 * 4096, "dtype": "bfloat16"},
            "resources": {"num_workers": 256},
            "parallel": {"sharding": "parameters", "tensor": 1, "context": 1, "pipeline": 1, "expert": 1,
                         "fsdp": 256, "micro_batch_groups": 4, "recompute": "none"},
        }
    )  # fmt: skip
    return plan_job(spec, Cluster(num_nodes=32, devices_per_node=8, device="h100"), load_skew=1.0)


def table() -> list[str]:
    """Time and memory of each step."""
    lines = ["| Micro-batches | measured ms | predicted (bounds) | error | measured GiB | predicted | error |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for step in STEPS:
        plan, error = step.plan(), step.error()
        assert plan.ends_s is not None
        fastest_ms, slowest_ms = (1000 * seconds for seconds in plan.ends_s)
        gib = plan.memory.job_bytes / 2**30
        lines.append(
            f"| {step.num_micro_batches} | {step.measured_ms:.1f} | {1000 * plan.predicted.step_s:.1f} "
            f"({fastest_ms:.0f} to {slowest_ms:.0f}) | {exp(error) - 1:+.0%} | {step.measured_gib:.1f} | {gib:.1f} | "
            f"{gib / step.measured_gib - 1:+.0%} |"
        )
    plan = olmoe_plan()
    assert plan.ends_s is not None
    step_s = plan.predicted.step_s
    olmoe = (
        f"OLMoE-1B-7B on 256 H100, by OLMo's eager code (not used in the fit): published {OLMOE_STEP_S:.2f} s a step, "
        f"predicted {step_s:.2f} ({plan.ends_s[0]:.2f} to {plan.ends_s[1]:.2f}), {step_s / OLMOE_STEP_S - 1:+.0%}."
    )
    return [*lines, "", olmoe]
