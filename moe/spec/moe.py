"""Spec of a mixture-of-experts layer."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    StrictBool,
    model_serializer,
    model_validator,
)

from moe.spec.base import Count, Fraction, NonNegative, Positive, Spec
from moe.spec.errors import Problem, SpecError
from moe.spec.parameter import Parameter, Size, matrix, norm, with_prefix
from moe.spec.routers import DEFAULT, RouterSpec, flatten_schema, router_fields, router_spec


class MoESpec(Spec):
    """Mixture-of-experts layer: its router and its experts.

    The router's fields are written next to the layer's, `MoESpec(num_experts=8, router="softmax_topk", top_k=4, ...)`;
    those of other routers are refused.
    """

    model_config = ConfigDict(json_schema_extra=flatten_schema)

    if TYPE_CHECKING:  # type checkers do not know the router's fields

        def __init__(self, /, **fields: Any) -> None: ...

    routing: Annotated[SerializeAsAny[RouterSpec], BeforeValidator(router_spec)] = Field(
        default=DEFAULT, validation_alias="router"
    )
    """Spec of the class in `routers.ROUTERS` that `router` names. Not a union type, so that external routers can be
    added."""
    num_experts: Count = Field(le=1_000_000)
    model_dim: Count
    """M, the model dimension."""
    hidden_dim: Count
    """H, the hidden dimension of one expert."""
    activation: Literal["relu", "relu2", "gelu", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped"] = "relu"
    """Activation of experts. `relu`, its square `relu2` (arXiv 2109.08668) and `gelu` have two matrices; `swiglu`,
    `geglu` (arXiv 2002.05202), `geglu_tanh`, with the tanh approximation of GELU (Gemma), and GPT-OSS's
    `swiglu_clamped` (arXiv 2508.10925) also one for the gate. `swiglu_clamped` is gate · sigmoid(alpha · gate) · (up +
    1), with gate clamped above at the limit, and up within ± the limit."""
    activation_alpha: Positive = 1.702
    """For `swiglu_clamped`: factor of the gate in the sigmoid."""
    activation_limit: Positive = 7.0
    """For `swiglu_clamped`: upper bound of gate, and bound of |up|."""
    apply_gates_to: Literal["outputs", "inputs"] = "outputs"
    """Whether a token's weights multiply the outputs of its experts, or their inputs (Llama 4)."""
    expert_bias: StrictBool = False
    """Whether each matrix of a routed expert has a bias."""
    latent_dim: Count | None = None
    """Dimension to which the experts' input is projected, and from which their weighted output is projected back
    (LatentMoE of Nemotron 3). None: experts have the model dimension."""
    shared_hidden_dim: Count | None = None
    """Hidden dimension of all shared experts together, which every token uses (DeepSeekMoE, arXiv 2401.06066). None: no
    shared experts."""
    shared_gate: StrictBool = False
    """Whether the shared experts' output is multiplied by a sigmoid gate per token (Qwen2-MoE, arXiv 2407.10671)."""
    logit_bias: StrictBool = False
    """Whether router logits have a trained bias per expert, for choices and weights (GPT-OSS); `selection_bias` is for
    choices only."""
    router_norm: StrictBool = False
    """Whether the router's input has an RMS norm without weights, followed by a trained scale divided by √M
    (Gemma 4)."""
    expert_scale: StrictBool = False
    """Whether each expert has a trained factor of its weights (Gemma 4)."""
    branch_norms: StrictBool = False
    """Whether routed and shared experts each have norms of their own before and after them, in place of the layer's
    norm before both, so that the router's input is the residual stream (Gemma 4)."""
    group_tokens: Count = 1024
    """Positions per token group. Groups are routed independently; they depend on the data, not on the layout. Default
    for language models: one sequence (`data.max_tokens`) if the model is `from` a folder, or if the preset's value (or
    1024) does not hold whole sequences or does not divide the batch."""
    input_jitter: Fraction = 0.0
    """In training, the router's input is multiplied elementwise by Uniform(1 - jitter, 1 + jitter) (arXiv 2101.03961,
    section 2.4)."""
    z_coefficient: NonNegative = 0.0
    """Coefficient of the router z-loss (ST-MoE, arXiv 2202.08906, eq. 5)."""

    @model_validator(mode="before")
    @classmethod
    def _with_routing(cls, fields: Any) -> Any:
        """Separate the router's fields from the layer's."""
        if not isinstance(fields, dict) or not (router_names := fields.keys() & router_fields()):
            return fields
        layer = {name: value for name, value in fields.items() if name not in router_names}
        return {**layer, "router": {name: value for name, value in fields.items() if name in router_names}}

    @model_serializer(mode="wrap")
    def _written_flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        layer = handler(self)
        return {**layer.pop("routing", {}), **layer}

    @model_validator(mode="after")
    def _coherent(self) -> "MoESpec":
        if problems := list(self._problems()):
            raise SpecError(problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        yield from self.routing.problems(self.num_experts)
        if self.shared_gate and self.shared_hidden_dim is None:
            yield Problem("requires", "shared_gate", True, "requires shared experts",
                          "set shared_hidden_dim, or omit it")  # fmt: skip
        if self.branch_norms and self.shared_hidden_dim is None:
            yield Problem("requires", "branch_norms", True, "requires shared experts",
                          "set shared_hidden_dim, or omit it")  # fmt: skip
        if self.activation != "swiglu_clamped":
            for name in ("activation_alpha", "activation_limit"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    yield Problem("not_applicable", name, value, f"does not apply to the activation {self.activation}",
                                  "omit it, or use the activation swiglu_clamped")  # fmt: skip

    if not TYPE_CHECKING:  # type-checked code reads `routing`

        def __getattr__(self, name: str) -> Any:
            """A field of the router, which is written next to the layer's own."""
            if name in router_fields() and hasattr(routing := self.routing, name):
                return getattr(routing, name)
            return super().__getattr__(name)

    @property
    def experts_per_token(self) -> int:
        """K, experts per token."""
        return self.routing.experts_per_token(self.num_experts)

    @property
    def resolved(self) -> "MoESpec":
        """The layer with unset fields written out; equal for specs with equal meaning."""
        return self.model_copy(update={"routing": self.routing.resolved})

    @property
    def expert_dim(self) -> int:
        """Dimension of the inputs and outputs of routed experts."""
        return self.latent_dim or self.model_dim

    @property
    def num_matrices(self) -> int:
        """Per expert: two, or three with a gated activation."""
        return 2 if self.activation in ("relu", "relu2", "gelu") else 3

    @property
    def activation_settings(self) -> tuple[float, ...]:
        """Arguments of the activation."""
        return (self.activation_alpha, self.activation_limit) if self.activation == "swiglu_clamped" else ()

    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters of the router, experts and shared experts."""
        width: Size = ("model", self.model_dim)
        gates = ("w_gate",) if self.num_matrices == 3 else ()
        table = [matrix("router", width, ("none", self.num_experts), self.model_dim)]
        if self.logit_bias:
            table.append(Parameter("logit_bias", (self.num_experts,), ("none",), 0.0))
        if self.router_norm:
            table.append(Parameter("router_scale", (self.model_dim,), ("none",)))
        if self.expert_scale:
            table.append(Parameter("expert_scale", (self.num_experts,), ("none",)))
        if self.branch_norms:
            names = ("norm", "post_norm", "shared_norm", "shared_post_norm")
            table += [norm(name, self.model_dim) for name in names]
        inner: Size = ("expert_hidden", self.hidden_dim)
        outer: Size = width if self.latent_dim is None else ("none", self.latent_dim)
        if self.latent_dim is not None:
            table.append(matrix("latent_in", width, outer, self.model_dim))
            table.append(matrix("latent_out", outer, width, self.latent_dim))
        expert_table = [matrix(name, outer, inner, outer[1]) for name in ("w_in", *gates)]
        expert_table.append(matrix("w_out", inner, outer, self.hidden_dim))
        if self.expert_bias:
            biases = ["b_in", *(["b_gate"] if gates else [])]
            expert_table += [Parameter(name, (self.hidden_dim,), ("expert_hidden",), 0.0) for name in biases]
            expert_table.append(Parameter("b_out", (self.expert_dim,), ("expert_output",), 0.0))
        table += with_prefix("experts", (parameter.times("expert", self.num_experts) for parameter in expert_table))
        if self.shared_hidden_dim is not None:
            shared_hidden: Size = ("none", self.shared_hidden_dim)
            shared_table = [matrix(name, width, shared_hidden, self.model_dim) for name in ("w_in", *gates)]
            shared_table.append(matrix("w_out", shared_hidden, width, self.shared_hidden_dim))
            if self.shared_gate:
                shared_table.append(matrix("gate", width, ("none", 1), self.model_dim))
            table += with_prefix("shared", shared_table)
        return tuple(table)

    @property
    def parameters_per_expert(self) -> int:
        return sum(parameter.numel for parameter in self.parameters() if parameter.of_experts) // self.num_experts
