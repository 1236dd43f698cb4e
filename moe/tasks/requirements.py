"""Missing data, weights or templates that a job needs for training, but not for planning. Loads no torch."""

from collections.abc import Sequence

from moe.interchange.hub_folder import CONFIG, INDEX, HubFolder
from moe.spec import JobSpec, LanguageModelSpec, Problem, SpecError


def training_requirements(spec: JobSpec, roots: Sequence[str] | None) -> tuple[Problem, ...]:
    """Problems of a job that can be planned but not trained.

    Its corpus is synthetic, it lacks a required model folder, or the folder has a `config.json` but no weights. A
    folder not found under `roots` is not a problem: it may exist where the job runs.
    """
    problems = (spec.missing_texts, spec.missing_folder, *_missing_weights(spec, roots))
    return tuple(problem for problem in problems if problem is not None)


def _missing_weights(spec: JobSpec, roots: Sequence[str] | None) -> tuple[Problem, ...]:
    """Problem of a model folder with a `config.json` but no weights."""
    if not isinstance(spec.model, LanguageModelSpec) or spec.model.from_folder is None:
        return ()
    folder = HubFolder(spec.model.from_folder, roots)
    try:
        if not folder.has(CONFIG) or any(folder.has(name) for name in (INDEX, "*.safetensors")):
            return ()
    except SpecError:  # it is outside the roots
        return ()
    try:
        folder.weight_files()
    except SpecError as error:
        return tuple(error.problems)
    return ()
