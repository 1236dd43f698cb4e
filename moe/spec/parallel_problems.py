"""Rules of pipeline stages and context ranks that depend on the model and its data."""

from collections.abc import Iterator

from moe.spec.data import DataSpec
from moe.spec.errors import Problem
from moe.spec.language import LanguageModelSpec
from moe.spec.parallel import ParallelSpec
from moe.spec.stages import even_stages, format_stages
from moe.spec.translation import TranslationModelSpec


def problems_of_stages(
    model: LanguageModelSpec | TranslationModelSpec, stages: tuple[int, ...] | None
) -> Iterator[Problem]:
    """Problem of a stage cut that does not have exactly the model's layers."""
    num_layers = model.num_layers
    if stages is not None and sum(stages) != num_layers:
        too_many = f"use at most {num_layers} stages"
        remedy = f"use {format_stages(even_stages(num_layers, len(stages)))}" if len(stages) <= num_layers else too_many
        yield Problem("mismatch", "parallel.stages", format_stages(stages),
                      f"must sum to the model's {num_layers} layers, not {sum(stages)}",
                      f"{remedy}, or omit it")  # fmt: skip


def problems_of_context(
    model: LanguageModelSpec | TranslationModelSpec, data: DataSpec, parallel: ParallelSpec
) -> Iterator[Problem]:
    """Problems of context ranks: each has two equal chunks of a row, and whole heads if these are exchanged."""
    if (context := parallel.context or 1) == 1:
        return
    if isinstance(model, LanguageModelSpec) and data.max_tokens % (2 * context):
        longer = -(-data.max_tokens // (2 * context)) * 2 * context
        yield Problem("not_divisible", "parallel.context", context,
                      f"times 2 must divide data.max_tokens (={data.max_tokens}): each rank has two chunks of a row",
                      f"use another degree, or a multiple of {2 * context} tokens, such as {longer}")  # fmt: skip
    if parallel.context_exchange != "heads":
        return
    ranks = context * (parallel.tensor or 1)
    for path in ("num_heads", "attention.num_heads", "local_attention.num_heads"):
        if (num_heads := model.heads.get(path, 0)) % ranks:
            tensor = f" times tensor (={parallel.tensor})" if (parallel.tensor or 1) > 1 else ""
            yield Problem("not_divisible", f"model.{path}", num_heads,
                          f"must be divisible by context (={context}){tensor}, since context_exchange heads gives each "
                          "rank whole heads",
                          "use another degree, or context_exchange gather or ring")  # fmt: skip
