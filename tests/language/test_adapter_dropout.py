"""Dropout of adapters: PEFT's computation with our masks put in, and plain formulas where PEFT has none."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.experts import build_activation
from moe.interchange import load_weights
from moe.interchange.adapter_parts import halves
from moe.interchange.adapters import save_adapter
from moe.interchange.expand import expand_model
from moe.interchange.families import BY_TYPE
from moe.interchange.origin import Origin
from moe.interchange.sources import ModelSource
from moe.layers.adapter_dropout import AdapterDropout, DropoutKey
from moe.layers.moe import MoELayer
from moe.layers.shared_experts import SharedExperts
from moe.overrides import overriding
from moe.random import Purpose, fold, fold_name, keep_mask
from moe.routing import TokenContext
from moe.sharding.bindings.bindings import BINDINGS
from moe.spec import LanguageModelSpec, model_spec
from moe.spec.adapter import A
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageModel, build_model
from tests.language.families import FAMILIES, as_double, their_model
from tests.language.test_families import assert_close, loss_of, their_logits, tokens_of
from tests.parity.language_models import ATTENTIONS, language_model

# PEFT's own use of it.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
SEED = 11


def mask_of(name: str, ids: Tensor, num_columns: int, probability: float, step: int) -> Tensor:
    """What x is multiplied by before the adapter of the matrix `name`, `[*ids.shape, num_columns]` in float64."""
    key = fold(SEED, step, Purpose.ADAPTER_DROPOUT, fold_name(0, name))
    return keep_mask(key, ids, num_columns, 1 - probability).double() / (1 - probability)


class OurMasks(nn.Module):
    """In place of PEFT's dropout."""

    step = 0

    def __init__(self, name: str, probability: float) -> None:
        super().__init__()
        self.name, self.probability = name, probability

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x[..., 0].numel()).view(x.shape[:-1])
        return x * mask_of(self.name, ids, x.shape[-1], self.probability, self.step)


def with_random_b(model: LanguageModel) -> LanguageModel:
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("_lora_b"):
                each.copy_(0.3 * torch.randn_like(each))
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize("probability", [0.1, 0.6])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_it_is_pefts_with_our_masks(family: str, probability: float, tmp_path: Path) -> None:
    """On all that PEFT wraps as modules: attention, and the feed-forward layers of models without experts. Logits and
    every gradient, at several steps."""
    import peft  # takes seconds, in each process that collects this file

    random = Random(f"dropout {family} {probability}")
    base = their_model(FAMILIES[family](random), 3)
    base.save_pretrained(tmp_path / "base", save_original_format=True)
    is_dense = family in ("llama", "qwen3")
    adapter = {
        "rank": 2, "alpha": 3.0, "dropout": probability,
        "targets": ["*.attention.*", "*.dense.*"] if is_dense else ["*.attention.*"],
    }  # fmt: skip
    of_experts = {} if is_dense else {"moe": {"group_tokens": 64}}
    spec = model_spec(expand_model({"from": str(tmp_path / "base"), **of_experts, "adapter": adapter}, None))
    assert isinstance(spec, LanguageModelSpec)
    ours = build_model(spec, seed=3, dtype=torch.float64)
    load_weights(str(tmp_path / "base"), ours, spec)
    with_random_b(ours)
    save_adapter(
        spec, ModelSource(ours), tmp_path / "adapter", origin=Origin.of_folder(str(tmp_path / "base"), spec),
        dtype=torch.float64,
    )  # fmt: skip
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["lora_dropout"] == probability
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).double().train()
    every = halves(spec, BY_TYPE[family])
    names = {each.place.module: each.our_name.removesuffix(A) for each in every if each.our_name.endswith(A)}
    wrapped = [(path, each) for path, each in theirs.named_modules() if isinstance(each, peft.tuners.lora.Linear)]
    assert len(wrapped) == len(names)
    for path, each in wrapped:
        assert each.lora_dropout["default"].p == probability
        each.lora_dropout["default"] = OurMasks(names[path.removeprefix("base_model.model.")], probability)
    tokens = tokens_of(random, spec.vocab_size, 2, 13)
    for step in (0, 1, 7):
        OurMasks.step = step
        with as_double():
            expected = their_logits(theirs, tokens)
            loss_of(expected, tokens).backward()
        logits = ours(tokens, BatchContext(step=step, seed=SEED))
        assert_close(logits, expected)
        loss_of(logits, tokens).backward()
        found = {name: each.grad for name, each in ours.named_parameters() if each.grad is not None}
        gradients = {
            f"base_model.model.{path}.lora_{half}.default.weight": theirs.get_submodule(f"base_model.model.{path}")
            .get_submodule(f"lora_{half}.default").weight.grad
            for path in names for half in "AB"
        }  # fmt: skip
        assert len(found) == len(gradients)
        squares = sum(float(each.square().sum()) for each in gradients.values())
        assert sum(float(each.square().sum()) for each in found.values()) == pytest.approx(squares, rel=1e-8)
        for path, name in names.items():
            of_a = gradients[f"base_model.model.{path}.lora_A.default.weight"]
            assert_close(found[name + A], of_a)
        for model in (ours, theirs):
            model.zero_grad()
    plain = ours.eval()(tokens)
    assert (plain - logits).abs().max() > 1e-3, "nothing is dropped where nothing is trained"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_shared_experts(activation: str, recompute: bool) -> None:
    """Beside the same in plain operations."""
    generator = torch.Generator().manual_seed(5)
    layer = SharedExperts(build_activation(activation))
    layer.recompute, layer.lora_scale = recompute, 0.7
    gated = ["w_gate"] if layer.activation.gated else []
    for name in ["w_in", *gated, "w_out"]:
        shapes = {"": (8, 10), "_lora_a": (2, 8), "_lora_b": (10, 2)}
        if name == "w_out":
            shapes = {"": (10, 8), "_lora_a": (2, 10), "_lora_b": (8, 2)}
        for part, shape in shapes.items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            layer.register_parameter(name + part, nn.Parameter(values))
    layer.dropout = {name: AdapterDropout(0.4, f"shared.{name}") for name in ("w_in", "w_gate", "w_out")}
    x = torch.randn(9, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.randperm(100, generator=generator)[:9]

    def plain(x: Tensor, name: str) -> Tensor:
        matrix, a, b = (getattr(layer, name + part) for part in ("", "_lora_a", "_lora_b"))
        return x @ matrix + 0.7 * (x * mask_of(f"shared.{name}", ids, x.shape[1], 0.4, 3)) @ a.t() @ b.t()

    up = plain(x, "w_in")
    expected = plain(layer.activation.plain(up, plain(x, "w_gate") if gated else up), "w_out")
    found = layer(x, DropoutKey(TokenContext(step=3, seed=SEED), ids))
    assert_close(found, expected)
    weights, inputs = torch.randn_like(expected), [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        assert_close(one, other)


def test_routers() -> None:
    """One token at a time: then what the adapter adds is a matrix, that of the token's own mask."""
    given = language_model(next(iter(ATTENTIONS)), router="softmax_topk", aux_coefficient=0.0, top_k=2).model_dump()
    adapter = {"rank": 2, "alpha": 5.0, "dropout": 0.5, "targets": ["*.router"]}
    model = with_random_b(build_model(LanguageModelSpec(**{**given, "adapter": adapter}), dtype=torch.float64))
    layer = model.layers[1].feed_forward.moe
    assert isinstance(layer, MoELayer)
    name = "layers.1.feed_forward.moe.router"
    beside = with_random_b(build_model(LanguageModelSpec(**{**given, "adapter": None}), dtype=torch.float64))
    plain = beside.layers[1].feed_forward.moe
    plain.load_state_dict({key: each for key, each in layer.state_dict().items() if "lora" not in key})
    before = plain.router.detach().clone()
    x = torch.randn(40, 16, dtype=torch.float64)
    ids = torch.arange(100, 140)
    together = layer(x, TokenContext(ids, step=4, seed=SEED))[0]
    masks = mask_of(name, ids, 16, 0.5, 4)
    for at in range(40):
        added = 2.5 * (masks[at][:, None] * layer.router_lora_a.t()) @ layer.router_lora_b.t()
        plain.router.data = before + added.detach()
        assert_close(together[at], plain(x[at : at + 1], TokenContext(ids[at : at + 1], step=4, seed=SEED))[0][0])


def test_experts_have_none() -> None:
    given = language_model(next(iter(ATTENTIONS)), router="softmax_topk").model_dump()
    tokens = tokens_of(Random(1), given["vocab_size"], 2, 9)
    adapter: dict[str, Any] = {"rank": 2, "targets": ["*.experts.*"]}
    logits = [
        with_seed(LanguageModelSpec(**{**given, "adapter": {**adapter, "dropout": dropout}}))(tokens)
        for dropout in (0.0, 0.5)
    ]
    assert torch.equal(*logits)


def with_seed(spec: LanguageModelSpec) -> LanguageModel:
    torch.manual_seed(0)
    return with_random_b(build_model(spec, dtype=torch.float64)).train()


def test_each_matrix_and_each_step_has_masks_of_its_own() -> None:
    ids = torch.arange(50)
    keys = [(name, step) for name in ("layers.0.attention.query.weight", "layers.1.attention.query.weight",
                                      "layers.0.attention.key.weight") for step in (0, 1)]  # fmt: skip
    masks = [mask_of(name, ids, 64, 0.5, step) for name, step in keys]
    for at, one in enumerate(masks):
        assert abs(float((one > 0).double().mean()) - 0.5) < 0.05
        for other in masks[:at]:
            assert 0.4 < float((one == other).double().mean()) < 0.6


def test_a_model_is_captured_without_it() -> None:
    draws = DropoutKey(TokenContext(), torch.arange(4))
    dropped = AdapterDropout(0.1, "layers.0.attention.query.weight").by(draws)
    assert dropped is not None
    assert dropped.apply_to(torch.ones(4, 3)).shape == (4, 3)
    with overriding(BINDINGS), pytest.raises(ValueError, match=r"set adapter\.dropout to 0"):
        dropped.apply_to(torch.ones(4, 3))


@pytest.mark.parametrize("targets", [["*.attention.*"], None, ["*.attention.*", "*.router"]])
def test_pefts_config_has_it_where_peft_takes_it(targets: list[str] | None, tmp_path: Path) -> None:
    """Not beside parameters that PEFT wraps, which it refuses any with."""
    import peft  # takes seconds, in each process that collects this file

    base = their_model(FAMILIES["mixtral"](Random(2)), 3)
    base.save_pretrained(tmp_path / "base", save_original_format=True)
    adapter = {"rank": 2, "dropout": 0.2, "targets": targets}
    spec = model_spec(expand_model({"from": str(tmp_path / "base"), "adapter": adapter}, None))
    assert isinstance(spec, LanguageModelSpec)
    origin = Origin.of_folder(str(tmp_path / "base"), spec)
    save_adapter(spec, ModelSource(build_model(spec)), tmp_path / "adapter", origin=origin)
    told = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["lora_dropout"]
    assert told == (0.2 if targets == ["*.attention.*"] else 0.0)
    peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    again = {"from": str(tmp_path / "base"), "adapter": {"from": str(tmp_path / "adapter")}}
    assert expand_model(again, None)["adapter"]["dropout"] == told
    again["adapter"]["dropout"] = 0.3  # type: ignore[index]
    assert expand_model(again, None)["adapter"]["dropout"] == 0.3
