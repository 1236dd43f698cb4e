"""DeepSeek-V3's routing (arXiv 2412.19437, section 2.1.2)."""

from typing import Literal

from moe.spec.base import Positive
from moe.spec.routers.router import AuxCoefficient, BiasUpdateRate, GatedTopKSpec


class SigmoidTopKSpec(GatedTopKSpec):
    """DeepSeek-V3's top-k routing by sigmoid (arXiv 2412.19437)."""

    router: Literal["sigmoid_topk"] = "sigmoid_topk"
    aux_coefficient: AuxCoefficient = 0.0
    bias_update_rate: BiasUpdateRate = 0.001
    renormalize_eps: Positive = 1e-20
    """Epsilon added to the sum that a token's weights are divided by."""
