"""Adapters compute what PEFT's do on transformers' model of the same folder: logits, every gradient and ten steps; PEFT
loads what is written here, and what it writes is loaded here."""

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from moe.interchange import load_weights
from moe.interchange.adapter_parts import memory_rows
from moe.interchange.adapters import load_adapter, save_adapter
from moe.interchange.config import family_of
from moe.interchange.merged import MergedSource
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.spec import AdapterSpec, LanguageModelSpec, ProblemCode, SpecError, model_spec
from moe.spec.patterns import layer_pattern
from moe.tasks.language import LanguageModel, build_model
from tests.grid import first_seed_of
from tests.language.adapted import AdapterPair, adapter_pair, with_random_b, write_adapter, write_base
from tests.language.families import FAMILIES, WITH_ADAPTERS
from tests.language.model_pairs import as_double
from tests.language.test_families import CLOSE, apart, assert_close, loss_of, their_logits, tokens_of
from tests.parity.language_models import ATTENTIONS, language_model, with_frozen_indexer
from tests.refusals import expect_problem

# PEFT itself uses the first; of the patterns that it applies to parameters, it says the second.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

TARGETS: list[list[str] | None] = [
    None, None, ["*.experts.*", "*.attention.*"], ["*.experts.*"], ["*.attention.*"], ["*.experts.w_out"],
    ["*.experts.w_in", "*.experts.w_gate", "*.router"], ["layers.0.*"],
]  # fmt: skip


def make_pair(family: str, seed: int, folder: Path) -> AdapterPair:
    random = Random(f"adapter {family} {seed}")
    config = FAMILIES[family](random)
    config |= {"shared_intermediate_size": 0} if family == "granitemoeshared" else {}
    base, fields = write_base(config, folder, seed)
    return adapter_pair(base, with_adapter(fields, random), folder, seed)


def with_adapter(fields: dict[str, Any], random: Random) -> dict[str, Any]:
    """The model with a random adapter: rank, scale, and targets among its matrices."""
    matrices, others = matrices_of(fields)
    while True:
        names = random.sample(matrices, random.randint(1, len(matrices)))
        adapter = {
            "rank": random.randint(1, 3), "alpha": random.choice([None, 1.0, 5.0, 0.7]),
            "rank_stabilized": random.random() < 0.3,
            "targets": random.choice(
                [*TARGETS, *[complete_targets(names, matrices)] * 2, *[sorted(set(map(layer_pattern, names)))] * 2]
            ),
            "groups": random.choice([[], [{"pattern": "*.experts.*", "rank": 3, "alpha": 4.5}],
                                     [{"pattern": "layers.0.*", "alpha": 3.0}, {"pattern": "*.w_out", "rank": 1}]]),
        }  # fmt: skip
        with suppress(SpecError):  # a target that it has none of
            spec = model_spec({**fields, "adapter": adapter})
            if not any(spec.adapter.chooses(name) for name in others):
                return {**fields, "adapter": adapter}


def matrices_of(fields: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(matrices that can have adapters in PEFT's format, others: those that share a tensor of theirs outside
    experts)."""
    spec, config = model_spec(fields), json.loads((Path(fields["from"]) / "config.json").read_text())
    all_matrices = AdapterSpec(rank=1, targets=("*",))
    names = [parameter.name for parameter in spec.parameters() if all_matrices.chooses(parameter.name)]
    tensors = {}
    for name in names:
        layer, rows = memory_rows(spec, family_of(config, "config.json"), name)
        tensors[name] = name if ".experts." in name else rows[0].name_in(layer)
    counts = Counter(tensors.values())
    return [name for name in names if counts[tensors[name]] == 1], [name for name in names if counts[tensors[name]] > 1]


def complete_targets(names: list[str], matrices: list[str]) -> list[str]:
    """Add the other one of the first two matrices of experts, which share A, if there are two."""
    if not any(name.endswith(".experts.w_gate") for name in matrices):
        return names
    pairs = [(".experts.w_in", ".experts.w_gate"), (".experts.w_gate", ".experts.w_in")]
    return [*names, *(name.replace(*pair) for name in names for pair in pairs if name.endswith(pair[0]))]


@pytest.fixture(params=first_seed_of(WITH_ADAPTERS, 2))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterPair:
    return make_pair(*request.param, tmp_path)


def trainable_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


def left_by_rounding(model: LanguageModel, initial_model: LanguageModel, tokens: torch.Tensor) -> float:
    """Difference of logits after ten steps between two models that began as `initial_model`, one with adapters off by
    some roundings: in a few random models, a token's last bits reach its choice of experts within ten steps."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable_parameters(initial_model):
            parameter.mul_(1 + 1e-14 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    optimizer = adamw(initial_model)
    for _ in range(10):
        loss_of(initial_model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return apart(initial_model(tokens), model(tokens))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable_parameters(model), lr=1e-3, eps=1e-3)


def assert_equal(pair: AdapterPair, random: Random) -> None:
    import peft  # takes seconds, in each process that collects this file

    tokens = tokens_of(random, pair.spec.vocab_size, 2, random.choice([9, 40]))
    with as_double():
        expected = their_logits(pair.reference, tokens)
        loss_of(expected, tokens).backward()
    initial_model = copy.deepcopy(pair.model.train())
    logits = pair.model(tokens)
    assert_close(logits, expected)
    loss_of(logits, tokens).backward()
    assert {name for name, parameter in pair.model.named_parameters() if parameter.grad is not None} == {
        name for name, parameter in pair.model.named_parameters() if name.endswith(("_lora_a", "_lora_b"))
    }
    assert sum(parameter.numel() for parameter in trainable_parameters(pair.model)) == sum(
        parameter.numel() for parameter in trainable_parameters(pair.reference)
    )
    with safe_open(pair.folder / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert set(file.keys()) == peft.get_peft_model_state_dict(pair.reference).keys()
    optimizers, limit = [adamw(model) for model in (pair.model, pair.reference)], CLOSE
    for step in range(10):
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss_of(pair.model(tokens), tokens).backward()
        with as_double():
            loss_of(their_logits(pair.reference, tokens), tokens).backward()
        if step in (0, 9):
            with as_double(), torch.no_grad():
                expected = their_logits(pair.reference, tokens)
            if step == 9 and apart(pair.model(tokens), expected) > CLOSE:
                limit = 100 * left_by_rounding(pair.model, initial_model, tokens)
            assert_close(pair.model(tokens), expected, limit)
    pair.reference.save_pretrained(pair.folder / "theirs")
    loaded_model = build_model(pair.spec, dtype=torch.float64)
    load_adapter(str(pair.folder / "theirs"), loaded_model, pair.spec, origin=pair.origin)
    for name, weight in loaded_model.named_parameters():
        if weight.requires_grad:
            assert_close(pair.model.get_parameter(name), weight, limit)


@pytest.mark.slow
def test_adapters_are_pefts(case: AdapterPair, request: pytest.FixtureRequest) -> None:
    assert_equal(case, Random(request.node.name))


@pytest.mark.parametrize(
    ("targets", "modules", "parameters"),
    [
        (None, ["k_proj", "o_proj", "q_proj", "v_proj"],
         ["mlp.down_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate_proj.weight",
          "mlp.up_proj.weight"]),
        (["*.attention.query.*", "*.experts.w_out", "*.router"], ["q_proj"],
         ["mlp.experts.down_proj", "mlp.gate.weight"]),
        (["layers.1.attention.query.*", "*.attention.value.*"], ["model.layers.1.self_attn.q_proj", "v_proj"], []),
        (["layers.0.*"], [f"model.layers.0.self_attn.{name}_proj" for name in "koqv"],
         ["mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        (["layers.1.*.experts.*"], [],
         ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]),
    ],
)  # fmt: skip
def test_targets_are_written_by_their_shortest_unambiguous_names(tmp_path: Path, targets, modules, parameters) -> None:
    """Of three layers, the first without experts."""
    _, fields = write_base({
        "model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "head_dim": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "intermediate_size": 24, "mlp_only_layers": [0],
    }, tmp_path)  # fmt: skip
    spec = model_spec({**fields, "adapter": {"rank": 2, "targets": targets}})
    write_adapter(spec, tmp_path, build_model(spec))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["target_modules"], config["target_parameters"]) == (modules, parameters)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", WITH_ADAPTERS)
def test_merged_weights_compute_what_adapters_beside_them_do(family: str, tmp_path: Path) -> None:
    pair = make_pair(family, 7, tmp_path)
    save_folder(pair.spec, MergedSource(ModelSource(pair.model), pair.spec), tmp_path / "merged", origin=pair.origin)
    plain = pair.spec.model_copy(update={"adapter": None})
    merged_model = build_model(plain, dtype=torch.float64)
    load_weights(str(tmp_path / "merged"), merged_model, plain)
    tokens = tokens_of(Random(family), plain.vocab_size, 2, 20)
    assert_close(merged_model.eval()(tokens), pair.model.eval()(tokens))
    assert any(
        not torch.equal(parameter, pair.model.get_parameter(name))
        for name, parameter in merged_model.named_parameters()
    )


@pytest.mark.parametrize("family", ["bailing_moe", "bailing_moe_v2"])
def test_adapters_of_a_model_that_transformers_lacks_are_only_merged(tmp_path: Path, family: str) -> None:
    """The modules of the code published with Ling have other names than those of transformers' GLM-4.5."""
    _, fields = write_base(FAMILIES[family](Random(1)), tmp_path)
    spec = model_spec({**fields, "adapter": {"rank": 1}})
    model = with_random_b(build_model(spec, dtype=torch.float64))
    with expect_problem("unsupported", "adapter"):
        write_adapter(spec, tmp_path, model)
    assert not (tmp_path / "adapter").exists()
    origin, source = Origin.of_folder(fields["from"], spec), MergedSource(ModelSource(model), spec)
    save_folder(spec, source, tmp_path / "merged", origin=origin, dtype=torch.float64)
    plain = spec.model_copy(update={"adapter": None})
    merged_model = build_model(plain, dtype=torch.float64)
    load_weights(str(tmp_path / "merged"), merged_model, plain)
    tokens = tokens_of(Random(1), plain.vocab_size, 2, 20)
    assert_close(merged_model.eval()(tokens), model.eval()(tokens))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_decoding_with_adapters_computes_what_one_pass_does(attention: str) -> None:
    """Token by token, with the adapters of every matrix."""
    adapter = {"rank": 3, "alpha": 5.0, "targets": ["*"]}
    plain = language_model(attention, router="softmax_topk")
    spec = LanguageModelSpec(**{**with_frozen_indexer(plain).model_dump(), "adapter": adapter})
    model = with_random_b(build_model(spec, seed=5, dtype=torch.float64).eval())
    tokens = tokens_of(Random(attention), spec.vocab_size, 2, 9)
    with torch.no_grad():
        logits, state = model(tokens), model.start(2, 9)
        for first, end in ((0, 4), (4, 5), (5, 7), (7, 8), (8, 9)):
            assert_close(model.extend(tokens[:, first:end], state), logits[:, end - 1])


@pytest.fixture
def stored_adapter(tmp_path: Path) -> tuple[Path, LanguageModelSpec, Callable[..., None]]:
    """An adapter's config, the model, and a function that loads the adapter."""
    spec = LanguageModelSpec(**{**language_model("MLA", router="softmax_topk").model_dump(), "adapter": {"rank": 2}})
    model, origin = build_model(spec), Origin("/models/base", {"model_type": "deepseek_v3"}, "F32")
    save_adapter(spec, ModelSource(model), tmp_path / "adapter", origin=origin)

    def load(spec: LanguageModelSpec = spec) -> None:
        load_adapter(str(tmp_path / "adapter"), build_model(spec), spec, origin=origin)

    return tmp_path / "adapter" / "adapter_config.json", spec, load


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("r", 9, "mismatch"), ("r", None, "mismatch"), ("r", ..., "missing"), ("lora_alpha", "x", "mismatch"),
        ("lora_alpha", ..., "missing"), ("use_rslora", True, "mismatch"), ("peft_type", "IA3", "unsupported"),
        ("peft_type", ..., "missing"), ("use_dora", True, "mismatch"), ("trainable_token_indices", [3], "mismatch"),
        ("rank_pattern", {"q_a_proj": 1}, "mismatch"), ("alpha_pattern", {"o_proj": 1}, "mismatch"),
        ("init_lora_weights", "pissa", "unsupported"),
    ],
)  # fmt: skip
def test_an_adapter_of_another_kind_is_refused(stored_adapter, key: str, value: Any, code: ProblemCode) -> None:
    config, _, load = stored_adapter
    load()
    config_fields = {**json.loads(config.read_text()), key: value}
    config.write_text(json.dumps({name: entry for name, entry in config_fields.items() if entry is not ...}))
    with expect_problem(code, f"{config}:{key}"):
        load()


def test_an_adapter_of_another_shape_is_refused(stored_adapter) -> None:
    _, spec, load = stored_adapter
    fields = {"vocab_size": 64, "model_dim": 20, "moe": {**spec.moe.model_dump(), "model_dim": 20}}
    with pytest.raises(SpecError, match=r"must have the shape \[2, 20\]"):
        load(LanguageModelSpec(**{**spec.model_dump(), **fields}))


@pytest.mark.grid
@settings(deadline=None, max_examples=100, phases=[Phase.explicit, Phase.generate], print_blob=True)
@given(family=st.sampled_from(list(WITH_ADAPTERS)), seed=st.integers(2, 2**32))
def test_many_random_adapters(tmp_path_factory: pytest.TempPathFactory, family: str, seed: int) -> None:
    assert_equal(make_pair(family, seed, tmp_path_factory.mktemp("adapter")), Random(seed))
