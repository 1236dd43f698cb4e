"""Decoder-only language models: attention variants and the stack of layers."""

from moe.spec.language.attention import AttentionSpec, GroupedQueryAttentionSpec, LatentAttentionSpec, QueryScaling
from moe.spec.language.gated_delta_net import GatedDeltaNetSpec
from moe.spec.language.indexer import IndexerSpec
from moe.spec.language.linear import LinearAttentionSpec
from moe.spec.language.mamba2 import Mamba2Spec
from moe.spec.language.model import LanguageModelSpec
from moe.spec.language.short_convolution import ShortConvolutionSpec
from moe.spec.rope import RopeSpec

__all__ = [
    "AttentionSpec", "GatedDeltaNetSpec", "GroupedQueryAttentionSpec", "IndexerSpec", "LanguageModelSpec",
    "LatentAttentionSpec", "LinearAttentionSpec", "Mamba2Spec", "QueryScaling", "RopeSpec", "ShortConvolutionSpec",
]  # fmt: skip
