"""Check that a model's dimensions are divisible by the degrees of a layout."""

from collections.abc import Iterator, Mapping

from moe.spec import LanguageModelSpec, ModelSpec, TranslationModelSpec
from moe.spec.errors import Problem
from moe.spec.language.attention import GroupedQueryAttentionSpec, LatentAttentionSpec
from moe.spec.parallel import ContextExchange
from moe.spec.parallel_problems import problems_of_stages


def fit_problems(
    model: ModelSpec, degrees: Mapping[str, int], context_exchange: ContextExchange = "gather"
) -> list[Problem]:
    """Return a Problem for each model dimension that its axis's degree does not divide, or that the context ranks
    cannot exchange as asked."""
    problems = list(_exchange_problems(model, degrees, context_exchange))
    for path, number, axis, reason in divided_dims(model):
        degree = degrees.get(axis, 1)
        if number % degree:
            good = ", ".join(str(d) for d in range(1, min(number, 4 * degree) + 1) if number % d == 0)
            problems.append(Problem("not_divisible", path, number,
                                    f"must be divisible by the {axis} degree (={degree}), {reason}",
                                    f"use another number, or a degree of {good}"))  # fmt: skip
    return problems


def stage_problems(
    model: LanguageModelSpec | TranslationModelSpec, pipeline: int, virtual_stages: int, stages: tuple[int, ...] | None
) -> list[Problem]:
    """Return the Problem of pipeline stages that the model's layers cannot fill."""
    num_stages, num_layers = pipeline * virtual_stages, model.num_layers
    if num_stages > num_layers:
        return [too_many_stages(pipeline, virtual_stages, num_layers)]
    return list(problems_of_stages(model, stages))


def too_many_stages(pipeline: int, virtual_stages: int, num_layers: int) -> Problem:
    """Problem of more stages than layers."""
    stages = f"{pipeline * virtual_stages} stages" + f", {virtual_stages} on each rank" * (virtual_stages > 1)
    return Problem("out_of_range", "parallel.pipeline", pipeline,
                   f"needs {stages}, with a layer each, but the model has only {num_layers}",
                   f"use at most {max(1, num_layers // virtual_stages)}")  # fmt: skip


def can_split_heads(num_heads: int, num_kv_heads: int, context: int) -> bool:
    """Whether each context rank gets as many query heads, with the key and value heads that these use: some of its own,
    or one that several ranks get."""
    return num_heads % context == 0 and (num_kv_heads % context == 0 or context % num_kv_heads == 0)


def _exchange_problems(model: ModelSpec, degrees: Mapping[str, int], exchange: ContextExchange) -> Iterator[Problem]:
    context, tensor = degrees.get("context", 1), degrees.get("tensor", 1)
    if context == 1 or exchange == "gather":
        return
    attentions = dict(_exchanged_heads(model))
    if not attentions:
        yield Problem("not_applicable", "parallel.context_exchange", exchange,
                      "has no effect: an indexer's tokens are chosen among the gathered keys",
                      "use gather, or omit it")  # fmt: skip
    for path, (num_heads, num_kv_heads) in attentions.items():
        heads = num_heads // tensor, max(1, num_kv_heads // tensor)
        if exchange == "heads" and not can_split_heads(*heads, context):
            good = [degree for degree in range(1, heads[0] + 1) if can_split_heads(*heads, degree)]
            yield Problem("not_divisible", "parallel.context_exchange", exchange,
                          f"needs a context degree (={context}) that divides {path}.num_heads (={num_heads}), and "
                          f"divides num_kv_heads (={num_kv_heads}) or is a multiple of it, on each tensor rank "
                          f"(of {tensor})",
                          f"use ring or gather, or a context degree of {', '.join(map(str, good))}")  # fmt: skip


def _exchanged_heads(model: ModelSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """(spec path, (heads of queries, of keys and values)) of each softmax attention without an indexer."""
    for name in ("attention", "local_attention"):
        attention = getattr(model, name, None)
        if isinstance(attention, GroupedQueryAttentionSpec):
            yield f"model.{name}", (attention.num_heads, attention.num_kv_heads)
        elif isinstance(attention, LatentAttentionSpec) and attention.indexer is None:
            yield f"model.{name}", (attention.num_heads, attention.num_heads)


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
