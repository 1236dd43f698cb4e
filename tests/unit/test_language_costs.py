"""Costs of language models as our modules run them, beside small cases that were counted by hand."""

from typing import Any

import pytest

from moe.plan import Cluster, Degrees, LayoutSearch, Link
from moe.plan.candidate import Candidate, Options
from moe.plan.cost.flops import attended_positions, model_flops_per_step, pairs_flops
from moe.plan.cost.layer_bytes import attention_workspace_bytes, saved_attention_bytes
from moe.plan.cost.state import state_of
from moe.plan.cost.units import units
from moe.plan.profile import OURS, PEER, Profile
from moe.spec import AdafactorSpec, AdamWSpec, JobSpec
from moe.spec.block import AttentionDims
from moe.spec.patterns import matches

GROUPED = {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
LATENT = {"kind": "latent", "num_heads": 4, "query_rank": 12, "key_value_rank": 10, "head_dim": 8, "rope_dim": 4,
          "value_dim": 6}  # fmt: skip
STATES = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 6}
EXPERTS = {"router": "softmax_topk", "top_k": 2, "num_experts": 4, "hidden_dim": 24, "activation": "swiglu",
           "group_tokens": 256}  # fmt: skip
M, POSITIONS = 16, 256


def language(attention: dict[str, Any] = GROUPED, *, train: dict[str, Any] | None = None, **model: Any) -> JobSpec:
    return JobSpec.parse(
        {
            "model": {"kind": "language", "model_dim": M, "num_layers": 2, "ffn_dim": 32, "vocab_size": 300,
                      "attention": attention, **model},
            "data": {"corpus": "synthetic", "max_tokens": POSITIONS},
            "train": {"num_steps": 1, "batch_tokens": 2 * POSITIONS, **(train or {})},
        }
    )  # fmt: skip


def attention_of(spec: JobSpec, layer: int = 0) -> AttentionDims:
    blocks = [block for _, block in spec.model.blocks() if block.attentions]
    return blocks[layer].attentions[0]


def kept(spec: JobSpec, tensor: int = 1, width: int = 4, *, on_cpu: bool = False) -> float:
    """Bytes for each position."""
    dims = attention_of(spec)
    found = saved_attention_bytes(dims, M, POSITIONS, tensor, width, profile=OURS, on_cpu=on_cpu, selective=False)
    return found / POSITIONS


def test_grouped_queries_keep_what_fused_attention_is_given() -> None:
    """4 heads of 8: queries 32, keys 16, values 16, what heads give 32. The layer has its input and what its norm gave,
    16 each, and a number for either norm; attention one for each of 4 heads."""
    plain = 16 + 16 + 32 + 16 + 16 + 32
    assert kept(language()) == 4 * (plain + 2 + 4)
    assert kept(language(), width=2) == 2 * plain + 4 * (2 + 4)
    assert kept(language({**GROUPED, "bias": True, "output_bias": True})) == kept(language())
    normed = {**GROUPED, "query_key_norm": "head"}  # before their norms too, and a number for each of 6 heads
    assert kept(language(normed)) == kept(language()) + 4 * (32 + 16 + 6)
    clipped = {**GROUPED, "clip": 8.0}  # the three before they are clipped
    assert kept(language(clipped)) == kept(language()) + 4 * (32 + 16 + 16)
    gated = {**GROUPED, "output_gate": True}  # the gate's sigmoid, and what it weighed
    assert kept(language(gated)) == kept(language()) + 4 * (32 + 32)
    for again in ({"window": 64}, {"sinks": True}):  # blocks side by side, or what sinks leave of them
        assert kept(language({**GROUPED, **again})) == kept(language()) + 4 * 32


def test_tensor_ranks_keep_all_tokens_where_they_are_gathered_and_some_of_the_heads() -> None:
    shared = 16 / 2 + 16 + (32 + 16 + 16 + 32) / 2
    assert kept(language(), tensor=2) == 4 * (shared + 2 / 2 + 4 / 2)
    together = {**GROUPED, "query_key_norm": "width"}  # over all heads: in one process as it is, among several wide
    assert kept(language(together)) == kept(language()) + 4 * 48
    assert kept(language(together), width=2) == kept(language(), width=2) + 2 * 48
    assert kept(language(together), tensor=2, width=2) == kept(language(), tensor=2, width=2) + 2 * 4 * 48 / 2


def test_a_cpu_attends_in_float32() -> None:
    """Of bfloat16: all that goes in and comes out; and what comes out once more, narrowed."""
    assert kept(language(), width=2, on_cpu=True) == 2 * (16 + 16 + 32) + 4 * (32 + 16 + 16 + 32 + 2 + 4)
    assert kept(language(), on_cpu=True) == kept(language())


def test_latents_are_made_of_own_tokens_and_gathered_after_their_norms() -> None:
    """4 heads: queries and keys 12 each, values 6. Kept are 12 + 10 + 4 before the norms, 12 + 10 after them, queries
    and keys of all heads, what keys and values were made as, and what heads give, twice."""
    heads = 48 + 48 + 4 * (8 + 6) + 24 + 24
    assert kept(language(LATENT)) == 4 * (16 + 16 + 26 + 22 + heads + 4 + 4)
    of_two = (16 + 16 + 26) / 2 + 22 + heads / 2
    assert kept(language(LATENT), tensor=2) == 4 * (of_two + 4 / 2 + 4 / 2)
    straight = {**LATENT, "query_rank": None}  # queries of hidden states, which are gathered beside
    assert kept(language(straight)) == 4 * (16 + 16 + 14 + 10 + heads + 3 + 4)
    assert kept(language(straight), tensor=2) == 4 * ((16 + 16 + 14) / 2 + 16 + 10 + heads / 2 + 3 / 2 + 4 / 2)
    on_cpu = 48 + 48 + 48 + 48 + 24  # values and what they give as wide as keys
    assert kept(language(LATENT), on_cpu=True) == 4 * (16 + 16 + 26 + 22 + on_cpu + 4 + 4)
    dims, gathered = attention_of(language(LATENT)), attention_of(language(straight)).gathered
    assert (dims.gathered, gathered) == (12 + 10 + 4, None)


def test_gathered_latents_take_less_of_the_links_than_hidden_states() -> None:
    """Latents of so many channels go in, or hidden states; hidden states come out."""
    links = (Link(devices=2, bytes_per_s=3e11, latency_s=0.0),)
    cluster = Cluster(num_nodes=1, devices_per_node=2, device="cpu", links=links)
    candidate = Candidate(Degrees(tensor=2, data=2), Options(micro_batch_groups=2))

    def gather_s(rank: int | None) -> float:
        search = LayoutSearch(language({**LATENT, "query_rank": rank}, model_dim=4096), cluster)
        return search.time.estimate(candidate).gather_s

    of_hidden, few, more = gather_s(None), gather_s(12), gather_s(2000)
    assert few < more < of_hidden
    channels = [4096 + 4096, 12 + 14 + 4096, 2000 + 14 + 4096]  # of attention, beside the feed-forward layer's 8192
    slope = (of_hidden - few) / (channels[0] - channels[1])
    assert more - few == pytest.approx(slope * (channels[2] - channels[1]), rel=1e-3)


@pytest.mark.parametrize(("profile", "differs"), [(OURS, False), (PEER, True)], ids=["ours", "peer"])
def test_selective_recomputation_computes_latents_again_in_a_peer_only(profile: Profile, differs: bool) -> None:
    """Ours is of hidden states only; a peer's computes queries, keys and values again."""
    dims = attention_of(language(LATENT))
    plain, again = (
        saved_attention_bytes(dims, M, POSITIONS, 1, 4, profile=profile, on_cpu=False, selective=selective)
        for selective in (False, True)
    )
    assert (again < plain) == differs


def test_a_state_keeps_no_keys_and_values_for_each_head_of_its_values() -> None:
    """2 heads of keys of 8, 4 of values of 6: 16 + 16 + 24 before the convolution, after it and activated; queries and
    keys as long as they come and of length 1; values as they are used; the gate and its SiLU; what is read, normed,
    weighed. Numbers: 7 of each head of values, 2 of each of keys."""
    spec = language(linear_attention=STATES, full_attention_every=2)
    mixed, keys, values = 16 + 16 + 24, 2 * 16, 24
    widths = 3 * mixed + keys + values + 2 * values + 3 * values
    numbers = 7 * 4 + 2 * 2
    assert kept(spec) == 4 * (16 + 16 + widths + numbers + 2)
    dims = attention_of(spec)
    assert attention_workspace_bytes(dims, 4 * 2048, 2048, 1, OURS) == attention_workspace_bytes(
        dims, 4 * 1024, 1024, 1, OURS
    )
    assert (
        attention_workspace_bytes(dims, 4 * 2048, 2048, 2, OURS)
        == attention_workspace_bytes(dims, 4 * 1024, 1024, 1, OURS) // 2
    )


@pytest.mark.parametrize(("length", "window"), [(1024, None), (1024, 128), (1024, 2048), (64, 63)])
def test_a_query_attends_to_its_window(length: int, window: int | None) -> None:
    """But for half a position, itself."""
    fields = {} if window is None else {"window": window, "windowed_layers": "all"}
    by_hand = sum(min(position + 1, window or length) for position in range(length)) / length
    assert attended_positions(attention_of(language({**GROUPED, **fields})), length) == pytest.approx(
        by_hand - 0.5, abs=0.51
    )


def test_a_chunk_of_the_delta_rule_takes_what_its_products_do() -> None:
    """Of one chunk of 64: 4 heads whose states are 8 x 6, served by 2 heads of keys."""
    dims = attention_of(language(linear_attention=STATES, full_attention_every=2))
    chunk = 64
    of_keys = 2 * (2 * chunk * chunk * 8) * 2  # keys with keys, and with queries: of the heads of keys
    system = chunk * chunk * (6 + 8)  # triangular, solved for so many columns
    read = 2 * (2 * chunk * 8 * 6)  # of the state, for keys and for queries
    weighed, written = 2 * chunk * chunk * 6, 2 * chunk * 8 * 6
    by_hand = of_keys + 4 * (system + read + weighed + written)
    assert attended_positions(dims, 4096) == chunk
    assert chunk * pairs_flops(dims, attended_positions(dims, 4096)) == by_hand
    assert attended_positions(dims, 16) == 16  # no row has more


def test_flops_of_a_model_are_those_of_its_products() -> None:
    spec = language()
    layer = 16 * (32 + 16 + 16) + 32 * 16 + 3 * 16 * 32
    pairs = 2 * (32 + 32) * POSITIONS / 2
    forward = 2 * POSITIONS * (2 * (2 * layer + pairs) + 2 * 16 * 300)
    assert model_flops_per_step(spec) == 3 * forward


@pytest.mark.parametrize(
    "freeze",
    [(), ("*.moe.router",), ("layers.0.*",), ("embedding.*", "output.*"), ("*.experts.*", "*norm*"), ("layers.*",)],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_only_trained_parameters_have_gradients_and_moments(freeze: tuple[str, ...], shards: int) -> None:
    """Counted parameter by parameter: two moments for each of AdamW's; Adafactor's rows and columns."""
    model = language(moe=EXPERTS, num_layers=3, first_dense_layers=1).model
    degrees = Degrees(data=shards, fsdp=shards, expert_fsdp=shards)
    trained = [each for each in model.parameters() if not any(matches(pattern, each.name) for pattern in freeze)]
    num_trained = sum(each.numel for each in trained)
    state = state_of(model, degrees, AdamWSpec(name="adamw"), freeze)
    assert state.optimizer == 2 * state.trained_stored.total
    assert state.trained_used.total == num_trained
    if shards == 1:
        assert (state.stored.total, state.trained_stored.total) == (model.num_parameters(), num_trained)
        factored = AdafactorSpec(name="adafactor")
        elements = sum(factored.state_elements(each.shape, each.of_experts) for each in trained)
        assert state_of(model, degrees, factored, freeze).optimizer == elements


def test_a_frozen_model_takes_less_memory_and_says_what_is_trained() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=1, device="cpu")
    whole, part = (
        LayoutSearch(language(train=train), cluster).plan() for train in ({}, {"freeze": ["embedding.weight"]})
    )
    table = 300 * 16
    assert whole.memory.gradients - part.memory.gradients == 4 * table
    assert whole.memory.optimizer - part.memory.optimizer == 2 * 4 * table
    assert whole.memory.parameters == part.memory.parameters
    every = language().model.num_parameters()
    told = f"{1 - table / every:.0%} of {every / 1000:.1f} K parameters are trained"
    assert any(reason.startswith(told) for reason in part.reasons)
    assert not any("are trained" in reason for reason in whole.reasons)


def test_layers_of_which_one_is_frozen_are_not_alike() -> None:
    model = language().model
    first, second = (unit for unit in units(model, OURS, ("layers.0.*",)) if unit.is_layer)
    assert not any(weight.is_trained for weight in first.weights)
    assert all(weight.is_trained for weight in second.weights)
    assert len(set(units(model, OURS))) == 3
