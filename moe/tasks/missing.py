"""Texts, weights and templates that a job lacks to be trained, and not to be planned. Loads no torch."""

from collections.abc import Sequence

from moe.interchange.hub_folder import CONFIG, INDEX, HubFolder
from moe.spec import JobSpec, LanguageModelSpec, Problem, SpecError


def missing_to_train(spec: JobSpec, roots: Sequence[str] | None) -> tuple[Problem, ...]:
    """Problems of a job that has a synthetic corpus, or needs a model's folder and names none, or one with a
    `config.json` and no weights. Nothing is said of a folder that is not found under the `roots`: it may lie where the
    job is to run."""
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
