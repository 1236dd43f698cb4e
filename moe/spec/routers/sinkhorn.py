"""Balanced assignment by Sinkhorn normalization (BASE layers, arXiv 2103.16716)."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from moe.spec.base import Count
from moe.spec.errors import Problem
from moe.spec.routers.router import TokenChoiceSpec, TopK, too_many_choices


class SinkhornTopKSpec(TokenChoiceSpec):
    """Balanced assignment by Sinkhorn normalization, as in BASE layers (arXiv 2103.16716) and Megatron-LM."""

    router: Literal["sinkhorn_topk"] = "sinkhorn_topk"
    top_k: TopK = 2
    sinkhorn_iterations: Count = Field(default=8, le=1000)
    """Rounds of normalization over tokens and experts; a fixed number, so that token groups do not affect each
    other."""

    def experts_per_token(self, num_experts: int) -> int:
        return self.top_k

    def problems(self, num_experts: int) -> Iterator[Problem]:
        return too_many_choices(self.top_k, num_experts)
