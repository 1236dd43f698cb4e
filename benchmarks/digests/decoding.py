"""Texts that both model families generate with seeded weights: greedy, sampled and by beam search."""

import torch

from benchmarks.digests.item import Item, Items
from moe.data.tokenizer import EOS, PAD
from moe.parallel import Layout
from moe.spec.generation import GenerationSpec
from tests.parity.combinations import ROUTERS, model_of
from tests.parity.language_models import ATTENTIONS, dense, language_model
from tests.parity.trajectory import Degrees, Model

SPECS = {
    "greedy": GenerationSpec(max_tokens=12),
    "drawn": GenerationSpec(max_tokens=12, temperature=1.0, top_p=0.95, seed=4),
    "beams": GenerationSpec(max_tokens=7, num_beams=3),
    "beams with a length penalty": GenerationSpec(max_tokens=9, num_beams=4, length_penalty=1.5),
}
PROMPTS = [[1, 9, 10, 11, 12, 13, 14], [1], [1, 5, 6], [1, 40, 41, 42], [1, 7]]
ENDS = set(range(2, 300, 8))


def build_seeded(spec: Model, factor: float) -> torch.nn.Module:
    """Model in float64 whose matrices are enlarged, so that texts differ and some end."""
    from moe import build_model

    model = build_model(spec, Layout.build(Degrees().plan(8)), seed=3, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model


def language_texts(spec: Model) -> dict[str, list[list[int]]]:
    """Tokens of each prompt's text, by decoding method."""
    from moe.tasks.language import generate

    model = build_seeded(spec, 2)
    return {name: generate(model, PROMPTS, spec, ENDS) for name, spec in SPECS.items()}


def translation_texts(spec: Model) -> dict[str, list[list[int]]]:
    """Tokens of each source's translation, by decoding method."""
    from moe.tasks.translation import translate

    model = build_seeded(spec, 3)
    source = torch.randint(4, 300, (5, 7), generator=torch.Generator().manual_seed(3))
    source[1, 4:] = 0
    source[3, 2:] = 0
    texts = {name: translate(model, source, spec, [spec.max_tokens] * 5) for name, spec in SPECS.items()}
    evaluation_rows = [[*row, EOS][:12] for row in texts["greedy"]]  # earlier commits wrote EOS and padding
    longest = max(map(len, evaluation_rows))
    return {**texts, "evaluation": [row + [PAD] * (longest - len(row)) for row in evaluation_rows]}


def items(quick: bool) -> Items:
    """Every router, every kind of attention, and dense models; one family per router with `--quick`."""
    torch.set_num_threads(1)
    for number, (router, fields) in enumerate(ROUTERS.items()):
        attentions = list(ATTENTIONS)
        if number % 2 == 0 or not quick:
            yield Item(f"translation: {router}", translation_texts(model_of(**fields)))
            if quick:
                continue
        for attention in [attentions[number % len(attentions)]] if quick else attentions:
            if router == "expert choice":
                continue  # its experts would choose among later tokens
            yield Item(f"language: {attention}: {router}", language_texts(language_model(attention, **fields)))
    for attention in ATTENTIONS:
        yield Item(f"language: {attention}: dense", language_texts(dense(language_model(attention))))
    twin = model_of().model_copy(update={"moe": None, "dense_twin_ffn_dim": 48})
    yield Item("translation: dense", translation_texts(twin))
