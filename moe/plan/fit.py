"""Check that a model's dimensions are divisible by the degrees of a layout."""

from collections.abc import Iterator, Mapping

from moe.spec import ModelSpec
from moe.spec.errors import Problem


def fit_problems(model: ModelSpec, degrees: Mapping[str, int]) -> list[Problem]:
    """Return a Problem for each model dimension that its axis's degree does not divide."""
    problems = []
    for path, number, axis, reason in divided_dims(model):
        degree = degrees.get(axis, 1)
        if number % degree:
            good = ", ".join(str(d) for d in range(1, min(number, 4 * degree) + 1) if number % d == 0)
            problems.append(Problem("not_divisible", path, number,
                                    f"must be divisible by the {axis} degree (={degree}), {reason}",
                                    f"use another number, or a degree of {good}"))  # fmt: skip
    return problems


def divided_dims(model: ModelSpec) -> Iterator[tuple[str, int, str, str]]:
    """Yield (spec path, number, axis whose degree must divide it, reason)."""
    for path, heads in model.heads.items():
        parts = "channels" if path == "model_dim" else "heads"
        yield f"model.{path}", heads, "tensor", f"since each rank has whole {parts}"
    for ffn_dim in sorted(model.ffn_dims()):
        yield "model.ffn_dim", ffn_dim, "tensor", "which it is split over"
    if (moe := model.moe) is None:
        return
    yield "model.moe.num_experts", moe.num_experts, "expert", "since each rank has whole experts"
    yield "model.moe.hidden_dim", moe.hidden_dim, "expert_tensor", "which it is split over"
    if moe.expert_bias:
        path = "model_dim" if moe.latent_dim is None else "latent_dim"
        yield f"model.moe.{path}", moe.expert_dim, "expert_tensor", "which biases are split over"
