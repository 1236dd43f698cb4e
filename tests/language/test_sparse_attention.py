"""Sparse attention: what the indexer learns, against a plain computation on the parts of transformers' model, which has
no loss for it."""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.interchange import load_weights
from moe.layers import sparse_attention
from moe.layers.sequence import PassRows
from moe.spec import LanguageModelSpec
from moe.spec.block import AttentionDims
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageModel, build_model
from tests.language.adapted import with_random_b
from tests.language.families import FAMILIES
from tests.language.model_pairs import as_double, model_pair
from tests.parity.language_models import VOCABULARY, language_model, with_adapter

COEFFICIENT = 0.7


@dataclass
class Record:
    """Inputs of an indexer and weights of the attention that it chooses tokens for, as transformers computes them."""

    indexer: nn.Module
    inputs: tuple[Any, ...] = ()
    selection: Tensor = field(default_factory=lambda: torch.empty(0))
    weights: Tensor = field(default_factory=lambda: torch.empty(0))


def records_of(model: nn.Module) -> list[Record]:
    """Records of the next forward pass, one for each layer with an indexer."""
    records = []
    for layer in model.model.layers:
        if layer.self_attn.indexer is None:
            continue
        record = Record(layer.self_attn.indexer)
        records.append(record)

        def note_indexer(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor, record: Record = record) -> None:
            record.inputs, record.selection = inputs, output

        def note_weights(_module: nn.Module, _inputs: Any, output: Any, record: Record = record) -> None:
            record.weights = output[1].detach()

        record.indexer.register_forward_hook(note_indexer)
        layer.self_attn.register_forward_hook(note_weights)
    return records


def index_scores(record: Record, interleaved: bool) -> Tensor:
    """Equation 1, pair by pair of rotary dimensions."""
    indexer, (hidden, latents, (cos, sin), *_) = record.indexer, record.inputs
    heads, width, rope = indexer.n_heads, indexer.head_dim, indexer.qk_rope_head_dim
    queries = indexer.wq_b(latents.detach()).unflatten(-1, (heads, width))
    keys = indexer.k_norm(indexer.wk(hidden.detach()))[:, :, None]

    def rotated(x: Tensor) -> Tensor:
        parts = list(x.unbind(-1))
        for pair in range(rope // 2):
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rope // 2)
            c, s = cos[..., pair, None], sin[..., pair, None]
            parts[i], parts[j] = x[..., i] * c - x[..., j] * s, x[..., j] * c + x[..., i] * s
        return torch.stack(parts, -1)

    products = torch.einsum("bshd,btd->bsht", rotated(queries), rotated(keys)[:, :, 0]).relu() * width**-0.5
    weights = indexer.weights_proj(hidden.detach()) * heads**-0.5
    return (products * weights[..., None]).sum(2)


def divergence(record: Record, interleaved: bool, real: Tensor, *, all_tokens: bool) -> Tensor:
    """Equations 3 and 4, query by query, over real queries."""
    scores, total = index_scores(record, interleaved), torch.zeros((), dtype=torch.float64)
    for row, query in real.nonzero().tolist():
        places = [place for place in range(query + 1) if real[row, place]]
        if not all_tokens:
            chosen = set(record.selection[row, query].tolist())
            places = [place for place in places if place in chosen]
        target = record.weights[row, :, query, places].sum(0)
        target = target / target.sum()
        shares = scores[row, query, places].softmax(-1)
        total = total + (target * (target.log() - shares.log())).sum()
    return total


def indexed(spec: LanguageModelSpec, **fields: Any) -> LanguageModelSpec:
    attention = spec.attention.model_dump()
    return LanguageModelSpec(**{
        **spec.model_dump(exclude={"attention", "from_folder", "from_config", "ignored_keys"}),
        "attention": {**attention, "indexer": {**attention["indexer"], **fields}},
    })  # fmt: skip


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


NAMES = {"wq_b.weight": "query.weight", "wk.weight": "key.weight", "k_norm.weight": "key_norm.weight",
         "k_norm.bias": "key_norm.bias", "weights_proj.weight": "head_weights.weight"}  # fmt: skip


@pytest.mark.parametrize("stage", ["sparse", "dense"])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_indexer_learns_the_attention_and_nothing_else_does(
    family: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows, blocks of a few queries, layers that share a selection."""
    monkeypatch.setattr(sparse_attention, "QUERIES_AT_ONCE", 4)
    length, top_k = 13, 13 if stage == "dense" else 5
    config = {**FAMILIES[family](Random(stage)), "index_topk": top_k, "num_hidden_layers": 3, "pad_token_id": None}
    config |= {"indexer_types": ["full", "shared", "full"]} if family == "glm_moe_dsa" else {}
    pair = model_pair(config, tmp_path)
    tokens = torch.randint(0, pair.spec.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    real = torch.arange(length) < torch.tensor([[length], [9]])
    records = records_of(pair.reference)
    with as_double():
        pair.reference(input_ids=tokens, attention_mask=real.long(), use_cache=False)
        interleaved = family == "glm_moe_dsa"
        expected = [divergence(record, interleaved, real, all_tokens=stage == "dense") for record in records]
        loss = COEFFICIENT * sum(expected) / int(real.sum())
        for record in records:
            record.indexer.requires_grad_()
        loss.backward()
    context = BatchContext(documents=torch.where(real, 0, -1))
    labels = torch.randn(2, length, pair.spec.vocab_size, dtype=torch.float64)[real]
    (pair.model.train()(tokens, context)[real] * labels).sum().backward()
    without = gradients(pair.model)
    assert not any("indexer" in name for name in without), "frozen"

    # In the dense stage, a small top_k changes nothing.
    spec = indexed(pair.spec, loss_coefficient=COEFFICIENT, stage=stage, top_k=5)
    model = build_model(spec, dtype=torch.float64)
    load_weights(str(tmp_path), model, pair.spec)
    indexers = [block.attention.indexer for block in model.layers if block.attention.indexer is not None]
    logits = model.train()(tokens, context)
    assert torch.allclose(logits[real], pair.model(tokens, context)[real], rtol=0, atol=1e-10)
    (logits[real] * labels).sum().backward()
    with_loss = gradients(model)
    for name, gradient in without.items():
        assert torch.allclose(with_loss.pop(name), gradient, rtol=1e-9, atol=1e-10), name
    assert len(with_loss) == 5 * len(records)
    for indexer, record, total in zip(indexers, records, map(float, torch.stack(expected).detach()), strict=True):
        assert float(indexer.last_divergence) == pytest.approx(total, rel=1e-9)
        assert total > 0.1
        for theirs, ours in NAMES.items():
            gradient, reference = indexer.get_parameter(ours).grad, record.indexer.get_parameter(theirs).grad
            largest = float(reference.abs().max())
            assert float((gradient - reference).abs().max()) <= 1e-7 * largest, ours
            assert largest > 1e-8


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 40 + [1] * 30, [0] * 66 + [-1] * 4])])
def test_gathered_tokens_are_attended_to_as_masked_ones(
    documents: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and every gradient, of adapters too; in blocks of a few queries."""
    monkeypatch.setattr(sparse_attention, "QUERIES_AT_ONCE", 16)
    spec = with_adapter(language_model("MLA with an indexer", router="softmax_topk"), {"rank": 2, "targets": ["*"]})
    model = with_random_b(build_model(indexed(spec, top_k=1), seed=3, dtype=torch.float64))
    tokens = torch.randint(0, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(2))
    results, real = [], slice(None) if documents is None else documents >= 0
    for is_gathered in (True, False):
        if not is_gathered:
            monkeypatch.setattr(AttentionDims, "gathers", lambda *_: False)
        assert all(block.attention._gathers(PassRows(*[None] * 2, 70)) == is_gathered for block in model.layers)
        model.zero_grad()
        logits = model.train()(tokens, BatchContext(documents=documents))
        logits[real].square().sum().backward()
        results.append((logits[real].detach(), gradients(model)))
    (logits, of_gathered), (reference, expected) = results
    torch.testing.assert_close(logits, reference, rtol=1e-10, atol=1e-12)
    assert of_gathered.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(of_gathered[name], gradient, rtol=1e-8, atol=1e-10)
