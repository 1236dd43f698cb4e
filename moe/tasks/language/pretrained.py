"""The folder in the Hugging Face format that a model begins with: its tokenizer, and its weights."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe.data.sequences import ModelTokenizer
from moe.interchange.config import written
from moe.interchange.origin import Origin
from moe.interchange.tokenizer import JSON, exported
from moe.spec import LanguageModelSpec, Problem, SpecError

if TYPE_CHECKING:
    from moe.parallel import Layout
    from moe.tasks.language.model import LanguageModel

PLACE = "model.from"


def model_tokenizer(spec: LanguageModelSpec, roots: Sequence[str] | None) -> ModelTokenizer:
    """The tokenizer of the folder, with all that an export will need of it. Reads no weights. Raises SpecError."""
    assert spec.from_folder is not None
    origin = Origin.of_folder(spec.from_folder, spec, roots)
    files = exported(origin.files, PLACE)
    if JSON not in files:
        raise SpecError(Problem(PLACE, spec.from_folder, f"has no {JSON}, which says what its tokens are",
                                "add the tokenizer that the model came with"))  # fmt: skip
    eos_id, bos_id = (_first(origin, f"{name}_token_id") for name in ("eos", "bos"))
    if eos_id is None:
        raise SpecError(Problem(PLACE, spec.from_folder, "names no token that ends a text",
                                "add eos_token_id to its config.json"))  # fmt: skip
    return ModelTokenizer({**origin.to_files(), JSON: files[JSON]}, eos_id, bos_id, "model")


def load(
    model: "LanguageModel", spec: LanguageModelSpec, layout: "Layout", roots: Sequence[str] | None
) -> tuple[str, ...]:
    """Fill this rank's part of a model with the folder's weights; all ranks together. What a user should be told.
    Raises SpecError on all of them."""
    from moe.interchange.load import load_weights

    assert spec.from_folder is not None
    loaded = load_weights(spec.from_folder, model, spec, layout, roots=roots)
    return (f"begins with the weights of {spec.from_folder}", *loaded.notes)


def of_no_family(spec: LanguageModelSpec) -> tuple[str, ...]:
    """Warning, before training, of a model that cannot be written in the Hugging Face format; none of others."""
    try:
        written(spec, None, "float32")
    except SpecError as error:
        _, nearest, *_ = error.problems
        rule = (
            "no family of Hugging Face models has this one, so that an export in their format will be refused"
        )
        return (f"{rule}; nearest is {nearest.value}, which {nearest.rule}",)
    return ()


def _first(origin: Origin, key: str) -> int | None:
    """The id that a key of the config says, the first of several; None where it says none. Raises SpecError."""
    given = origin.config.get(key)
    first = given[0] if isinstance(given, list) and given else given
    if first is None or first == []:
        return None
    if type(first) is not int or first < 0:
        raise SpecError(Problem(f"{PLACE}/config.json:{key}", given, "must be a token's id, or a list of some",
                                "correct config.json"))  # fmt: skip
    return first
