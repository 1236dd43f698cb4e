"""Costs of language models as our modules run them, compared with small cases counted by hand."""

from typing import Any

import pytest

from moe.plan import Cluster, Degrees, LayoutSearch, Link
from moe.plan.candidate import Candidate, Options
from moe.plan.cost.flops import attended_positions, index_flops, model_flops_per_step, pairs_flops
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
MAMBA2 = {"kind": "mamba2", "num_heads": 4, "head_dim": 6, "state_dim": 8, "num_groups": 2}
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


def saved_bytes(spec: JobSpec, tensor: int = 1, width: int = 4, *, on_cpu: bool = False) -> float:
    """Bytes per position."""
    dims = attention_of(spec)
    num_bytes = saved_attention_bytes(dims, M, POSITIONS, tensor, width, profile=OURS, on_cpu=on_cpu, selective=False,
                                      sequence_tokens=POSITIONS)  # fmt: skip
    return num_bytes / POSITIONS


def test_grouped_queries_keep_what_fused_attention_is_given() -> None:
    """4 heads of 8: queries 32, keys 16, values 16, output of the heads 32. The layer saves its input and the output of
    its norm, 16 each, and a number for each of two norms; attention saves a number for each of 4 heads."""
    plain = 16 + 16 + 32 + 16 + 16 + 32
    assert saved_bytes(language()) == 4 * (plain + 2 + 4)
    assert saved_bytes(language(), width=2) == 2 * plain + 4 * (2 + 4)
    assert saved_bytes(language({**GROUPED, "bias": True, "output_bias": True})) == saved_bytes(language())
    with_norms = {**GROUPED, "query_key_norm": "head"}  # also before their norms, and a number for each of 6 heads
    assert saved_bytes(language(with_norms)) == saved_bytes(language()) + 4 * (32 + 16 + 6)
    with_clip = {**GROUPED, "clip": 8.0}  # queries, keys and values before clipping
    assert saved_bytes(language(with_clip)) == saved_bytes(language()) + 4 * (32 + 16 + 16)
    with_gate = {**GROUPED, "output_gate": True}  # the gate's sigmoid, and its other factor
    assert saved_bytes(language(with_gate)) == saved_bytes(language()) + 4 * (32 + 32)
    for extra in ({"window": 64}, {"sinks": True}):  # blocks side by side, or what sinks leave of them
        assert saved_bytes(language({**GROUPED, **extra})) == saved_bytes(language()) + 4 * 32


def test_tensor_ranks_keep_all_tokens_where_they_are_gathered_and_some_of_the_heads() -> None:
    values = 16 / 2 + 16 + (32 + 16 + 16 + 32) / 2
    assert saved_bytes(language(), tensor=2) == 4 * (values + 2 / 2 + 4 / 2)
    # Over all heads: in its own dtype in one process, in float32 among several.
    width_norm = {**GROUPED, "query_key_norm": "width"}
    assert saved_bytes(language(width_norm)) == saved_bytes(language()) + 4 * 48
    assert saved_bytes(language(width_norm), width=2) == saved_bytes(language(), width=2) + 2 * 48
    assert (
        saved_bytes(language(width_norm), tensor=2, width=2)
        == saved_bytes(language(), tensor=2, width=2) + 2 * 4 * 48 / 2
    )


def test_a_cpu_attends_in_float32() -> None:
    """For bfloat16, attention saves its inputs and output in float32, and its output in bfloat16 as well."""
    assert saved_bytes(language(), width=2, on_cpu=True) == 2 * (16 + 16 + 32) + 4 * (32 + 16 + 16 + 32 + 2 + 4)
    assert saved_bytes(language(), on_cpu=True) == saved_bytes(language())


def test_latents_are_made_of_own_tokens_and_gathered_after_their_norms() -> None:
    """4 heads: queries and keys 12 each, values 6. Saved are 12 + 10 + 4 before the norms, 12 + 10 after them, queries
    and keys of all heads, the products that keys and values are made from, and the output of the heads, twice."""
    heads = 48 + 48 + 4 * (8 + 6) + 24 + 24
    assert saved_bytes(language(LATENT)) == 4 * (16 + 16 + 26 + 22 + heads + 4 + 4)
    of_two = (16 + 16 + 26) / 2 + 22 + heads / 2
    assert saved_bytes(language(LATENT), tensor=2) == 4 * (of_two + 4 / 2 + 4 / 2)
    straight = {**LATENT, "query_rank": None}  # queries are made of hidden states, which are gathered as well
    assert saved_bytes(language(straight)) == 4 * (16 + 16 + 14 + 10 + heads + 3 + 4)
    assert saved_bytes(language(straight), tensor=2) == 4 * ((16 + 16 + 14) / 2 + 16 + 10 + heads / 2 + 3 / 2 + 4 / 2)
    on_cpu = 48 + 48 + 48 + 48 + 24  # values and outputs are padded to the width of keys
    assert saved_bytes(language(LATENT), on_cpu=True) == 4 * (16 + 16 + 26 + 22 + on_cpu + 4 + 4)
    dims, straight_gathered = attention_of(language(LATENT)), attention_of(language(straight)).gathered
    assert (dims.gathered, straight_gathered) == (12 + 10 + 4, None)


def indexed(top_k: int, **indexer: Any) -> dict[str, Any]:
    return {**LATENT, "indexer": {"num_heads": 3, "head_dim": 5, "top_k": top_k, **indexer}}


def test_selected_tokens_are_attended_to_again_in_the_backward_pass() -> None:
    """Attention saves its inputs, and not its output beside what the output projection saves, nor numbers per head; 64
    selected positions take 4 bytes each. A loss adds gradients of 3 queries of 5, of the key, and of 3 head weights;
    the key before its norm, and two numbers of the norm."""
    selected = saved_bytes(language(indexed(64)))
    assert selected == saved_bytes(language(LATENT)) - 4 * (24 + 4) + 4 * 64
    assert saved_bytes(language(indexed(64)), on_cpu=True) == selected
    assert saved_bytes(language(indexed(POSITIONS))) == saved_bytes(language(LATENT)), "all tokens are attended to"
    trained = 3 * 5 + 5 + 5 + 3 + 2
    assert saved_bytes(language(indexed(64, loss_coefficient=1.0))) == selected + 4 * trained
    few = saved_bytes(language(indexed(8)))  # queries, and one key of 10 + 4 for all heads, whose latents are saved
    assert few == saved_bytes(language(LATENT)) - 4 * (48 + 4 * (8 + 6) + 24 + 4) + 4 * (10 + 4) + 4 * 8
    assert saved_bytes(language(indexed(8, loss_coefficient=1.0))) == selected + 4 * (trained - 56)
    warm_up = indexed(64, loss_coefficient=1.0, stage="dense")
    assert saved_bytes(language(warm_up)) == saved_bytes(language(LATENT)) + 4 * trained
    sharing = attention_of(language(indexed(64, shared_layers=[1], loss_coefficient=1.0)), 1)
    assert sharing.selection is not None
    assert sharing.selects(POSITIONS)
    assert (sharing.selection.heads, index_flops(sharing, POSITIONS)) == (0, 0.0)


def test_flops_of_selected_tokens_are_those_of_their_pairs_and_of_all_index_scores() -> None:
    """A query scores half of the positions in the mean; of 64 it attends to all but the first queries' missing ones."""
    spec, dense = language(indexed(64)), language(LATENT)
    pairs = 2 * (48 + 24) * (POSITIONS / 2 - (64 - 64**2 / (2 * POSITIONS)))
    scores, projections = 2 * 3 * 5 * POSITIONS / 2, 12 * 15 + M * 5 + M * 3
    difference = model_flops_per_step(dense) - model_flops_per_step(spec)
    # Frozen projections have no gradients of their weights; those of their inputs are counted, if barely.
    by_hand = 2 * 2 * POSITIONS * (3 * pairs - scores)
    assert difference == pytest.approx(by_hand, abs=2 * 2 * POSITIONS * 3 * 2 * projections)
    trained = language(indexed(64, loss_coefficient=1.0))
    gained = model_flops_per_step(trained) - model_flops_per_step(spec)
    assert gained == pytest.approx(2 * 2 * POSITIONS * 2 * scores, abs=2 * 2 * POSITIONS * 2 * 2 * projections)


def test_gathered_latents_take_less_of_the_links_than_hidden_states() -> None:
    """Attention gathers latents of so many channels, or hidden states; its output is hidden states."""
    links = (Link(devices=2, bytes_per_s=3e11, latency_s=0.0),)
    cluster = Cluster(num_nodes=1, devices_per_node=2, device="cpu", links=links)
    candidate = Candidate(Degrees(tensor=2, data=2), Options(micro_batch_groups=2))

    def gather_s(rank: int | None) -> float:
        search = LayoutSearch(language({**LATENT, "query_rank": rank}, model_dim=4096), cluster)
        return search.time.estimate(candidate).gather_s

    of_hidden, small_rank, large_rank = gather_s(None), gather_s(12), gather_s(2000)
    assert small_rank < large_rank < of_hidden
    # Of attention; the feed-forward layer's 8192 are the same in all.
    channels = [4096 + 4096, 12 + 14 + 4096, 2000 + 14 + 4096]
    slope = (of_hidden - small_rank) / (channels[0] - channels[1])
    assert large_rank - small_rank == pytest.approx(slope * (channels[2] - channels[1]), rel=1e-3)


@pytest.mark.parametrize(("profile", "differs"), [(OURS, False), (PEER, True)], ids=["ours", "peer"])
def test_selective_recomputation_computes_latents_again_in_a_peer_only(profile: Profile, differs: bool) -> None:
    """Our selective recomputation covers hidden states only; a peer's computes queries, keys and values again."""
    dims = attention_of(language(LATENT))
    plain, recomputing = (
        saved_attention_bytes(
            dims, M, POSITIONS, 1, 4, profile=profile, on_cpu=False, selective=selective, sequence_tokens=POSITIONS
        )
        for selective in (False, True)
    )
    assert (recomputing < plain) == differs


def test_a_state_keeps_no_keys_and_values_for_each_head_of_its_values() -> None:
    """2 heads of keys of 8, 4 heads of values of 6. Saved are 16 + 16 + 24 before the convolution, after it and after
    its activation; queries and keys before and after normalization; values; the gate and its SiLU; outputs as read,
    normalized and gated. Numbers: 7 per head of values, 2 per head of keys."""
    spec = language(linear_attention=STATES, full_attention_every=2)
    channels, keys, values = 16 + 16 + 24, 2 * 16, 24
    widths = 3 * channels + keys + values + 2 * values + 3 * values
    numbers = 7 * 4 + 2 * 2
    assert saved_bytes(spec) == 4 * (16 + 16 + widths + numbers + 2)
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
    """The query's own position counts half."""
    fields = {} if window is None else {"window": window, "windowed_layers": "all"}
    by_hand = sum(min(position + 1, window or length) for position in range(length)) / length
    assert attended_positions(attention_of(language({**GROUPED, **fields})), length) == pytest.approx(
        by_hand - 0.5, abs=0.51
    )


def test_a_chunk_of_the_delta_rule_takes_what_its_products_do() -> None:
    """One chunk of 64: 4 heads whose states are 8 x 6, served by 2 heads of keys."""
    dims = attention_of(language(linear_attention=STATES, full_attention_every=2))
    chunk = 64
    of_keys = 2 * (2 * chunk * chunk * 8) * 2  # keys with keys, and with queries: for each head of keys
    system = chunk * chunk * (6 + 8)  # a triangular system, solved for so many columns
    reading = 2 * (2 * chunk * 8 * 6)  # of the state, for keys and for queries
    weighting, writing = 2 * chunk * chunk * 6, 2 * chunk * 8 * 6
    by_hand = of_keys + 4 * (system + reading + weighting + writing)
    assert attended_positions(dims, 4096) == chunk
    assert chunk * pairs_flops(dims, attended_positions(dims, 4096)) == by_hand
    assert attended_positions(dims, 16) == 16  # a row has only 16


def test_a_chunk_of_mamba2_takes_what_its_products_do() -> None:
    """One chunk of 64: 4 heads of 6, whose states are 8 x 6, in 2 groups."""
    dims = attention_of(language(linear_attention=MAMBA2, attention_layers=[1]))
    chunk = 64
    scores, weighting = 2 * (2 * chunk * chunk * 8), 4 * (2 * chunk * chunk * 6)
    state = 4 * 2 * (2 * chunk * 8 * 6)  # read and written
    assert chunk * pairs_flops(dims, attended_positions(dims, 4096)) == scores + weighting + state
    assert dims.projections == 16 * (3 * 24 + 2 * 16 + 4)  # gates, inputs, B, C, time steps; output


def test_a_short_convolution_takes_what_its_products_do() -> None:
    dims = attention_of(language(linear_attention={"kind": "short_convolution"}, attention_layers=[1]))
    assert pairs_flops(dims, attended_positions(dims, 4096)) == 2 * 3 * 16
    assert dims.projections == 4 * 16 * 16


def test_layers_of_one_part_have_the_flops_and_weights_of_both() -> None:
    """Two layers of attention and a dense feed-forward layer, or four layers of one of them each."""
    both, parts = language(), language(num_layers=4, feed_forward_layers=[1, 3])
    assert model_flops_per_step(parts) == model_flops_per_step(both)
    assert parts.model.num_parameters() == both.model.num_parameters()
    kinds = [
        (len(unit.attentions), unit.feed_forward is not None) for unit in units(parts.model, OURS) if unit.is_layer
    ]
    assert kinds == [(1, False), (0, True)] * 2


def test_latent_experts_take_less_than_others() -> None:
    """Of width 4 instead of 16; each token is projected to latents and back."""
    plain, latent = language(moe=EXPERTS), language(moe={**EXPERTS, "latent_dim": 4})
    saved = 3 * 24 * (16 - 4) * 2  # by the three matrices of two experts of a token
    projections = 2 * 16 * 4
    assert model_flops_per_step(plain) - model_flops_per_step(latent) == (
        3 * 2 * (2 * POSITIONS) * 2 * (saved - projections)
    )


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
    """Counted parameter by parameter: two moments for each element in AdamW, rows and columns in Adafactor."""
    model = language(moe=EXPERTS, num_layers=3, first_dense_layers=1).model
    degrees = Degrees(data=shards, fsdp=shards, expert_fsdp=shards)
    parameters = [
        parameter for parameter in model.parameters() if not any(matches(pattern, parameter.name) for pattern in freeze)
    ]
    num_trained = sum(parameter.numel for parameter in parameters)
    state = state_of(model, degrees, AdamWSpec(name="adamw"), freeze)
    assert state.optimizer == 2 * state.trained_stored.total
    assert state.trained_used.total == num_trained
    if shards == 1:
        assert (state.stored.total, state.trained_stored.total) == (model.num_parameters(), num_trained)
        adafactor = AdafactorSpec(name="adafactor")
        elements = sum(
            adafactor.state_elements(
                parameter.shape, full_shape=parameter.shape, of_experts=parameter.of_experts, is_hidden_matrix=False
            )
            for parameter in parameters
        )
        assert state_of(model, degrees, adafactor, freeze).optimizer == elements


def test_a_frozen_model_takes_less_memory_and_says_what_is_trained() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=1, device="cpu")
    full, part = (
        LayoutSearch(language(train=train), cluster).plan() for train in ({}, {"freeze": ["embedding.weight"]})
    )
    table = 300 * 16
    assert full.memory.gradients - part.memory.gradients == 4 * table
    assert full.memory.optimizer - part.memory.optimizer == 2 * 4 * table
    assert full.memory.parameters == part.memory.parameters
    num_parameters = language().model.num_parameters()
    sentence = f"{1 - table / num_parameters:.0%} of {num_parameters / 1000:.1f} K parameters are trained"
    assert any(reason.startswith(sentence) for reason in part.reasons)
    assert not any("are trained" in reason for reason in full.reasons)


def test_layers_of_which_one_is_frozen_are_not_alike() -> None:
    model = language().model
    first, second = (unit for unit in units(model, OURS, ("layers.0.*",)) if unit.is_layer)
    assert not any(weight.is_trained for weight in first.weights)
    assert all(weight.is_trained for weight in second.weights)
    assert len(set(units(model, OURS))) == 3
