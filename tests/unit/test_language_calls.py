"""A language model called directly: what it records while it generates texts, and arguments that it refuses."""

from functools import cache

import pytest
import torch
from torch.nn import functional

from moe.routing import record_routing, replay_routing
from moe.spec import model_spec
from moe.spec.generation import GenerationSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageModel, build_model, generate
from tests.refusals import Summary, expect_problem

HEADS = {"kind": "grouped_query", "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
FIELDS = {
    "kind": "language", "model_dim": 16, "num_layers": 2, "vocab_size": 30, "ffn_dim": 24, "attention": HEADS,
    "moe": {"num_experts": 4, "hidden_dim": 12, "router": "softmax_topk", "top_k": 2, "group_tokens": 16},
}  # fmt: skip
GREEDY = GenerationSpec(max_tokens=5)


@cache
def model() -> LanguageModel:
    spec = model_spec(FIELDS)
    return build_model(spec, seed=1, dtype=torch.float64).eval()


def test_what_was_recorded_of_texts_is_replayed_in_training_on_them() -> None:
    """Prompts differ in length; in the rows, each text begins at the first position."""
    prompts = [[3, 4, 5, 6], [7], [8, 9]]
    with record_routing(model()) as recording:
        texts = generate(model(), prompts, GREEDY)
    length = 4 + GREEDY.max_tokens
    rows = torch.zeros(3, length, dtype=torch.int64)
    for row, prompt, text in zip(rows, prompts, texts, strict=True):
        row[: len(prompt) + len(text)] = torch.tensor(prompt + text)
    choices = {
        layer: functional.pad(experts, (0, 0, 0, rows.numel() - len(experts)), value=-1)
        for layer, experts in recording.items()
    }
    with record_routing(model()) as row_recording:
        expected = model()(rows)
    other_choices = {layer: torch.where(experts >= 0, (experts + 1) % 4, -1) for layer, experts in choices.items()}
    for layer, experts in choices.items():
        has_choice = experts >= 0
        assert has_choice.any(1).sum() == sum(map(len, prompts)) + 3 * (GREEDY.max_tokens - 1)
        assert torch.equal(row_recording[layer][has_choice], experts[has_choice])
    with replay_routing(model(), choices):
        torch.testing.assert_close(model()(rows), expected)
    with replay_routing(model(), other_choices), record_routing(model()) as replay_recording:
        assert not torch.allclose(model()(rows), expected)
    for layer, experts in other_choices.items():
        assert torch.equal(replay_recording[layer][experts >= 0], experts[experts >= 0])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[3], []], r"prompts\[1\] must have at least one token"),
        ([[3, 30]], r"prompts\[0\] \(with token 30\) must have tokens below vocab_size \(=30\)"),
        ([[-1]], r"prompts\[0\] \(with token -1\)"),
    ],
)
def test_a_prompt_that_is_none(prompts: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model(), prompts, GREEDY)


def test_arguments_that_do_not_fit_each_other() -> None:
    for spec in (GREEDY, GenerationSpec(max_tokens=5, num_beams=2)):
        with pytest.raises(ValueError, match=r"text_numbers \(=1\) must be as many as prompts \(=2\)"):
            generate(model(), [[1], [2]], spec, text_numbers=[0])
    tokens = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"documents \(3, 2\) must have the shape of tokens \(2, 3\)"):
        model()(tokens, BatchContext(documents=tokens.view(3, 2)))
    with pytest.raises(ValueError, match=r"tokens \(3,\) must be \[B, L\]"):
        model()(tokens[0])


def test_texts_go_on_within_their_room_from_where_they_begin() -> None:
    tokens = torch.ones(2, 3, dtype=torch.int64)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        with pytest.raises(ValueError, match="padding must precede the first token"):
            model().extend(tokens, model().start(2, 8), padding)
        state = model().start(2, 8)
        model().extend(tokens, state)
        with pytest.raises(ValueError, match="padding must precede the first token"):
            model().extend(tokens, state, ~padding)
        model().extend(tokens, state, torch.zeros_like(padding))
        for shape in ((2, 0), (3, 1), (2,)):
            with pytest.raises(ValueError, match="must have at least one position for each of the state's 2 rows"):
                model().extend(torch.ones(shape, dtype=torch.int64), state)
        with pytest.raises(ValueError, match=r"padding \(2, 1\) must have the shape of tokens \(2, 3\)"):
            model().extend(tokens, model().start(2, 8), padding[:, :1])
        with pytest.raises(ValueError, match=r"must fit after 6 positions in the state's max_positions \(=8\)"):
            model().extend(tokens, state)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"linear_attention": {"num_key_heads": 1, "num_value_heads": 1, "key_dim": 8, "value_dim": 8}},
         ("empty", "full_attention_every", 1)),
        ({"dense_layers": [2]}, ("out_of_range", "dense_layers", 2)),
        ({"attention": {**HEADS, "windowed_layers": "all"}}, ("not_applicable", "attention.windowed_layers", "all")),
        ({"attention": {**HEADS, "window": 3, "windowed_layers": [0, 2]}},
         ("out_of_range", "attention.windowed_layers", 2)),
        ({"local_attention": HEADS}, ("missing", "local_attention.window", None)),
        ({"local_attention": {**HEADS, "window": 3}, "attention": {**HEADS, "window": 4}},
         ("conflict", "attention.window", 4)),
        ({"local_attention": {**HEADS, "window": 3, "windowed_layers": [0, 2]}},
         ("out_of_range", "local_attention.windowed_layers", 2)),
        ({"moe": {"num_experts": 4, "hidden_dim": 12, "router": "expert_choice"}},
         ("unsupported", "moe.router", "expert_choice")),
        ({"moe": None, "moe_every": 2}, ("not_applicable", "moe_every", 2)),
        ({"moe": None, "first_dense_layers": 1}, ("not_applicable", "first_dense_layers", 1)),
        ({"attention": {**HEADS, "keys_as_values": True, "value_dim": 3}}, ("unsupported", "attention.value_dim", 3)),
        ({"attention": {**HEADS, "rope": {"proportional": True, "scaling": {
            "kind": "yarn", "factor": 4.0, "original_tokens": 8}}}}, ("unsupported", "attention.rope", None)),
        ({"moe": {"num_experts": 4, "hidden_dim": 12, "branch_norms": True}}, ("requires", "moe.branch_norms", True)),
        ({"moe": {"num_experts": 4, "hidden_dim": 12, "branch_norms": True, "shared_hidden_dim": 5}},
         ("requires", "moe.branch_norms", True)),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_each_other_are_refused(fields: dict, expected: Summary) -> None:
    with expect_problem(*expected):
        model_spec({**FIELDS, **fields})
