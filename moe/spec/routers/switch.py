"""Switch Transformer's top-1 routing (arXiv 2101.03961)."""

from typing import Literal

from moe.spec.routers.router import BalancedSpec, CapacityFactor


class SwitchTop1Spec(BalancedSpec):
    """Switch Transformer's top-1 routing (arXiv 2101.03961)."""

    router: Literal["switch_top1"] = "switch_top1"
    capacity_factor: CapacityFactor = 1.25

    def experts_per_token(self, num_experts: int) -> int:
        return 1
