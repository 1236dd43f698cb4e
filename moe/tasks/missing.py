"""Texts, weights and templates that a job needs to be trained, but not to be planned. Loads no torch."""

from collections.abc import Sequence

from moe.interchange.hub_folder import CONFIG, INDEX, HubFolder
from moe.spec import JobSpec, LanguageModelSpec, Problem, SpecError


def missing_to_train(spec: JobSpec, roots: Sequence[str] | None) -> tuple[Problem, ...]:
    """Problems of a job that can be planned and not trained: its corpus is synthetic, it names no model folder though
    it needs one, or its folder has a `config.json` and no weights. A folder that is not found under the `roots` is no
    problem: it may exist where the job is to run."""
    problems = (spec.missing_texts, spec.missing_folder, *_missing_weights(spec, roots))
    return tuple(problem for problem in problems if problem is not None)


def _missing_weights(spec: JobSpec, roots: Sequence[str] | None) -> tuple[Problem, ...]:
    """Problems of a folder with a `config.json` and no weights."""
    if not isinstance(spec.model, LanguageModelSpec) or spec.model.from_folder is None:
        return ()
    folder = HubFolder(spec.model.from_folder, roots)
    try:
        if not folder.has(CONFIG) or any(folder.has(name) for name in (INDEX, "*.safetensors")):
            return ()
    except SpecError:  # it lies outside of the roots
        return ()
    try:
        folder.weight_files()
    except SpecError as error:
        return tuple(error.problems)
    return ()
