"""The exchange between context ranks that plans choose, what it moves and the memory that it takes."""

from typing import Any

import pytest

from moe.plan import Cluster, plan_job
from moe.plan.cost.context_exchange import kept_elements, received_elements
from moe.spec import JobSpec
from moe.spec.block import AttentionDims
from moe.spec.parallel import ContextExchange

GQA: dict[str, Any] = {"kind": "grouped_query", "num_heads": 16, "num_kv_heads": 4, "head_dim": 128}
MLA: dict[str, Any] = {"kind": "latent", "num_heads": 16, "key_value_rank": 512, "head_dim": 128, "rope_dim": 64,
                       "value_dim": 128}  # fmt: skip
SPARSE = {**MLA, "query_rank": 64, "indexer": {"num_heads": 4, "head_dim": 64, "top_k": 256}}
CLUSTER = Cluster(num_nodes=2, devices_per_node=8, device="h100")


def job(attention: dict[str, Any], max_tokens: int = 32_768, **parallel: Any) -> JobSpec:
    return JobSpec.parse({
        "name": "long",
        "model": {"kind": "language", "model_dim": 2048, "num_layers": 2, "ffn_dim": 4096, "vocab_size": 32_000,
                  "attention": attention},
        "data": {"corpus": "packages", "max_tokens": max_tokens},
        "train": {"num_steps": 10, "batch_tokens": 16 * max_tokens, "dtype": "bfloat16"},
        "parallel": parallel,
    })  # fmt: skip


def dims_of(attention: dict[str, Any]) -> AttentionDims:
    (dims,) = {dims for _, block in job(attention).model.blocks() for dims in block.attentions}
    return dims


@pytest.mark.parametrize(("attention", "exchange"), [(GQA, "ring"), (SPARSE, "gather")], ids=["GQA", "DSA"])
def test_a_ring_behind_attention_is_chosen_unless_an_indexer_needs_all_keys(
    attention: dict[str, Any], exchange: str
) -> None:
    assert plan_job(job(attention, context=8), CLUSTER, 16, top=1).options.context_exchange == exchange


def test_what_is_gathered_is_kept() -> None:
    keys = 4 * 2 * 128
    assert kept_elements(dims_of(GQA), "gather", 4, 2) == 3 * keys / 2
    assert kept_elements(dims_of(MLA), "gather", 4, 2) == 3 * (16 * (192 + 128) / 2 + 512 + 64)
    assert kept_elements(dims_of(GQA), "ring", 4, 2) == 0
    assert kept_elements(dims_of(GQA), "heads", 2, 2) == 0  # a head of keys for each rank
    assert kept_elements(dims_of(GQA), "heads", 4, 2) == keys / 2  # one for two ranks


def test_latents_are_gathered_once_for_all_heads() -> None:
    elements = received_elements(dims_of(MLA), "gather", 100, 4, 2, 32_768)
    assert elements == (3 * 100 * (512 + 64),) * 2


@pytest.mark.parametrize("exchange", ["ring", "heads"])
def test_an_indexer_s_keys_are_gathered_under_any_exchange(exchange: ContextExchange) -> None:
    expected = received_elements(dims_of(SPARSE), "gather", 100, 4, 1, 32_768)
    assert received_elements(dims_of(SPARSE), exchange, 100, 4, 1, 32_768) == expected
