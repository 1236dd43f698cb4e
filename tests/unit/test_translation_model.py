"""The translation model: size, causality, padding, groups, and decoding against its full forward pass."""

import pytest
import torch

from moe.spec import MoESpec, TranslationModelSpec, model_spec
from moe.spec.generation import GenerationSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.translation import TranslationModel, build_model, translate


def spec_of(**fields: object) -> TranslationModelSpec:
    moe = MoESpec(num_experts=4, model_dim=16, hidden_dim=24, capacity_factor=1.0, min_capacity=1, group_tokens=48)
    settings = {
        "model_dim": 16, "num_heads": 2, "head_dim": 8, "ffn_dim": 32, "num_encoder_layers": 2,
        "num_decoder_layers": 2, "source_vocab_size": 300, "target_vocab_size": 300, "dropout": 0.1, "moe": moe,
    }  # fmt: skip
    return TranslationModelSpec(**{**settings, **fields})  # type: ignore[arg-type]


def batch(rows: int = 6, source: int = 7, target: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sources = torch.randint(4, 300, (rows, source), generator=generator)
    sources[1, 4:] = 0
    return sources, torch.randint(4, 300, (rows, target), generator=generator)


@pytest.mark.parametrize(
    "spec",
    [model_spec({"preset": "gshard-tiny"}), model_spec({"preset": "gshard-tiny-dense"}),
     spec_of(share_vocabulary=False, target_vocab_size=310), spec_of(num_encoder_layers=3, num_decoder_layers=5),
     spec_of(moe=MoESpec(num_experts=4, model_dim=16, hidden_dim=24, activation="geglu", expert_bias=True,
                         shared_hidden_dim=40, shared_gate=True))],
    ids=["tiny", "dense twin", "two vocabularies", "odd layers", "gated, biased and shared experts"],
)  # fmt: skip
def test_the_spec_counts_the_weights_there_are(spec: TranslationModelSpec) -> None:
    model = build_model(spec)
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters()
    source, target = batch()
    assert model(source, target).shape == (6, 5, spec.target_vocab_size)


def greedy(model: TranslationModel, source: torch.Tensor, max_tokens: int) -> list[list[int]]:
    return translate(model, source, GenerationSpec(max_tokens=max_tokens))


def test_a_position_sees_no_later_target_and_no_padding() -> None:
    model = build_model(spec_of(), dtype=torch.float64)
    source, target = batch()
    context = BatchContext(training=False)
    logits = model(source, target, context)
    new_target = target.clone()
    new_target[:, 3:] = 9
    torch.testing.assert_close(model(source, new_target, context)[:, :3], logits[:, :3])
    longer = torch.nn.functional.pad(source, (0, 3))
    torch.testing.assert_close(model(longer, target, context), logits)


def test_dropout_and_second_experts_follow_step_seed_and_mode() -> None:
    model, (source, target) = build_model(spec_of(dropout=0.5)), batch()
    logits = model(source, target, BatchContext(step=4, seed=2))
    assert torch.equal(model(source, target, BatchContext(step=4, seed=2)), logits)
    for step, seed in ((5, 2), (4, 3)):
        assert not torch.equal(model(source, target, BatchContext(step=step, seed=seed)), logits)
    eval_logits = model.eval()(source, target)
    assert torch.equal(eval_logits, model(source, target, BatchContext(training=False)))
    assert not torch.equal(eval_logits, model.train()(source, target))


def test_greedy_decoding_takes_the_likeliest_token_of_the_full_forward_pass() -> None:
    model = build_model(spec_of(), dtype=torch.float64)
    source, _ = batch(rows=12)
    outputs = greedy(model, source, max_tokens=9)
    sequences = [[*row, 2][:9] for row in outputs]  # with EOS, unless the row was cut
    rows = torch.tensor([row + [0] * (9 - len(row)) for row in sequences])
    inputs = torch.cat((torch.ones(12, 1, dtype=torch.int64), rows[:, :-1]), 1)
    logits = model(source, inputs, BatchContext(training=False))
    logits[..., [0, 1]] = -torch.inf
    live = rows != 0
    assert torch.equal(logits.argmax(-1)[live], rows[live])
    assert live[:, 0].all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("router", ["gshard_top2", "sinkhorn_topk", "expert_choice"])
def test_decoded_rows_end_where_they_end_and_do_not_depend_on_their_neighbours(router: str) -> None:
    consent = {"later_tokens_choose_too": "accepted"} if router == "expert_choice" else {}
    moe = MoESpec(router=router, num_experts=4, model_dim=16, hidden_dim=24, group_tokens=48, **consent)
    model = build_model(spec_of(moe=moe), seed=6, dtype=torch.float64)
    with torch.no_grad():  # make ends likely, so that rows end at different positions
        model.source_embedding[2] *= 1.4
    source, _ = batch(rows=12)
    outputs = greedy(model, source, max_tokens=12)
    assert len(set(map(len, outputs))) > 1, "the case this test is for"
    assert outputs == [greedy(model, source[row : row + 1], max_tokens=12)[0] for row in range(12)]


def test_where_a_row_that_never_ends_is_cut_depends_on_its_own_source_alone() -> None:
    model = build_model(spec_of(), seed=1, dtype=torch.float64)
    with torch.no_grad():
        model.source_embedding[2] = 0  # EOS is never the likeliest
    source, _ = batch(rows=12)
    longer = torch.nn.functional.pad(source, (0, 30))
    longer[0] = 7  # a neighbour of many tokens
    outputs = greedy(model, longer, max_tokens=60)
    lengths = (longer != 0).sum(1)
    assert list(map(len, outputs)) == (2 * lengths + 16).clamp(max=60).tolist()
    for row in range(12):
        assert greedy(model, longer[row : row + 1, : lengths[row]], max_tokens=60)[0] == outputs[row]


def test_no_rows_at_all() -> None:
    model = build_model(spec_of())
    source, target = batch()
    assert model(source[:0], target[:0], BatchContext(rows_per_group=2)).shape == (0, 5, 300)
    assert greedy(model, source[:0], max_tokens=4) == []


def test_bfloat16_is_close_to_float32_and_keeps_float32_weights() -> None:
    narrow, wide = (build_model(spec_of(), dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert all(parameter.dtype == torch.float32 for parameter in narrow.parameters())
    source, target = batch()
    context = BatchContext(training=False)
    logits = narrow(source, target, context)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - wide(source, target, context)).abs().mean() < 0.05
