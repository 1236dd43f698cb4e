"""Adapters that PEFT writes of the embedding and the output matrix, with DoRA, and with trained rows of tokens: logits,
every gradient, steps, folders in both directions, and merged weights are PEFT's."""

import copy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from moe.interchange import load_weights
from moe.interchange.adapter_parts import PREFIX, halves
from moe.interchange.adapters import save_adapter
from moe.interchange.expand import expand_model
from moe.interchange.families import BY_TYPE
from moe.interchange.merged import MergedSource
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.parallel import quant_schemes_of
from moe.spec import LanguageModelSpec, model_spec
from moe.spec.adapter_names import MAGNITUDES, TOKEN_ROWS, A
from moe.spec.generation import GenerationSpec
from moe.spec.parameter import Form
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageModel, build_model, generate
from moe.tasks.language.batches import IGNORE_INDEX, SequencesBatch
from moe.tasks.language.generation import prepare_for_decoding
from moe.tasks.language.model import batch_loss
from tests.interchange import tiny
from tests.interchange.test_adapter_folders import adapted_model, beginning_as
from tests.language.adapted import write_base
from tests.language.families import FAMILIES
from tests.language.model_pairs import as_double
from tests.language.test_adapter_dropout import SEED, OurMasks
from tests.language.test_families import assert_close, loss_of, their_logits
from tests.unit.reference_dequantization import through_codes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]
LIMIT = 1e-10
Kind = tuple[str, dict[str, Any], dict[str, Any]]
"""(family, changes of its config, PEFT's settings)"""
UNTIED = {"tie_word_embeddings": False, "pad_token_id": None}
"""Without a padding token, whose row has no gradient in PEFT."""
KINDS: dict[str, Kind] = {
    "tables": ("qwen3_moe", UNTIED, {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
    "output by pattern": ("mixtral", UNTIED, {"target_modules": ["lm_head", "v_proj"], "use_rslora": True,
                                              "rank_pattern": {"lm_head": 3}, "alpha_pattern": {"lm_head": 7}}),
    "scaled embedding": ("gemma3_text", UNTIED, {"target_modules": ["embed_tokens"]}),
    "multiplied embedding": ("granitemoe", UNTIED, {"target_modules": ["embed_tokens", "lm_head"]}),
    "dora of attention": ("deepseek_v3", {}, {"target_modules": r".*self_attn\.\w+_proj(_with_mqa)?",
                                             "use_dora": True}),
    "dora of attention and output": ("qwen3_moe", UNTIED, {"target_modules": ["q_proj", "o_proj", "lm_head"],
                                                           "use_dora": True}),
    "dora of a dense model": ("qwen3", {}, {"target_modules": "all-linear", "use_dora": True}),
    "tokens": ("mixtral", UNTIED, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 2, 11]}),
    "tokens of both tables": ("qwen3_moe", UNTIED, {
        "target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 1], "lm_head": [3, 0, 2]}}),
    "tokens of a tied table": ("qwen3", {"tie_word_embeddings": True}, {
        "target_modules": ["q_proj", "down_proj"], "trainable_token_indices": [9, 4]}),
    "tokens of a scaled table": ("gemma3_text", {"tie_word_embeddings": True}, {
        "target_modules": ["q_proj"], "use_dora": True,
        "trainable_token_indices": {"embed_tokens": [9, 4], "lm_head": [9, 4]}}),
    "experts and tables": ("qwen3_moe", UNTIED, {
        "target_modules": ["lm_head", "embed_tokens", "gate_proj", "up_proj"]}),
}  # fmt: skip


def peft_model_of(base: nn.Module, seed: int, **options: Any) -> Any:
    """PEFT's model in float64 with random values of all that it trains."""
    import peft  # takes seconds, in each process that collects this file

    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 5, "task_type": "CAUSAL_LM", **options})
    model = peft.get_peft_model(base, config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                draws = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.3 * draws + parameter * (parameter.dim() == 1))
    return model


def save_ours(model: LanguageModel, spec: LanguageModelSpec, base: Path, folder: Path) -> None:
    origin = Origin.of_folder(str(base), spec)
    save_adapter(spec, ModelSource(model), folder, dtype=torch.float64, origin=origin)


def with_gradients(model: Any) -> Any:
    """A copy whose trained parameters have the values of their gradients."""
    gradients = copy.deepcopy(model)
    for target, parameter in zip(gradients.parameters(), model.parameters(), strict=True):
        if parameter.requires_grad:
            target.data = parameter.grad.clone()
    return gradients


def assert_same_tensors(folder: Path, theirs: Path, limit: float = LIMIT) -> None:
    """PEFT's folder may also have copies of the base's tables."""
    own_tensors, tensors = (
        load_file(folder / "adapter_model.safetensors"),
        load_file(theirs / "adapter_model.safetensors"),
    )
    assert own_tensors.keys() == {name for name in tensors if ".base_layer.weight" not in name}
    for name, tensor in own_tensors.items():
        assert_close(tensor, tensors[name], limit)


def assert_is_pefts(kind: Kind, folder: Path, seed: int = 3) -> None:
    import peft  # takes seconds, in each process that collects this file

    family, changes, options = kind
    base, _ = write_base({**FAMILIES[family](Random(seed)), **changes}, folder)
    plain = copy.deepcopy(base)
    reference = peft_model_of(base, seed, **options)
    reference.save_pretrained(folder / "theirs")
    spec = beginning_as(folder / "base", folder / "theirs")
    model = adapted_model(folder / "base", folder / "theirs", spec)
    tokens = torch.arange(48).view(2, 24) % spec.vocab_size
    with as_double():
        expected = their_logits(reference, tokens)
        loss_of(expected, tokens).backward()
    logits = model(tokens)
    assert_close(logits, expected, LIMIT)
    loss_of(logits, tokens).backward()
    assert all((parameter.grad is None) != parameter.requires_grad for parameter in model.parameters())
    with_gradients(reference).save_pretrained(folder / "their_gradients")
    save_ours(with_gradients(model), spec, folder / "base", folder / "gradients")
    assert_same_tensors(folder / "gradients", folder / "their_gradients")

    for trained in (model, reference):
        optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    reference.save_pretrained(folder / "stepped")
    save_ours(model, spec, folder / "base", folder / "ours")
    assert_same_tensors(folder / "ours", folder / "stepped")
    with as_double(), torch.no_grad():
        expected = their_logits(reference, tokens)
    again = peft.PeftModel.from_pretrained(plain, folder / "ours").double()
    with as_double(), torch.no_grad():
        assert_close(their_logits(again, tokens), expected, LIMIT)
    assert beginning_as(folder / "base", folder / "ours").adapter.model_copy(
        update={"from_folder": None, "from_config": None}
    ) == spec.adapter.model_copy(update={"from_folder": None, "from_config": None})

    origin = Origin.of_folder(str(folder / "base"), spec)
    source = MergedSource(ModelSource(model), spec)
    save_folder(spec, source, folder / "merged", origin=origin, dtype=torch.float64)
    reference.merge_and_unload().save_pretrained(folder / "their_merged")
    merged, theirs = tiny.tensors_of(folder / "merged"), tiny.tensors_of(folder / "their_merged")
    assert merged.keys() >= theirs.keys()
    for name, tensor in theirs.items():
        is_float32 = name.endswith("e_score_correction_bias")  # a buffer
        assert_close(merged[name], tensor, 1e-7 if is_float32 else LIMIT)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_peft_wrote_are_trained_as_it_does(kind: str, tmp_path: Path) -> None:
    assert_is_pefts(KINDS[kind], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]])
def test_dropout_beside_magnitudes_is_pefts_with_our_masks(targets: Any, tmp_path: Path) -> None:
    """Of a dense model; the output's hidden states are dropped out as well."""
    base, _ = write_base({**FAMILIES["qwen3"](Random(5)), **UNTIED}, tmp_path, 3)
    reference = peft_model_of(base, 1, target_modules=targets, use_dora=True, lora_dropout=0.3).train()
    reference.save_pretrained(tmp_path / "theirs")
    spec = beginning_as(tmp_path / "base", tmp_path / "theirs")
    assert spec.adapter.dropout == 0.3
    model = adapted_model(tmp_path / "base", tmp_path / "theirs", spec)
    names = {half.place.module: half.parameter_name.removesuffix(A)
             for half in halves(spec, BY_TYPE["qwen3"]) if half.parameter_name.endswith(A)}  # fmt: skip
    for path, module in reference.named_modules():
        if hasattr(module, "lora_dropout") and module.lora_dropout:
            module.lora_dropout["default"] = OurMasks(names[path.removeprefix(PREFIX)], 0.3)
    tokens = torch.arange(48).view(2, 24) % spec.vocab_size
    with as_double():
        expected = their_logits(reference, tokens)
        loss_of(expected, tokens).backward()
    context = BatchContext(step=0, seed=SEED)
    logits = model(tokens, context)
    assert_close(logits, expected, LIMIT)
    assert float((model.eval()(tokens) - logits).detach().abs().max()) > 1e-3
    labels = functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
    batch_loss(model.train(), SequencesBatch(tokens, labels, context)).objective.div(tokens[:, 1:].numel()).backward()
    with_gradients(reference).save_pretrained(tmp_path / "their_gradients")
    save_ours(with_gradients(model), spec, tmp_path / "base", tmp_path / "gradients")
    assert_same_tensors(tmp_path / "gradients", tmp_path / "their_gradients")


def initial_model(base: Path, form: Form = "float32", **adapter: Any) -> tuple[LanguageModelSpec, LanguageModel]:
    """A model with a new adapter."""
    fields = {"from": str(base), "adapter": {"rank": 2, "alpha": 5.0, "base": form, **adapter}}
    spec = model_spec(expand_model(fields, None))
    model = build_model(spec, dtype=torch.float64)
    load_weights(str(base), model, spec)
    return spec, model


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["nf4", "int8", "bfloat16", "float32"])
def test_magnitudes_begin_as_norms_of_the_stored_weights(form: Form, tmp_path: Path) -> None:
    """So that a new adapter changes nothing, also on a quantized base; rows of tokens begin as the table's."""
    write_base({**FAMILIES["qwen3_moe"](Random(7)), **UNTIED}, tmp_path)
    rows = {"embedding": [7, 3], "output": [5]}
    spec, model = initial_model(
        tmp_path / "base", form, dora=True, targets=["*.attention.*"], trainable_token_indices=rows
    )
    _, plain = initial_model(tmp_path / "base")
    schemes = quant_schemes_of(model)
    for name, parameter in model.named_parameters():
        if name.endswith(MAGNITUDES):
            matrix = plain.get_parameter(name.removesuffix(MAGNITUDES)).detach()
            if (scheme := schemes.get(name.removesuffix(MAGNITUDES))) is not None:
                matrix = through_codes(matrix, form, scheme.dim)
            assert_close(parameter, matrix.double().norm(dim=1), LIMIT if form == "float32" else 1e-7)
        if name.endswith(TOKEN_ROWS):
            table = name.removesuffix(TOKEN_ROWS)
            assert torch.equal(parameter, plain.get_parameter(f"{table}.weight")[rows[table]])
    tokens = torch.arange(24).view(2, 12) % spec.vocab_size
    with torch.no_grad(), model.without_adapters():
        expected = model(tokens)
    assert_close(model(tokens), expected, LIMIT if form == "float32" else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora of attention and output", "tokens of a tied table", "tables"])
def test_texts_of_adapted_models(kind: str, tmp_path: Path) -> None:
    """Token by token, also prepared for decoding, as by whole passes."""
    family, changes, options = KINDS[kind]
    base, _ = write_base({**FAMILIES[family](Random(2)), **changes}, tmp_path)
    peft_model_of(base, 4, **options).save_pretrained(tmp_path / "theirs")
    spec = beginning_as(tmp_path / "base", tmp_path / "theirs")
    model = adapted_model(tmp_path / "base", tmp_path / "theirs", spec).eval()
    prompts, expected = [[5, 6, 7], [9]], []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    assert generate(model, prompts, GenerationSpec(max_tokens=6)) == expected
    prepare_for_decoding(model)
    assert generate(model, prompts, GenerationSpec(max_tokens=6)) == expected


LINEAR = {"qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"], "mixtral": ["q_proj", "v_proj", "o_proj"],
          "qwen3": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}  # fmt: skip


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    """Random settings of PEFT that can be used together."""
    family = draw(st.sampled_from(sorted(LINEAR)))
    is_tied = draw(st.booleans())
    targets = draw(st.lists(st.sampled_from(LINEAR[family]), min_size=1, unique=True))
    tables = [] if is_tied else draw(st.lists(st.sampled_from(["lm_head", "embed_tokens"]), unique=True))
    dora = "embed_tokens" not in tables and draw(st.booleans())
    ids = st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True)
    rows: Any = None
    if free := {"embed_tokens", *([] if is_tied else ["lm_head"])} - {*tables}:
        rows = draw(st.none() | st.dictionaries(st.sampled_from(sorted(free)), ids, min_size=1))
    options = {
        "target_modules": [*targets, *tables], "use_dora": dora, "use_rslora": draw(st.booleans()),
        "r": draw(st.integers(1, 3)), "lora_alpha": draw(st.sampled_from([1, 6])), "trainable_token_indices": rows,
        "rank_pattern": draw(st.sampled_from([{}, {targets[0]: 1}, {"lm_head": 2}])),
        "alpha_pattern": draw(st.sampled_from([{}, {rf"layers\.0\..*{targets[-1]}": 3}])),
        "layers_to_transform": draw(st.none() | st.just([0])) if not tables else None,
    }  # fmt: skip
    return family, {**UNTIED, "tie_word_embeddings": is_tied}, options


@pytest.mark.grid
@settings(deadline=None, max_examples=60, phases=[Phase.explicit, Phase.generate], print_blob=True)
@given(kind=kinds(), seed=st.integers(0, 2**32))
def test_many_random_kinds(tmp_path_factory: pytest.TempPathFactory, kind: Kind, seed: int) -> None:
    assert_is_pefts(kind, tmp_path_factory.mktemp("kind"), seed)
