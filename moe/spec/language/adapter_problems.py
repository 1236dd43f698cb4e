"""Problems of a language model's adapter."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from moe.spec.adapter import AdapterSpec
from moe.spec.adapter_names import OUTPUT, TABLES, is_adapter
from moe.spec.errors import Problem
from moe.spec.language.indexer import IndexerSpec
from moe.spec.moe import MoESpec
from moe.spec.parameter import Parameter


def adapter_problems(
    adapter: AdapterSpec | None,
    parameters: Callable[[], Sequence[Parameter]],
    *,
    vocab_size: int,
    tie_embeddings: bool,
    moe: MoESpec | None,
    indexer: IndexerSpec | None,
    normalize_output: bool,
) -> Iterator[Problem]:
    """Problems of the adapter, if any, of a model with these parameters and fields."""
    if adapter is None:
        return
    names = {parameter.name: parameter.shape for parameter in parameters() if not is_adapter(parameter.name)}
    problems = [
        *adapter.problems(names, has_experts=moe is not None),
        *adapter.problems_of_token_rows(vocab_size, tie_embeddings=tie_embeddings),
    ]
    for problem in problems:
        yield replace(problem, path=f"adapter.{problem.path}")
    if tie_embeddings and adapter.modules_to_save:
        yield Problem("conflict", "adapter.modules_to_save", list(adapter.modules_to_save),
                      "cannot be trained whole: embedding and output are one tensor (tie_embeddings), and PEFT "
                      "would train a copy", "remove them, or train all weights, without adapter")  # fmt: skip
    if tie_embeddings and (tables := [name for name in TABLES if adapter.chooses(name)]):
        yield Problem("conflict", "adapter.targets", list(adapter.targets or ()),
                      f"has {tables[0]}, but embedding and output are one tensor (tie_embeddings): PEFT adapts one use "
                      "of it or, with ensure_weight_tying, steps two parameters in the same memory",
                      "remove it, or train rows of it (trainable_token_indices)")  # fmt: skip
    if normalize_output:
        yield from _problems_of_normalized_output(adapter, tie_embeddings=tie_embeddings)
    if indexer is not None and indexer.loss_coefficient:
        yield Problem("conflict", "attention.indexer.loss_coefficient", indexer.loss_coefficient,
                      "has no effect with an adapter, which the indexer never has: it is frozen like the base",
                      "omit it, or train without adapter")  # fmt: skip
    routers = [name for name in names if name.endswith(".router") and adapter.chooses(name)]
    if routers and moe is not None and moe.routing.bias_rate:
        rule = f"has {routers[0]}, whose selection bias follows the loads, which adapters do not store"
        yield Problem("unsupported", "adapter.targets", adapter.targets, rule, "set moe.bias_update_rate to 0")


def _problems_of_normalized_output(adapter: AdapterSpec, *, tie_embeddings: bool) -> Iterator[Problem]:
    """Adapters of an output projection whose columns are divided by their norms, which an adapter would change."""
    rule = "adapts the output projection, whose columns are normalized (normalize_output)"
    if adapter.chooses(OUTPUT):
        yield Problem("unsupported", "adapter.targets", list(adapter.targets or ()), rule, "omit it in targets")
    rows = adapter.trainable_token_indices
    if rows is not None and (tie_embeddings or rows.ids_of(OUTPUT)):
        yield Problem("unsupported", "adapter.trainable_token_indices", None, rule, "omit its rows")
