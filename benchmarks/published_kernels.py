"""Products as SimuMax measured them on the machines of its published steps, compared with the kernels of plans.

Its system files (configs/system/b200_bf16_ceperm.json and a100_pcie.json of its repository) give each product's share
of 2,250 and 312 TFLOP/s, in bfloat16, with gradients of weights accumulated in float32. Their share of the kernels of
plans is what `megatron-plain` sustains on that device: `sustained_on` in moe/plan/software.py. The A100 is the PCIe
card, with the same peak; for its steps SimuMax published only the error of its own simulation with these kernels, -4%
to +4% (docs/FULL_RESULTS.md).
"""

from dataclasses import dataclass
from math import exp, log
from statistics import fmean

from moe.plan import DEVICES
from moe.plan.software import SOFTWARE


@dataclass(frozen=True)
class Product:
    """Rows, inputs and outputs of a product, and its share of the peak on B200 and on A100."""

    rows: int
    inputs: int
    outputs: int
    b200: float
    a100: float

    def share_of_kernel(self, device: str) -> float:
        """Measured rate as a share of the rate in plans."""
        peak = DEVICES[device].peak_flops_per_s["bfloat16"]
        seconds = DEVICES[device].kernels.products["bfloat16"].seconds(self.rows, self.inputs, self.outputs)
        predicted_share = 2 * self.rows * self.inputs * self.outputs / seconds / peak
        return (self.b200 if device == "b200" else self.a100) / predicted_share


PRODUCTS = (
    Product(4096, 8192, 8192, 0.4625, 0.7327), Product(8192, 4096, 8192, 0.4789, 0.7137),
    Product(4096, 8192, 57_344, 0.4867, 0.7528), Product(4096, 57_344, 8192, 0.4829, 0.7549),
    Product(57_344, 4096, 8192, 0.4536, 0.7100), Product(4096, 28_672, 8192, 0.4847, 0.7411),
    Product(4096, 8192, 28_672, 0.4742, 0.7565), Product(8192, 4096, 28_672, 0.4594, 0.7116),
    Product(4096, 14_336, 8192, 0.4763, 0.7423), Product(14_336, 4096, 8192, 0.4756, 0.7068),
    Product(4096, 8192, 128_256, 0.4874, 0.7446), Product(128_256, 4096, 8192, 0.4548, 0.7081),
)  # fmt: skip
"""Llama 70B's products, forward and both gradients: most of its step."""


def share_of(device: str) -> float:
    """Geometric mean of the products' shares."""
    return exp(fmean(log(product.share_of_kernel(device)) for product in PRODUCTS))


def table() -> list[str]:
    """Shares on each device, and the sustained share in plans."""
    plain = SOFTWARE["megatron-plain"]
    lines = [
        "| Device | matrix products, relative to the measured kernels | worst, best | sustained in plans |",
        "|---|---|---|---|",
    ]
    for device in ("b200", "a100-80"):
        shares = [product.share_of_kernel(device) for product in PRODUCTS]
        lines.append(f"| {device} | {share_of(device):.2f} | {min(shares):.2f}, {max(shares):.2f} | "
                     f"{plain.for_device(device).host.sustained:.2f} |")  # fmt: skip
    return lines
