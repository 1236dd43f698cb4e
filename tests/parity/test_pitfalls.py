"""Faults that users of other systems reported: the number of each is its row in the list of pitfalls.

Rows 10 (pipeline stages without experts) and 16 (upcycling) have no test here. Two are tests of
`test_sharding_never_changes_the_math.py`: 03 (a rank whose experts get no tokens) `test_all_tokens_to_one_expert`, 05
(unequal tokens on ranks) `test_ranks_without_a_group_and_uneven_shares`.
"""

import math

import pytest
import torch
from torch.nn import functional

from moe.dispatch import exchange
from moe.layers import MoELayer, TokenContext
from moe.layers.nll import smoothed_nll
from moe.parallel import Layout, local_parameters
from moe.spec import AdamWSpec, MoESpec
from moe.tasks.translation import build_model
from tests.parity.combinations import assert_ranks_same, assert_same, model_of, run_on, train_of
from tests.parity.full_tensors import local_indices
from tests.parity.gloo_ranks import Pools
from tests.parity.test_checkpoint_ranks import EIGHT, load_numbered, save_numbered
from tests.parity.trajectory import Degrees, Shape, run
from tests.unit.train_runs import corpus, job

ONE = Degrees()
FOLDED = Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2)
SPREAD = [
    Degrees(expert=2), Degrees(expert=4), Degrees(expert=2, fsdp=2), Degrees(data=2, fsdp=2, expert_fsdp=2),
    Degrees(expert=2, data=2, fsdp=4, expert_fsdp=2), Degrees(expert=2, expert_tensor=2),
    FOLDED,
]  # fmt: skip


def one_step(ranks: Pools, degrees: Degrees, **moe: object) -> dict:
    """The record of a step, with all gradients."""
    return run_on(ranks, degrees, model_of(**moe), train_of(), Shape(), 1, True)[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("degrees", SPREAD, ids=str)
def test_01_and_11_gradients_of_experts_and_routers_under_expert_parallelism(ranks: Pools, degrees: Degrees) -> None:
    """01: gradients of experts are not multiplied by the expert parallel degree."""
    actual, expected = one_step(ranks, degrees)["gradients"], one_step(ranks, ONE)["gradients"]
    experts, routers = ([name for name in expected if kind in name] for kind in (".experts.", ".router"))
    assert experts
    assert len(routers) == 2
    for name in (*experts, *routers):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-10, atol=1e-13)
    assert min(expected[name].abs().max() for name in routers) > 1e-4


@pytest.mark.parametrize("degrees", [Degrees(expert=2), Degrees(expert=2, data=2), FOLDED], ids=str)
def test_02_the_norm_and_the_clipping_are_the_same_on_every_rank(ranks: Pools, degrees: Degrees) -> None:
    train = train_of(clip_norm=0.05)
    reference = run(model_of(), train, ONE, Shape(), 3)
    assert all(record["grad_norm"] > 0.05 for record in reference), "otherwise nothing is clipped"
    assert_same(run_on(ranks, degrees, model_of(), train, Shape(), 3), reference, 1e-10)  # equal on all ranks, too


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", [Degrees(expert=4), Degrees(data=2, fsdp=2, expert_fsdp=2)], ids=str)
def test_04_an_expert_without_tokens_has_zeros_and_true_optimizer_state(ranks: Pools, degrees: Degrees) -> None:
    model, train = (model_of(second_expert="all"), train_of(optimizer=AdamWSpec(name="adamw", weight_decay=0.1)))
    reference = run(model, train, ONE, Shape(), 3, False, True)
    assert all(layer["load"][2:] == [0, 0] for layer in reference[0]["layers"])
    assert any(layer["load"][2:] != [0, 0] for layer in reference[-1]["layers"]), "they come into use later"
    assert_same(run_on(ranks, degrees, model, train, Shape(), 3, False, True), reference, 1e-10)  # moments, too


def test_06_the_gradient_of_the_auxiliary_loss_is_its_closed_form() -> None:
    """Switch: a · E · sum over e of f_e · P_e, a mean over groups of S tokens, so that the gradient of a logit is
    a · E · p_e · (f_e - sum over j of f_j · p_j) / (G · S)."""
    torch.manual_seed(0)
    num_experts, groups, tokens, coefficient = 4, 3, 8, 0.3
    spec = MoESpec(router="switch_top1", num_experts=num_experts, model_dim=6, hidden_dim=8,
                   group_tokens=tokens, aux_coefficient=coefficient)  # fmt: skip
    layer = MoELayer(spec, dtype=torch.float64)
    x = torch.randn(groups * tokens, 6, dtype=torch.float64)
    y, _ = layer(x, TokenContext())
    (0 * y.sum()).backward()
    probs = (x @ layer.router.detach()).softmax(-1).view(groups, tokens, num_experts)
    share = functional.one_hot(probs.argmax(-1), num_experts).double().mean(1, keepdim=True)
    d_logits = probs * (share - (share * probs).sum(-1, keepdim=True))
    d_logits *= coefficient * num_experts / (groups * tokens)
    torch.testing.assert_close(layer.router.grad, x.t() @ d_logits.view(-1, num_experts))


@pytest.mark.parametrize("degrees", [Degrees(micro_batch_groups=4), Degrees(expert=2, data=2), FOLDED], ids=str)
def test_06_the_auxiliary_loss_knows_no_accumulation_and_no_data_parallel_size(ranks: Pools, degrees: Degrees) -> None:
    """The loss adds the same to the gradients of the routers."""

    def auxiliary_gradients(layout: Degrees) -> dict[str, torch.Tensor]:
        with_loss, without_loss = (one_step(ranks, layout, aux_coefficient=coefficient) for coefficient in (0.5, 0.0))
        return {
            name: with_loss["gradients"][name] - without_loss["gradients"][name]
            for name in with_loss["gradients"]
            if name.endswith("router")
        }

    expected = auxiliary_gradients(ONE)
    assert len(expected) == 2
    for name, gradient in auxiliary_gradients(degrees).items():
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("expert", [1, 2])
def test_07_recomputation_does_not_route_anew(ranks: Pools, expert: int) -> None:
    """With tied logits and a random second expert. During the run, every repeated decision is compared."""
    model = model_of(second_expert="random")
    reference = run(model, train_of(), ONE, Shape(), 2, False, True)
    degrees = Degrees(expert=expert, recompute="full")
    assert_same(run_on(ranks, degrees, model, train_of(), Shape(), 2, False, True), reference, 1e-10)


@pytest.mark.parametrize("expert", [1, 2])
def test_08_recomputation_does_not_count_loads_twice(ranks: Pools, expert: int) -> None:
    sigmoid = {"router": "sigmoid_topk", "bias_update_rate": 0.05}  # loads move what the next step chooses
    plain_records, recompute_records = (
        run_on(ranks, Degrees(expert=expert, recompute=recompute), model_of(**sigmoid), train_of(), Shape(), 3)  # type: ignore[arg-type]
        for recompute in ("none", "full")
    )
    for actual, expected in zip(recompute_records, plain_records, strict=True):
        assert [layer["load"] for layer in actual["layers"]] == [layer["load"] for layer in expected["layers"]]


def test_09_padding_counts_in_no_loss_no_capacity_and_no_dispatch() -> None:
    """More padding at the same capacity changes nothing for real tokens; nor do the values in the padding."""
    torch.manual_seed(0)
    spec = MoESpec(num_experts=4, model_dim=6, hidden_dim=8, capacity_factor=0.0, min_capacity=5,
                   normalize_gates="after_drop", group_tokens=12, aux_coefficient=0.2)  # fmt: skip
    x, results = torch.randn(2, 12, 6, dtype=torch.float64), []
    for num_padding, garbage in ((0, 0.0), (3, 0.0), (3, 50.0)):
        layer = MoELayer(spec, dtype=torch.float64)
        inputs = torch.cat((x, torch.full((2, num_padding, 6), garbage, dtype=torch.float64)), 1)
        padding = torch.arange(12 + num_padding).expand(2, -1) >= 12
        ids = torch.arange(24).view(2, 12)
        ids = torch.cat((ids, torch.full((2, num_padding), 99)), 1)
        y, routing = layer(inputs.view(-1, 6), TokenContext(ids, padding))
        real = y.view(2, 12 + num_padding, 6)[:, :12]
        real.square().sum().backward()
        results.append((real, routing.load, routing.num_choices, *(p.grad for p in layer.parameters())))
        assert not y.view(2, 12 + num_padding, 6)[:, 12:].any()
    table, labels = torch.randn(9, 6, dtype=torch.float64), torch.arange(24) % 8 + 1
    nll = smoothed_nll(x.view(-1, 6), table, labels, 0.1, 0)[0]
    longer = smoothed_nll(functional.pad(x.view(-1, 6), (0, 0, 0, 5)), table, functional.pad(labels, (0, 5)), 0.1, 0)[0]
    torch.testing.assert_close(longer, nll)
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            # The densities of the auxiliary loss divide by the share of real tokens plus 1e-6, as released.
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("optimizer", "degrees"), [("adamw", (2,)), ("adafactor", (2, 8))], ids=str)
def test_12_checkpoints_at_another_expert_degree(
    ranks: Pools, tmp_path, optimizer: str, degrees: tuple[int, ...]
) -> None:
    spec = job(corpus(tmp_path), workers=4, model={"moe": EIGHT}, train={"optimizer": {"name": optimizer}})
    ranks[4].run(save_numbered, spec, {"expert": 4}, f"{tmp_path}/saved")
    assert load_numbered(spec, {"expert": 1}, f"{tmp_path}/saved") == []
    for expert in degrees:
        assert ranks[expert].run(load_numbered, spec, {"expert": expert}, f"{tmp_path}/saved") == [[]] * expert


def rows_at_once(degrees: Degrees) -> tuple[list[dict], int]:
    """(records of two steps in which all tokens go to two experts, largest number of rows that this rank's experts
    process at a time, forward or backward)"""
    max_rows, passes = 0, (exchange.forward_pass, exchange.backward_pass)

    def note(work):
        def noting(*arguments):
            nonlocal max_rows
            max_rows = max(max_rows, arguments[0].shape[0])
            return work(*arguments)

        return noting

    exchange.forward_pass, exchange.backward_pass = map(note, passes)
    try:
        model = model_of(capacity_factor=8.0, second_expert="all")
        return run(model, train_of(), degrees, Shape(), 2, False, True), max_rows
    finally:
        exchange.forward_pass, exchange.backward_pass = passes


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_13_skew_does_not_fill_the_memory_of_a_rank(ranks: Pools, recompute: str) -> None:
    """The rows of all ranks go to the experts of two: at most 10 are processed at a time, and none is dropped."""
    limit = 10
    reference, _ = rows_at_once(ONE)
    free_results = ranks[4].run(rows_at_once, Degrees(expert=4))
    assert max(num_rows for _, num_rows in free_results) >= 40
    limited_results = ranks[4].run(rows_at_once, Degrees(expert=4, max_rows=limit, recompute=recompute))  # type: ignore[arg-type]
    assert max(num_rows for _, num_rows in limited_results) <= limit
    assert_ranks_same([records for records, _ in limited_results], reference, 1e-10)
    for records, _ in limited_results:
        assert all(layer["dropped"] == 0 for record in records for layer in record["layers"])


def test_14_evaluation_drops_nothing_and_training_says_what_it_drops() -> None:
    torch.manual_seed(0)
    fields = {"num_experts": 4, "model_dim": 6, "hidden_dim": 8, "group_tokens": 32, "second_expert": "all"}
    tight, roomy = (
        MoELayer(MoESpec(capacity_factor=factor, min_capacity=1, **fields), dtype=torch.float64)
        for factor in (0.25, 8.0)
    )
    x = torch.randn(64, 6, dtype=torch.float64)
    _, training = tight(x, TokenContext())
    assert training.dropped > 0.3
    assert training.load.sum() == round(float((1 - training.dropped - training.rejected) * training.num_choices))
    y, evaluation = tight(x, TokenContext(training=False))
    assert evaluation.dropped == evaluation.rejected == 0
    torch.testing.assert_close(y, roomy(x, TokenContext(training=False))[0])


def initial_weights(degrees: Degrees) -> None:
    """This rank's weights must equal those of the full model in the same places."""
    model_spec = model_of(router="softmax_topk", activation="swiglu", shared_hidden_dim=20)
    full_parameters = dict(build_model(model_spec, seed=3).named_parameters())
    layout = Layout.build(degrees.plan(4))
    for parameter in local_parameters(build_model(model_spec, layout, seed=3)):
        expected = full_parameters[parameter.name].reshape(-1)[local_indices(parameter.part, layout).reshape(-1)]
        assert torch.equal(parameter.local.reshape(-1), expected), parameter.name
    layout.close()


@pytest.mark.parametrize(
    "degrees", [Degrees(expert=4), Degrees(expert=2, expert_tensor=2, tensor=2, fsdp=2), FOLDED], ids=str
)
def test_15_experts_start_apart_and_the_same_under_every_layout(ranks: Pools, degrees: Degrees) -> None:
    ranks[4].run(initial_weights, degrees)
    w_in = build_model(model_of(), seed=3).get_parameter("encoder.1.feed_forward.moe.experts.w_in").detach()
    assert len(w_in) == 4
    for first in range(4):
        for second in range(first):
            correlation = torch.corrcoef(torch.stack((w_in[first].flatten(), w_in[second].flatten())))[0, 1]
            assert abs(float(correlation)) < 5 / math.sqrt(w_in[0].numel())
