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
from moe.spec.adapter import A
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageModel, build_model
from tests.language.adapted import adapted, with_random_b, write_adapter, write_base
from tests.language.families import FAMILIES, as_double
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("probability", [0.1, 0.6])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_dropout_is_pefts_with_our_masks(family: str, probability: float, tmp_path: Path) -> None:
    """On all that PEFT wraps as modules: attention, and the feed-forward layers of models without experts. Logits and
    every gradient, at several steps."""
    import peft  # takes seconds, in each process that collects this file

    random = Random(f"dropout {family} {probability}")
    base, fields = write_base(FAMILIES[family](random), tmp_path, 3)
    targets = ["*.attention.*", "*.dense.*"] if family in ("llama", "qwen3") else ["*.attention.*"]
    adapter = {"rank": 2, "alpha": 3.0, "dropout": probability, "targets": targets}
    both = adapted(base, {**fields, "adapter": adapter}, tmp_path, 3)
    spec, ours, theirs = both.spec, both.ours, both.theirs.train()
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["lora_dropout"] == probability
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
def test_dropout_of_shared_experts(activation: str, recompute: bool) -> None:
    """Beside the same in plain operations."""
    generator = torch.Generator().manual_seed(5)
    layer = SharedExperts(build_activation(activation))
    layer.recompute, layer.lora_scale = recompute, 0.7
    gated = ["w_gate"] if layer.activation.is_gated else []
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
    expected = plain(layer.activation.differentiable_forward(up, plain(x, "w_gate") if gated else up), "w_out")
    found = layer(x, DropoutKey(TokenContext(step=3, seed=SEED), ids))
    assert_close(found, expected)
    weights, inputs = torch.randn_like(expected), [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        assert_close(one, other)


def test_dropout_of_routers() -> None:
    """One token at a time: then what the adapter adds is a matrix, that of the token's own mask."""
    given = language_model(next(iter(ATTENTIONS)), router="softmax_topk", aux_coefficient=0.0, top_k=2).model_dump()
    adapter = {"rank": 2, "alpha": 5.0, "dropout": 0.5, "targets": ["*.router"]}
    model = with_random_b(build_model(LanguageModelSpec(**{**given, "adapter": adapter}), dtype=torch.float64))
    layer = model.layers[1].feed_forward.moe
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


def test_experts_have_no_dropout() -> None:
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


def test_a_model_with_dropout_is_not_captured() -> None:
    draws = DropoutKey(TokenContext(), torch.arange(4))
    dropped = AdapterDropout(0.1, "layers.0.attention.query.weight").masks_for(draws)
    assert dropped.apply_to(torch.ones(4, 3)).shape == (4, 3)
    with overriding(BINDINGS), pytest.raises(ValueError, match=r"set adapter\.dropout to 0"):
        dropped.apply_to(torch.ones(4, 3))


@pytest.mark.parametrize("targets", [["*.attention.*"], None, ["*.attention.*", "*.router"]])
def test_dropout_is_in_pefts_config_where_peft_accepts_it(targets: list[str] | None, tmp_path: Path) -> None:
    """Not beside parameters that PEFT wraps, which it refuses any with."""
    import peft  # takes seconds, in each process that collects this file

    base, fields = write_base(FAMILIES["mixtral"](Random(2)), tmp_path, 3)
    spec = model_spec({**fields, "adapter": {"rank": 2, "dropout": 0.2, "targets": targets}})
    write_adapter(spec, tmp_path, build_model(spec))
    dropout = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["lora_dropout"]
    assert dropout == (0.2 if targets == ["*.attention.*"] else 0.0)
    peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    adapter = {"from": str(tmp_path / "adapter")}
    for beside, expected in (({}, dropout), ({"dropout": 0.3}, 0.3)):
        given = {"from": str(tmp_path / "base"), "adapter": {**adapter, **beside}}
        assert expand_model(given, None)["adapter"]["dropout"] == expected
