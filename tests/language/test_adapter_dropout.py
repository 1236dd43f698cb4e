"""Dropout of adapters: PEFT's computation with our masks put in, and plain formulas where PEFT has none."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.experts import build_activation
from moe.interchange.adapter_parts import halves
from moe.interchange.expand import expand_model
from moe.interchange.families import BY_TYPE
from moe.layers.adapter_dropout import AdapterDropout, DropoutKey
from moe.layers.shared_experts import SharedExperts
from moe.overrides import overriding
from moe.random import Purpose, fold, fold_name, keep_mask
from moe.routing import TokenContext
from moe.sharding.bindings.bindings import BINDINGS
from moe.spec import LanguageModelSpec, model_spec
from moe.spec.adapter_names import A
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageModel, build_model
from tests.language.adapted import adapter_pair, with_random_b, write_adapter, write_base
from tests.language.families import FAMILIES
from tests.language.model_pairs import as_double
from tests.language.test_families import assert_close, loss_of, their_logits, tokens_of
from tests.parity.language_models import ATTENTIONS, language_model

# PEFT itself uses it.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
SEED = 11


def mask_of(name: str, ids: Tensor, num_columns: int, probability: float, step: int) -> Tensor:
    """Factors of x before the adapter of the matrix `name`, `[*ids.shape, num_columns]` in float64."""
    key = fold(SEED, step, Purpose.ADAPTER_DROPOUT, fold_name(0, name))
    return keep_mask(key, ids, num_columns, 1 - probability).double() / (1 - probability)


class OurMasks(nn.Module):
    """Module in place of PEFT's dropout."""

    step = 0

    def __init__(self, name: str, probability: float) -> None:
        super().__init__()
        self.name, self.probability = name, probability

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x[..., 0].numel()).view(x.shape[:-1])
        return x * mask_of(self.name, ids, x.shape[-1], self.probability, self.step)


@pytest.mark.sample(3)
@pytest.mark.parametrize("probability", [0.1, 0.6])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_dropout_is_pefts_with_our_masks(family: str, probability: float, tmp_path: Path) -> None:
    """For all that PEFT wraps as modules: attention, and the feed-forward layers of models without experts. Logits and
    every gradient, at several steps."""
    import peft  # takes seconds, in each process that collects this file

    random = Random(f"dropout {family} {probability}")
    base, fields = write_base(FAMILIES[family](random), tmp_path, 3)
    targets = ["*.attention.*", "*.dense.*"] if family in ("llama", "qwen3") else ["*.attention.*"]
    adapter = {"rank": 2, "alpha": 3.0, "dropout": probability, "targets": targets}
    pair = adapter_pair(base, {**fields, "adapter": adapter}, tmp_path, 3)
    spec, model, reference = pair.spec, pair.model, pair.reference.train()
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["lora_dropout"] == probability
    adapter_halves = halves(spec, BY_TYPE[family])
    names = {
        half.place.module: half.parameter_name.removesuffix(A)
        for half in adapter_halves
        if half.parameter_name.endswith(A)
    }
    lora_layers = [
        (path, child) for path, child in reference.named_modules() if isinstance(child, peft.tuners.lora.Linear)
    ]
    assert len(lora_layers) == len(names)
    for path, layer in lora_layers:
        assert layer.lora_dropout["default"].p == probability
        layer.lora_dropout["default"] = OurMasks(names[path.removeprefix("base_model.model.")], probability)
    tokens = tokens_of(random, spec.vocab_size, 2, 13)
    for step in (0, 1, 7):
        OurMasks.step = step
        with as_double():
            expected = their_logits(reference, tokens)
            loss_of(expected, tokens).backward()
        logits = model(tokens, BatchContext(step=step, seed=SEED))
        assert_close(logits, expected)
        loss_of(logits, tokens).backward()
        own_gradients = {
            name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
        }
        gradients = {
            f"base_model.model.{path}.lora_{half}.default.weight": reference.get_submodule(f"base_model.model.{path}")
            .get_submodule(f"lora_{half}.default").weight.grad
            for path in names for half in "AB"
        }  # fmt: skip
        assert len(own_gradients) == len(gradients)
        squares = sum(float(gradient.square().sum()) for gradient in gradients.values())
        assert sum(float(gradient.square().sum()) for gradient in own_gradients.values()) == pytest.approx(
            squares, rel=1e-8
        )
        for path, name in names.items():
            of_a = gradients[f"base_model.model.{path}.lora_A.default.weight"]
            assert_close(own_gradients[name + A], of_a)
        for module in (model, reference):
            module.zero_grad()
    plain = model.eval()(tokens)
    assert (plain - logits).abs().max() > 1e-3, "nothing is dropped where nothing is trained"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_dropout_of_shared_experts(activation: str, recompute: bool) -> None:
    """Compared with plain operations."""
    generator = torch.Generator().manual_seed(5)
    layer = SharedExperts(build_activation(activation))
    layer.recompute, layer.lora_scales = recompute, {"w_in": 0.7, "w_gate": 0.5, "w_out": 0.9}
    gate_names = ["w_gate"] if layer.activation.is_gated else []
    for name in ["w_in", *gate_names, "w_out"]:
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
        scale = layer.lora_scales[name]
        return x @ matrix + scale * (x * mask_of(f"shared.{name}", ids, x.shape[1], 0.4, 3)) @ a.t() @ b.t()

    up = plain(x, "w_in")
    expected = plain(layer.activation.differentiable_forward(up, plain(x, "w_gate") if gate_names else up), "w_out")
    output = layer(x, DropoutKey(TokenContext(step=3, seed=SEED), ids))
    assert_close(output, expected)
    weights, inputs = torch.randn_like(expected), [x, *layer.parameters()]
    for gradient, reference_gradient in zip(
        torch.autograd.grad((output * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        assert_close(gradient, reference_gradient)


def test_dropout_of_routers() -> None:
    """One token at a time: the adapter then adds a matrix that its mask determines."""
    fields = language_model(next(iter(ATTENTIONS)), router="softmax_topk", aux_coefficient=0.0, top_k=2).model_dump()
    adapter = {"rank": 2, "alpha": 5.0, "dropout": 0.5, "targets": ["*.router"]}
    model = with_random_b(build_model(LanguageModelSpec(**{**fields, "adapter": adapter}), dtype=torch.float64))
    layer = model.layers[1].feed_forward.moe
    name = "layers.1.feed_forward.moe.router"
    plain_model = with_random_b(build_model(LanguageModelSpec(**{**fields, "adapter": None}), dtype=torch.float64))
    plain = plain_model.layers[1].feed_forward.moe
    plain.load_state_dict({key: tensor for key, tensor in layer.state_dict().items() if "lora" not in key})
    before = plain.router.detach().clone()
    x = torch.randn(40, 16, dtype=torch.float64)
    ids = torch.arange(100, 140)
    output = layer(x, TokenContext(ids, step=4, seed=SEED))[0]
    masks = mask_of(name, ids, 16, 0.5, 4)
    for index in range(40):
        addition = 2.5 * (masks[index][:, None] * layer.router_lora_a.t()) @ layer.router_lora_b.t()
        plain.router.data = before + addition.detach()
        assert_close(
            output[index], plain(x[index : index + 1], TokenContext(ids[index : index + 1], step=4, seed=SEED))[0][0]
        )


def test_experts_have_no_dropout() -> None:
    fields = language_model(next(iter(ATTENTIONS)), router="softmax_topk").model_dump()
    tokens = tokens_of(Random(1), fields["vocab_size"], 2, 9)
    adapter: dict[str, Any] = {"rank": 2, "targets": ["*.experts.*"]}
    logits = [
        with_seed(LanguageModelSpec(**{**fields, "adapter": {**adapter, "dropout": dropout}}))(tokens)
        for dropout in (0.0, 0.5)
    ]
    assert torch.equal(*logits)


def with_seed(spec: LanguageModelSpec) -> LanguageModel:
    torch.manual_seed(0)
    return with_random_b(build_model(spec, dtype=torch.float64)).train()


def test_a_model_with_dropout_is_not_captured() -> None:
    draws = DropoutKey(TokenContext(), torch.arange(4))
    masks = AdapterDropout(0.1, "layers.0.attention.query.weight").masks_for(draws)
    assert masks.apply_to(torch.ones(4, 3)).shape == (4, 3)
    with overriding(BINDINGS), pytest.raises(ValueError, match=r"set adapter\.dropout to 0"):
        masks.apply_to(torch.ones(4, 3))


@pytest.mark.parametrize("targets", [["*.attention.*"], None, ["*.attention.*", "*.router"]])
def test_dropout_is_in_pefts_config_where_peft_accepts_it(targets: list[str] | None, tmp_path: Path) -> None:
    """Not with targets that PEFT wraps as parameters, for which it refuses dropout."""
    import peft  # takes seconds, in each process that collects this file

    base, fields = write_base(FAMILIES["mixtral"](Random(2)), tmp_path, 3)
    spec = model_spec({**fields, "adapter": {"rank": 2, "dropout": 0.2, "targets": targets}})
    write_adapter(spec, tmp_path, build_model(spec))
    dropout = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["lora_dropout"]
    assert dropout == (0.2 if targets == ["*.attention.*"] else 0.0)
    peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    adapter = {"from": str(tmp_path / "adapter")}
    for overrides, expected in (({}, dropout), ({"dropout": 0.3}, 0.3)):
        model_fields = {"from": str(tmp_path / "base"), "adapter": {**adapter, **overrides}}
        assert expand_model(model_fields, None)["adapter"]["dropout"] == expected
