"""Upcycling: experts that start as copies of a dense model's feed-forward layers."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from moe.spec.base import Count, CountOrZero, NonNegative, Spec
from moe.spec.errors import Problem, SpecError
from moe.spec.moe import MoESpec
from moe.spec.routers.router import GatedTopKSpec

MixtureFamily = Literal["mixtral", "qwen3_moe", "qwen2_moe", "granitemoe", "granitemoeshared", "glm4_moe"]

_REMEDY = "write model: {from: FOLDER, upcycle: {...}}, without the fields that these determine"


class UpcycleSpec(Spec):
    """Sparse upcycling (arXiv 2212.05055): a dense model as a mixture that initially computes the same function.

    Each feed-forward layer is split along its hidden units into `granularity` slices, each copied `num_experts` times.
    One copy of every slice forms a virtual group (arXiv 2410.07524): its router columns start equal, so that a token
    takes whole groups, whose slices sum to the dense layer.
    """

    num_experts: Count = Field(le=1_000_000)
    """N, copies of the dense layer."""
    experts_per_token: Count = 2
    """K, copies per token."""
    granularity: Count = Field(default=1, le=1024)
    """g, slices of the dense layer: N · g experts, of which a token takes K · g."""
    shared_slices: CountOrZero = 0
    """Slices that all tokens use, as shared experts; each copy has the other slices."""
    every: Count = 1
    """Every n-th layer has experts, starting with the n-th; the others stay dense."""
    form: MixtureFamily | None = None
    """Hugging Face family of the mixture. Default: the first that can represent it."""
    noise: NonNegative = Field(default=0.0, le=1)
    """Standard deviation of noise relative to each weight: expert weights are multiplied by independent draws from
    Uniform(1 ± √3 · noise). Above 0, the initial function differs from the dense model's."""

    @model_validator(mode="after")
    def _coherent(self) -> "UpcycleSpec":
        if problems := list(self._problems()):
            raise SpecError(problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        if self.experts_per_token > self.num_experts:
            yield Problem("out_of_range", "experts_per_token", self.experts_per_token,
                          f"must be at most num_experts (={self.num_experts})", "lower it")  # fmt: skip
        if self.shared_slices >= self.granularity:
            yield Problem("out_of_range", "shared_slices", self.shared_slices,
                          f"must be below granularity (={self.granularity}), to leave slices for experts",
                          "lower it, or raise granularity")  # fmt: skip
        elif self.experts_per_token * self.routed_slices == 1:
            rule = "gives a token one expert, with weight 1 regardless of its score, so the router never learns"
            yield Problem("out_of_range", "experts_per_token", 1, rule, "use 2 or more, or a higher granularity")

    @property
    def routed_slices(self) -> int:
        """Routed experts per virtual group."""
        return self.granularity - self.shared_slices

    def problems_of_dense(self, ffn_dim: int, num_layers: int) -> Iterator[Problem]:
        """Problems with upcycling a dense model of these sizes."""
        if ffn_dim % self.granularity:
            fits = max(number for number in range(1, self.granularity) if ffn_dim % number == 0)
            rule = f"must divide the hidden dimension of the dense layers (={ffn_dim})"
            yield Problem(
                "not_divisible", "granularity", self.granularity, rule, f"use {fits}, or another divisor of it"
            )
        if self.every > num_layers:
            yield Problem(
                "out_of_range", "every", self.every, f"must be at most the number of layers (={num_layers})", "lower it"
            )

    def layer_of(self, ffn_dim: int, activation: str) -> dict[str, Any]:
        """Fields of the MoE layer that replaces a dense layer, for any router."""
        width = ffn_dim // self.granularity
        shared_fields = {"shared_hidden_dim": self.shared_slices * width} if self.shared_slices else {}
        return {
            "num_experts": self.num_experts * self.routed_slices, "top_k": self.experts_per_token * self.routed_slices,
            "hidden_dim": width, "activation": activation, **shared_fields,
        }  # fmt: skip

    def problems_of_mixture(
        self, moe: MoESpec, moe_layers: Sequence[int], num_layers: int, ffn_dim: int | None, activation: str
    ) -> Iterator[Problem]:
        """Problems for fields of a mixture that would change the dense model's function. `moe` describes its layers
        `moe_layers`, `ffn_dim` and `activation` its dense layers."""
        expected_fields = self.layer_of(moe.hidden_dim * self.granularity, activation)
        expected_fields |= {"expert_bias": False, "logit_bias": False, "num_expert_groups": 1}
        expected_fields |= dict.fromkeys(("router_norm", "expert_scale", "branch_norms"), False)
        expected_fields.setdefault("shared_hidden_dim", None)
        if not isinstance(moe.routing, GatedTopKSpec):
            rule = "must be softmax_topk or sigmoid_topk, whose weights per token have a constant sum"
            yield Problem("unsupported", "moe.router", moe.routing.router, f"{rule} for all tokens", _REMEDY)
            return
        for name, value in expected_fields.items():
            if (actual := getattr(moe, name)) != value:
                yield Problem("mismatch", f"moe.{name}", actual, f"must be {value}, as set by upcycle", _REMEDY)
        if not (moe.routing.renormalizes or getattr(moe.routing, "softmax", None) == "after_topk"):
            rule = "leaves the sum of a token's weights to its scores, but the dense layers weigh 1"
            yield Problem("unsupported", "moe.renormalize_gates", False, rule, _REMEDY)
        layers = list(range(self.every - 1, num_layers, self.every))
        if list(moe_layers) != layers:
            rule = f"must put experts in the layers {layers}, as set by upcycle.every (={self.every})"
            yield Problem("mismatch", "moe_every", list(moe_layers), rule, _REMEDY)
        if ffn_dim is not None and moe.hidden_dim * self.granularity != ffn_dim:
            rule = f"must be ffn_dim (={ffn_dim}) divided by upcycle.granularity (={self.granularity})"
            yield Problem("mismatch", "moe.hidden_dim", moe.hidden_dim, rule, _REMEDY)

    def experts_factor(self, moe: MoESpec) -> float:
        """Initial factor of the experts' last matrices. Cancels the weights, which sum to 1 over a group's slices, and
        the router's scaling factor."""
        assert isinstance(moe.routing, GatedTopKSpec)
        return self.routed_slices / moe.routing.routed_scaling_factor

    def shared_factor(self, moe: MoESpec) -> float:
        """Initial factor of the shared experts' last matrices: 2 with a gate, which is initially sigmoid(0) = ½."""
        return 2.0 if moe.shared_gate else 1.0


def upcycling_problems(
    upcycle: UpcycleSpec | None,
    from_folder: str | None,
    moe: MoESpec | None,
    moe_layers: Sequence[int],
    *,
    num_layers: int,
    ffn_dim: int | None,
    ffn_activation: str,
    has_adapter: bool,
) -> Iterator[Problem]:
    """Yield problems of a model's upcycling, if it has any, with its other fields."""
    if upcycle is None:
        return
    if from_folder is None:
        rule = "requires a dense model to start from"
        yield Problem("requires", "upcycle", None, rule, "name its folder by from, or omit upcycle")
    elif moe is None:
        rule = "excludes moe: it creates the experts itself"
        yield Problem("requires", "upcycle", None, rule, "write only model: {from: FOLDER, upcycle: {...}}")
    else:
        yield from upcycle.problems_of_mixture(moe, moe_layers, num_layers, ffn_dim, ffn_activation)
    if has_adapter:
        rule = "cannot be used with upcycle: the base is created when the job starts, and no folder has it"
        yield Problem("conflict", "adapter", None, rule, "export the mixture and name that folder by from, or omit one")
