"""Whether a model can be cut up as a layout says."""

from collections.abc import Mapping

from moe.spec import ModelSpec
from moe.spec.errors import Problem


def fit_problems(model: ModelSpec, degrees: Mapping[str, int]) -> list[Problem]:
    """Every dimension of the model that a degree does not divide; `degrees` as a plan has them, by axis."""
    moe, found = model.moe, []

    def divides(path: str, number: int, axis: str, whole: str) -> None:
        degree = degrees.get(axis, 1)
        if number % degree:
            good = ", ".join(str(d) for d in range(1, min(number, 4 * degree) + 1) if number % d == 0)
            found.append(Problem(path, number, f"must be divisible by the {axis} degree (={degree}), {whole}",
                                 f"use another number, or a degree of {good}"))  # fmt: skip

    divides("model.num_heads", model.num_heads, "tensor", "since each rank has whole heads")
    for ffn_dim, layers in model.ffn_layers():
        if layers:
            divides("model.ffn_dim", ffn_dim, "tensor", "which it is split over")
    if moe is None:
        return found
    divides("model.moe.num_experts", moe.num_experts, "expert", "since each rank has whole experts")
    divides("model.moe.hidden_dim", moe.hidden_dim, "expert_tensor", "which it is split over")
    if moe.expert_bias:
        divides("model.moe.model_dim", model.model_dim, "expert_tensor", "which biases are split over")
    return found
