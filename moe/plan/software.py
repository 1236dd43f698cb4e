"""Training software: host time, and the share of kernel rates that a step sustains."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from moe.plan.profile import ProfileName
from moe.spec.errors import spec_error

SoftwareName = Literal[
    "ours-eager", "ours-compiled", "ours-fused", "megatron-plain", "megatron-eager", "megatron-deepep",
    "megatron-graphs", "megatron-26.06", "torchtitan",
]  # fmt: skip


@dataclass(frozen=True)
class Host:
    """Host constants: the least certain ones, which trade off in a fit."""

    layer_s: float
    """Device idle seconds per layer, forward and backward."""
    expert_s: float
    """The same per local expert of a layer, for products launched one by one."""
    run_s: float
    """The same per virtual pipeline stage and micro-batch, waiting for its neighbours."""
    sustained: float
    """Share of isolated kernel rates reached in a step."""


@dataclass(frozen=True)
class Elementwise:
    """Elementwise kernels with little fusion: norms, RoPE and activations in float32."""

    share: float
    """Share of memory bandwidth."""
    passes: float
    """Reads and writes, relative to fused kernels."""
    normed_passes: float
    """The same for queries, keys and values with QK norms."""


FUSED = Elementwise(share=1.0, passes=1.0, normed_passes=1.0)
"""Fused kernels, which sustain the same share as all others."""


@dataclass(frozen=True)
class Overlap:
    """Shares of communication that overlap with computation, if there is enough."""

    gathers: float
    exchanges: float
    """All-to-alls, behind the computation of other rows."""
    tensor: float = 0.0
    """Gathers and scatters of tensor and context ranks, behind the products that need them."""


@dataclass(frozen=True)
class Software:
    """Constants of one training software."""

    name: SoftwareName
    host: Host
    ends: tuple[Host, Host]
    """Least and most host time that the published runs allow."""
    overlap: float
    """Overlapped share of all-gathers and reductions, if there is enough computation."""
    exchange_overlap: float
    """The same of all-to-alls, behind the computation of other rows."""
    tensor_overlap: float = 0.0
    """The same of gathers and scatters of tensor and context ranks, behind the products that need them."""
    bias_passes: float = 0.0
    """Passes over hidden states of experts with biases, forward and backward, for adding and clamping."""
    is_fused: bool = False
    """Whether a fused kernel sends a row once to each node and rank (DeepEP, HybridEP)."""
    attention_share: float = 1.0
    """Rate of its attention kernels, relative to the measured ones."""
    exchange_rate: float = 1.0
    """Rate of its fused dispatch within an NVLink domain, relative to the measured one."""
    elementwise: Elementwise = FUSED
    weight_passes: Literal["separate", "fused"] | None = None
    """Kernels that cast weights, cast gradients to float32 and clip them: `separate` ones; or `fused`, where experts'
    kernels write float32 gradients, and the optimizer's clips them and casts weights. None: not counted."""
    sustained_on: tuple[tuple[str, float], ...] = ()
    """Sustained share by device type, where measured, in place of the host's."""
    fitted_on: tuple[str, ...] = ()
    """Device types of its fit; empty if many."""
    error: float | None = None
    """Mean |ln(predicted / published)| of a step, each model on each device left out of its own fit; None without
    such runs."""
    overlaps: tuple[Overlap, Overlap] | None = None
    """Least and most overlap; None if known."""

    def for_device(self, device: str) -> "Software":
        """Return the software with the share measured on this device type, if any."""
        if (share := dict(self.sustained_on).get(device)) is None:
            return self
        first, second = (replace(host, sustained=share) for host in self.ends)
        return replace(self, host=replace(self.host, sustained=share), ends=(first, second))

    @property
    def extremes(self) -> tuple["Software", ...]:
        """Ends of the spread: least host time with most overlap, most host time with least. Empty if they are equal."""
        if self.ends[0] == self.ends[1] and self.overlaps is None:
            return ()
        usual = Overlap(self.overlap, self.exchange_overlap, self.tensor_overlap)
        lower, upper = self.overlaps or (usual, usual)
        return tuple(
            replace(
                self,
                host=host,
                overlap=overlap.gathers,
                exchange_overlap=overlap.exchanges,
                tensor_overlap=overlap.tensor,
            )
            for host, overlap in zip(self.ends, (upper, lower), strict=True)
        )


# Fitted by `python -m benchmarks.software_profiles` to the runs of benchmarks/published_rows.py, `megatron-plain` to
# those of benchmarks/published_cut_down.py; docs/planner.md has the errors. Tuned runs sustain the full rates of
# isolated kernels, so that only the host time is fitted. Its ends are those of the fits with one model on one device
# left out. `megatron-26.06`, current releases on NVL72 domains, is fitted by `python -m benchmarks.published_current`,
# and `torchtitan` by `python -m benchmarks.published_torchtitan`; their errors are of held-out runs.
# `overlap`: from runs of Qwen3-235B with FSDP and pipelines. `exchange_overlap`: from the only pair of published runs
# that differ in nothing else.
# `overlaps`: for all-to-all, published runs with overlap imply 0.1 (DeepSeek-V3 on H100) to 0.9 (on B200); the share of
# gathers rests on one run, and its ends are assumed.
# `megatron-plain`: the sustained share is the ratio of that machine's kernels to the measured ones. SimuMax measured
# its kernels on B200 and A100 (configs/system of its repository; benchmarks/published_kernels.py): 0.66 in large
# products on B200, the share that the fit of steps finds too, and 0.92 on A100. Other devices are assumed in between.
# 0.92 on A100 also predicts held-out FSDP runs of dense models there (benchmarks/published_mpt.py); with torchtitan's
# 0.77, fitted on H100, the predictions are a fifth too slow.
# Ours was measured on one H200 (benchmarks/results/decoder_step_gpu.json): 0.88 is the time of isolated kernels over
# that of products, attention and AdamW in the step; the device waited 10 ms for the host in 4 layers. `elementwise`:
# multiples counted from real passes (tests/unit/test_counted_elementwise.py); these bytes, with those of gradients and
# of the loss, some 72 GB, took 39 ms. `ours-compiled` is an assumption: fused elementwise kernels, half the host time.
# The ends are those of Megatron-Core, tuned and untuned. `ours-fused` is an assumption too: the kernels of moe.kernels
# at the memory rate measured for eager code, with no host wait in a layer. Its elementwise bytes are counted; products
# of experts are priced as without gathering, and permutation is still charged.
_EAGER = Host(0.0, 3.58e-4, 2.08e-3, 1.0)
_FUSED = Host(2.52e-3, 1.43e-4, 0.0, 1.0)
_GRAPHS = Host(3.96e-4, 0.0, 0.0, 1.0)
_PLAIN = Host(2.83e-4, 9.1e-5, 0.0, 0.77)
_PLAIN_ENDS = (replace(_PLAIN, sustained=0.92), replace(_PLAIN, sustained=0.66))
_A100_SUSTAINED = (("a100-80", 0.92), ("a100-40", 0.92))
_PLAIN_SUSTAINED = (("b200", 0.66), *_A100_SUSTAINED)
_OURS_EAGER_HOST = Host(2.5e-3, 0.0, 0.0, 0.88)
_OURS = (Host(5.0e-4, 0.0, 0.0, 1.0), Host(5.0e-3, 0.0, 2.0e-3, 0.66))
_TUNED: dict[str, Any] = {
    "overlap": 0.95,
    "exchange_overlap": 0.33,
    "tensor_overlap": 0.95,
    "bias_passes": 70.0,
    "overlaps": (Overlap(0.7, 0.1, 0.7), Overlap(1.0, 0.9, 1.0)),
}
_OURS_OVERLAPS = (Overlap(0.5, 0.0), Overlap(1.0, 0.9))
SOFTWARE: Mapping[SoftwareName, Software] = {
    software.name: software
    for software in (
        Software("ours-eager", _OURS_EAGER_HOST, _OURS, overlap=0.95, exchange_overlap=0.33,
                 overlaps=_OURS_OVERLAPS, weight_passes="separate", fitted_on=("h200",),
                 elementwise=Elementwise(share=0.45, passes=2.7, normed_passes=6.5)),
        Software("ours-compiled", Host(1.25e-3, 0.0, 0.0, 0.88), _OURS, overlap=0.95, exchange_overlap=0.33,
                 overlaps=_OURS_OVERLAPS, weight_passes="separate"),
        Software("ours-fused", Host(5.0e-4, 0.0, 0.0, 0.88), (Host(0.0, 0.0, 0.0, 1.0), _OURS_EAGER_HOST), overlap=0.95,
                 exchange_overlap=0.33, overlaps=_OURS_OVERLAPS, weight_passes="fused",
                 elementwise=Elementwise(share=0.45, passes=0.785, normed_passes=1.25)),
        Software("megatron-plain", _PLAIN, _PLAIN_ENDS, overlap=0.0, exchange_overlap=0.0,
                 sustained_on=_PLAIN_SUSTAINED, fitted_on=("b200",), error=0.06),
        Software("megatron-eager", _EAGER, (Host(0.0, 3.47e-4, 1.39e-3, 1.0), Host(0.0, 3.69e-4, 3.04e-3, 1.0)),
                 **_TUNED, error=0.12),
        Software("megatron-deepep", _FUSED, (Host(7.7e-4, 1.63e-4, 4.65e-3, 1.0), Host(2.96e-3, 1.06e-4, 3.04e-3, 1.0)),
                 **_TUNED, is_fused=True, error=0.10),
        Software("megatron-graphs", _GRAPHS, (Host(2.52e-4, 0.0, 0.0, 1.0), Host(4.45e-4, 7.7e-6, 0.0, 1.0)),
                 **_TUNED, is_fused=True, error=0.08),
        Software("megatron-26.06", Host(6.55e-4, 0.0, 0.0, 1.0),
                 (Host(0.0, 0.0, 0.0, 1.0), Host(9.3e-4, 0.0, 0.0, 1.0)),
                 **{**_TUNED, "bias_passes": 38.5}, is_fused=True, exchange_rate=6.2,
                 fitted_on=("gb200", "gb300"), error=0.09),
        Software("torchtitan", Host(0.0, 0.0, 0.0, 0.77), (Host(0.0, 0.0, 0.0, 0.80), Host(0.0, 0.0, 0.0, 0.69)),
                 **_TUNED, attention_share=0.68, sustained_on=_A100_SUSTAINED,
                 fitted_on=("h100", "h200"), error=0.17),
    )
}  # fmt: skip


_DEFAULT_SOFTWARE: Mapping[ProfileName, SoftwareName] = {
    "ours": "ours-eager", "peer": "megatron-eager", "torchtitan": "torchtitan",
    "torchtitan-25.06": "torchtitan",
}  # fmt: skip


def find_software(name: SoftwareName | None, profile: ProfileName, layer_s: float | None, device: str = "") -> Software:
    """Software by name, by default the executor's, on a device type. `layer_s`: host time measured with the device
    by our executor; any other name than `ours-eager` then raises SpecError."""
    if layer_s is not None:
        if name not in (None, "ours-eager"):
            raise spec_error("not_applicable", "software", name,
                             "does not apply to devices whose host times were measured",
                             "omit it, or plan for GPUs")  # fmt: skip
        host = Host(layer_s, 0.0, 0.0, 1.0)
        return Software("ours-eager", host, (host, host), overlap=0.0, exchange_overlap=0.0)
    return SOFTWARE[name or _DEFAULT_SOFTWARE[profile]].for_device(device)
