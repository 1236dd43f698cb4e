"""A mixture computes what its dense folder does, in every family that can express it, here and as transformers loads
its export."""

import copy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moe.export.hugging_face import load_hf, save_hf
from moe.layers import MoELayer
from moe.random import init_uniform_
from moe.routing import Routing
from moe.spec import LanguageModelSpec, UpcycleSpec
from moe.tasks.language import LanguageModel
from tests.grid import first_seed_of
from tests.language.families import FAMILIES
from tests.language.model_pairs import as_double, their_model
from tests.language.test_families import their_logits, tokens_of

CLOSE = 1e-10
"""Tolerance, relative to the largest value."""
CASES = (
    ("llama", "mixtral"), ("llama", "qwen2_moe"), ("llama", "granitemoe"), ("llama", "granitemoeshared"),
    ("llama", "glm4_moe"), ("llama", None), ("qwen3", "qwen3_moe"), ("qwen3", "glm4_moe"), ("qwen3", None),
    ("mistral", "mixtral"), ("mistral", None), ("qwen2", "qwen2_moe"), ("qwen2", "glm4_moe"),
)  # fmt: skip
"""(dense family, family of its mixtures or None)"""
SHARED_EXPERT_FORMS = ("qwen2_moe", "granitemoeshared", "glm4_moe")
DENSE_LAYERS = ("qwen3_moe", "qwen2_moe")


@dataclass(frozen=True)
class Case:
    """A dense model, and the mixture that was made of its folder."""

    dense: nn.Module
    mixture: LanguageModel
    folder: Path

    @property
    def spec(self) -> LanguageModelSpec:
        return self.mixture.spec

    @property
    def upcycle(self) -> UpcycleSpec:
        assert self.spec.upcycle is not None
        return self.spec.upcycle


def draw_upcycling(family: str, form: str | None, random: Random) -> tuple[dict[str, Any], UpcycleSpec]:
    """A config, and how its model becomes a mixture of that form."""
    granularity, num_experts = random.randint(1, 5), random.randint(2, 5)
    num_shared = random.randrange(granularity) if form in SHARED_EXPERT_FORMS else 0
    if form in ("qwen2_moe", "glm4_moe"):  # which have shared experts at least
        granularity = max(2, granularity)
        num_shared = max(1, num_shared)
    experts_per_token = random.randint(1 if granularity - num_shared > 1 else 2, num_experts)
    config = FAMILIES[family](random)
    config |= {"intermediate_size": granularity * random.randint(1, 6)}
    if family == "qwen3":  # whose windows of some layers no mixture has
        config |= {"use_sliding_window": form != "glm4_moe" and random.random() < 0.5, "max_window_layers": 0}
    if (family, form) == ("qwen2", "glm4_moe"):
        config["use_sliding_window"] = False
    has_no_biases = form in ("mixtral", "qwen2_moe", "glm4_moe") or (family, form) == ("llama", None)
    if has_no_biases and "attention_bias" in config:
        config["attention_bias"] = False
    period = random.randint(1, config["num_hidden_layers"]) if form in DENSE_LAYERS else 1
    return config, UpcycleSpec(
        num_experts=num_experts, experts_per_token=experts_per_token, granularity=granularity, shared_slices=num_shared,
        every=period, form=form,
    )  # fmt: skip


def make_case(family: str, form: str | None, random: Random, folder: Path) -> Case:
    config, upcycle = draw_upcycling(family, form, random)
    dense = their_model(config, random.randrange(1000))
    dense.save_pretrained(folder / "dense")
    mixture = load_hf(folder / "dense", dtype=torch.float64, upcycle=upcycle, seed=random.randrange(1000))
    return Case(dense, mixture.eval(), folder)


@pytest.fixture(params=first_seed_of(CASES, 2))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    (family, form), seed = request.param
    return make_case(family, form, Random(f"upcycling {family} {form} {seed}"), tmp_path)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=CLOSE * float(expected.abs().max()))


def assert_same_function(case: Case, random: Random) -> None:
    """In training, in generation, and as exported."""
    tokens = tokens_of(random, case.spec.vocab_size, 3, random.choice([5, 40]))
    with torch.no_grad(), as_double():
        expected = their_logits(case.dense, tokens)
    with torch.no_grad():
        assert_close(case.mixture(tokens), expected)
        assert_close(case.mixture.train()(tokens), expected)
    save_hf(case.mixture.eval(), case.folder / "out")
    with torch.no_grad(), as_double():
        export, info = transformers.AutoModelForCausalLM.from_pretrained(
            case.folder / "out", dtype=torch.float64, attn_implementation="eager",
            experts_implementation="eager", output_loading_info=True,
        )  # fmt: skip
        assert export.config.model_type == case.upcycle.form
        assert_close(their_logits(export.eval(), tokens), expected)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.sample(4)
def test_a_mixture_computes_what_its_dense_model_does(case: Case, request: pytest.FixtureRequest) -> None:
    assert_same_function(case, Random(request.node.name))


@pytest.mark.slow
@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate], print_blob=True)
@given(forms=st.sampled_from(CASES), random=st.randoms(use_true_random=False))
def test_random_mixtures_compute_what_their_dense_models_do(forms, random, tmp_path_factory) -> None:
    assert_same_function(make_case(*forms, random, tmp_path_factory.mktemp("random")), random)


def cut(case: Case, layer: int, matrix: str, is_shared: bool) -> Tensor:
    """Reference: matrices `[E, in, out]` of experts, or that of shared ones `[in, out]`, slice by slice."""
    name = {"w_gate": "gate_proj", "w_in": "up_proj", "w_out": "down_proj"}[matrix]
    dense = case.dense.get_parameter(f"model.layers.{layer}.mlp.{name}.weight").detach()
    by_unit = dense.T if matrix == "w_out" else dense
    slices = by_unit.chunk(case.upcycle.granularity)
    assert case.spec.moe is not None
    if is_shared:
        rows = torch.cat(slices[: case.upcycle.shared_slices])
        factor = 2 if matrix == "w_out" and case.upcycle.form == "qwen2_moe" else 1
        return factor * (rows if matrix == "w_out" else rows.T)
    routed_slices = slices[case.upcycle.shared_slices :]
    factor = len(routed_slices) if matrix == "w_out" and case.upcycle.form != "glm4_moe" else 1
    group = [factor * (part if matrix == "w_out" else part.T) for part in routed_slices]
    return torch.stack(group * case.upcycle.num_experts)


@pytest.mark.sample(3)
def test_experts_are_slices_of_dense_layers(case: Case) -> None:
    layers, period = moe_layers(case), case.upcycle.every
    assert [layer.layer for layer in layers] == list(range(period - 1, case.spec.num_layers, period))
    for layer in layers:
        for matrix in ("w_in", "w_gate", "w_out"):
            assert torch.equal(getattr(layer.experts, matrix), cut(case, layer.layer, matrix, False)), matrix
            if case.upcycle.shared_slices:
                assert torch.equal(getattr(layer.shared, matrix), cut(case, layer.layer, matrix, True)), matrix


@pytest.mark.sample(3)
def test_tokens_choose_groups_of_slices_as_a_whole(case: Case) -> None:
    size, num_groups = case.upcycle.routed_slices, case.upcycle.num_experts
    routings: list[Routing] = []
    for layer in moe_layers(case):
        by_group = layer.router.detach().unflatten(1, (num_groups, size))
        assert torch.equal(by_group, by_group[..., :1].expand_as(by_group))
        assert len({tuple(column.tolist()) for column in by_group[..., 0].T}) == num_groups
        layer.register_forward_hook(lambda _module, _args, output: routings.append(output[1]))
    with torch.no_grad():
        case.mixture.train()(tokens_of(Random("groups"), case.spec.vocab_size, 4, 50))
    chosen_groups = set()
    for routing in routings:
        groups = routing.expert.sort(-1).values.unflatten(-1, (-1, size))
        assert torch.equal(groups % size, torch.arange(size).expand_as(groups))
        assert torch.equal(groups // size, (groups[..., :1] // size).expand_as(groups))
        chosen_groups |= set((groups // size).flatten().tolist())
    assert len(chosen_groups) > 1 or num_groups == 1, "not all tokens choose the same"


@pytest.mark.sample(3)
def test_tied_groups_are_chosen_as_a_whole(case: Case) -> None:
    """All groups tie where routers are zero."""
    tokens = tokens_of(Random("ties"), case.spec.vocab_size, 2, 30)
    with torch.no_grad(), as_double():
        expected = their_logits(case.dense, tokens)
    with torch.no_grad():
        for layer in moe_layers(case):
            layer.router.zero_()
        assert_close(case.mixture(tokens), expected)


def moe_layers(case: Case) -> list[MoELayer]:
    return [module for module in case.mixture.modules() if isinstance(module, MoELayer)]


def test_noise_is_keyed_and_as_large_as_requested(tmp_path: Path) -> None:
    config, upcycle = draw_upcycling("llama", "mixtral", Random("noise"))
    config |= {"intermediate_size": 60, "hidden_size": 48, "num_hidden_layers": 2}
    their_model(config).save_pretrained(tmp_path / "dense")

    def weights(seed: int, noise: float) -> dict[str, Tensor]:
        variant = upcycle.model_copy(update={"noise": noise, "granularity": 2})
        return dict(load_hf(tmp_path / "dense", dtype=torch.float64, upcycle=variant, seed=seed).state_dict())

    plain, noisy, other_seed, repeat = weights(1, 0.0), weights(1, 0.1), weights(2, 0.1), weights(1, 0.1)
    for name, clean in plain.items():
        assert torch.equal(noisy[name], repeat[name])
        is_drawn = ".experts." in name or name.endswith(".router")
        assert torch.equal(noisy[name], other_seed[name]) != is_drawn, name
        if ".experts." not in name:
            assert torch.equal(noisy[name], clean), name
            continue
        relative, draws = noisy[name] / clean - 1, torch.empty_like(clean)
        init_uniform_(draws, 0.1, 1, f"{name}.noise")  # of standard deviation 0.1
        torch.testing.assert_close(relative, draws, rtol=0, atol=1e-12)
        groups = relative.unflatten(0, (upcycle.num_experts, -1))
        assert not torch.equal(groups[0], groups[1]), "copies are no longer the same"


def test_experts_part_as_they_are_trained(tmp_path: Path) -> None:
    """Copies get gradients of their own tokens, and routers of all of theirs."""
    case = make_case("qwen3", "qwen3_moe", Random("trained"), tmp_path)
    tokens = tokens_of(Random("tokens"), case.spec.vocab_size, 4, 20)
    before = copy.deepcopy(case.mixture.state_dict())
    optimizer = torch.optim.SGD(case.mixture.parameters(), lr=0.1)
    case.mixture.train()(tokens).square().mean().backward()
    optimizer.step()
    for name, parameter in case.mixture.named_parameters():
        if name.endswith(("router", "w_out")):
            assert not torch.equal(parameter, before[name]), name
        if name.endswith("experts.w_out"):
            groups = parameter.unflatten(0, (case.upcycle.num_experts, -1))
            assert not torch.equal(groups[0], groups[1])
