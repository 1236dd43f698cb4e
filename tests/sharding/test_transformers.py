"""Unmodified models of transformers equal one device in float64: losses, gradients and parameters over two steps,
without hints and with those of tensor parallelism."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe import sharding
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import Built, apply_on_one_device, cores, differences

Hints = dict[str, sharding.Split | sharding.Replicate | sharding.Shard]


class InFloat64(TorchFunctionMode):
    """Replaces explicit float32, as in rotary embeddings and norms, by float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wider(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()})


SIZES = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}


def causal(kind: str, num_layers: int, **options: Any) -> Built:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **SIZES, num_hidden_layers=num_layers, num_key_value_heads=2, use_cache=False, **options
    )
    words, is_word = text()
    labels = words.masked_fill(is_word == 0, -100)
    return getattr(transformers, f"{kind}ForCausalLM")(config), (words, is_word, None, None, None, labels)


def llama(attention: str, num_layers: int) -> Built:
    return causal("Llama", num_layers, attn_implementation=attention)


def mixtral(experts: str, num_layers: int) -> Built:
    return causal("Mixtral", num_layers, num_local_experts=4, output_router_logits=True, attn_implementation="sdpa",
                  experts_implementation=experts)  # fmt: skip


def t5(attention: str, num_layers: int) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=37, d_model=16, d_kv=4, d_ff=24, num_layers=num_layers, num_heads=4, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    words, is_word = text()
    labels = torch.randint(1, 37, (4, 5))
    return T5ForConditionalGeneration(config), (words, is_word, *[None] * 6, labels)


def vit(attention: str, num_layers: int) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**SIZES, num_hidden_layers=num_layers, image_size=12, patch_size=4,
                       num_labels=5, attn_implementation=attention)  # fmt: skip
    return ViTForImageClassification(config), (torch.randn(4, 3, 12, 12), torch.randint(0, 5, (4,)))


def text() -> tuple[Tensor, Tensor]:
    """(words, 1 for words and 0 for padding)"""
    words, is_word = torch.randint(1, 37, (4, 7)), torch.ones(4, 7, dtype=torch.int64)
    is_word[1, 5:] = 0
    return words, is_word


MODELS = {"llama": llama, "mixtral": mixtral, "t5": t5, "vit": vit}


def build(name: str, attention: str, num_layers: int = 2) -> Built:
    torch.manual_seed(2)
    model, batch = MODELS[name](attention, num_layers)
    for parameter in model.parameters():  # their initial values leave many gradients below 1e-6
        torch.nn.init.normal_(parameter, std=0.3)
    is_image = name == "vit"
    return model.double(), (batch[0].double() if is_image else batch[0], *batch[1:])


@dataclass(frozen=True)
class Case:
    """A model on a mesh, with some hints."""

    model: str
    attention: str
    """Implementation of attention, or of Mixtral's experts."""
    mesh: dict[str, int]
    hints: Hints = field(default_factory=dict)
    num_layers: int = 2

    def __str__(self) -> str:
        suffix = (", hinted" if self.hints else "") + (", one layer" if self.num_layers == 1 else "")
        return f"{self.model}, {self.attention}, {' x '.join(map(str, self.mesh.values()))}{suffix}"


def columns_and_rows(columns: tuple[str, ...], rows: tuple[str, ...], axis: str | None = None) -> Hints:
    """Hints that split layers by columns and by rows, as in Megatron; torch stores them transposed."""
    dims = dict.fromkeys(columns, 0) | dict.fromkeys(rows, 1)
    return {f"*.{name}.weight": sharding.Split(dim, axis) for name, dim in dims.items()}


LLAMA = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
T5 = ("q", "k", "v", "wi"), ("o", "wo")
EXPERTS = {"*.experts.gate_up_proj": sharding.Split(0), "*.experts.down_proj": sharding.Split(0)}
CASES = [
    Case("mixtral", "eager", {"a": 4}, EXPERTS, num_layers=1),
    Case("llama", "sdpa", {"a": 2}, num_layers=1),
    Case("llama", "sdpa", {"a": 4}, {"inputs": sharding.Split(0)}, num_layers=1),
    Case("llama", "sdpa", {"data": 2, "model": 2},
         {"inputs": sharding.Split(0, "data"), **columns_and_rows(*LLAMA, "model")}, num_layers=1),
    Case("t5", "sdpa", {"a": 2}, num_layers=1),
    Case("vit", "sdpa", {"a": 4}),
    Case("vit", "eager", {"a": 4}, {"inputs.0": sharding.Split(2), "*.bias": sharding.Replicate()}),
]  # fmt: skip
MORE = [
    Case("mixtral", "eager", {"data": 2, "expert": 2},
         {"inputs": sharding.Split(0, "data"), "*.experts.*": sharding.Split(0, "expert")}),
    Case("mixtral", "eager", {"a": 2}),
    Case("mixtral", "batched_mm", {"a": 2}, num_layers=1),
    Case("llama", "sdpa", {"a": 2}),
    Case("llama", "sdpa", {"a": 2, "b": 2}),
    Case("llama", "eager", {"a": 4}),
    Case("t5", "eager", {"a": 4}, columns_and_rows(*T5)),
    Case("vit", "eager", {"a": 2}),
    Case("vit", "sdpa", {"a": 2, "b": 2}),
    Case("llama", "eager", {"a": 2}, columns_and_rows(*LLAMA)),
    Case("t5", "eager", {"a": 4}),
    Case("t5", "sdpa", {"data": 2, "model": 2},
         {"inputs": sharding.Split(0, "data"), **columns_and_rows(*T5, "model")}, num_layers=1),
]  # fmt: skip


def on_ranks(case: Case) -> tuple[list[str], dict[str, str]]:
    with InFloat64():
        wrong, plan = differences(
            lambda: build(case.model, case.attention, case.num_layers), case.mesh, case.hints or None, steps=2
        )
    return wrong, plan.parameters


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.grid) for case in MORE)], ids=str)
def test_losses_and_gradients_are_those_of_one_device(ranks: Pools, case: Case) -> None:
    for wrong, parameters in ranks[math.prod(case.mesh.values())].run(on_ranks, case):
        assert wrong == []
        if "*.q_proj.weight" in case.hints:
            query_placements = [placements.split() for name, placements in parameters.items() if "q_proj" in name]
            assert {placements[-1] for placements in query_placements} == {"S(0)"}


@pytest.mark.slow
def test_results_keep_their_type() -> None:
    with InFloat64():
        model, batch = build("llama", "sdpa", num_layers=1)
        applied = apply_on_one_device(model, *batch)
        actual, expected = applied(*batch), model(*batch)
    assert type(actual) is type(expected)
    assert torch.allclose(actual.logits, expected.logits, rtol=1e-10, atol=1e-10)
    actual.loss.backward()
    assert applied.get_parameter("lm_head.weight").grad is not None


@pytest.mark.slow
def test_experts_as_grouped_products_equal_one_device() -> None:
    model, batch = build("mixtral", "grouped_mm", num_layers=2)
    model = model.float()  # torch's kernel does not support float64
    applied = apply_on_one_device(model, *batch)
    assert torch.allclose(applied(*batch).loss, model(*batch).loss, rtol=1e-5)


@pytest.mark.slow
def test_planning_restores_the_models_implementation_of_experts() -> None:
    model, batch = build("mixtral", "eager", num_layers=1)
    with InFloat64():
        sharding.plan(model, batch, cores(2), mesh={"a": 2})
    assert model.config._experts_implementation == "eager"
