"""Decoder-only language models: attention variants and the stack of layers."""

from moe.spec.language.attention import AttentionSpec, GroupedQueryAttentionSpec, LatentAttentionSpec
from moe.spec.language.indexer import IndexerSpec
from moe.spec.language.linear import LinearAttentionSpec
from moe.spec.language.model import LanguageModelSpec
from moe.spec.rope import RopeSpec

__all__ = [
    "AttentionSpec", "GroupedQueryAttentionSpec", "IndexerSpec", "LanguageModelSpec", "LatentAttentionSpec",
    "LinearAttentionSpec", "RopeSpec",
]  # fmt: skip
