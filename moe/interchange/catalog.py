"""Tensors of a folder, including quantized ones, by their names in the families' tables. No torch."""

import re
from dataclasses import dataclass, field

from moe.data.locations import Location
from moe.interchange.config import ConfigDescription, describe_config, family_of
from moe.interchange.encoded import CatalogTensor, Misfit, encoded_tensors
from moe.interchange.family import Family
from moe.interchange.headers import entries
from moe.interchange.hub_folder import CONFIG, HubFolder
from moe.spec import Problem, ProblemCode, SpecError
from moe.storage.tensor_header import HeaderEntry

_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
"""Tensors of old checkpoints that can be computed from the config."""


@dataclass
class Catalog:
    """Config and tensors of a folder, read from config and headers alone."""

    folder: HubFolder
    config: dict[str, object]
    description: ConfigDescription
    files: dict[str, Location]
    tensors: dict[str, CatalogTensor] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, code: ProblemCode, name: str, rule: str, remedy: str, value: object = None) -> Problem:
        """Problem for one of the folder's tensors."""
        tensor = self.tensors.get(name)
        path_of_file = self.folder.url if tensor is None else self.folder.path(tensor.file)
        return Problem(code, f"{path_of_file}:{name}", value, rule, remedy)


def catalog(folder: HubFolder) -> Catalog:
    """Read a folder. Raises SpecError with all problems of its config, else with all unreadable files."""
    config, _ = folder.config()
    description = describe_config(config, folder.path(CONFIG), folder.quantization_file())
    folder_catalog = Catalog(folder, config, description, folder.weight_files())
    tensor_entries: list[HeaderEntry] = []
    problems: list[Problem] = []
    for file, location in folder_catalog.files.items():
        try:
            tensor_entries += entries(file, location, folder.place)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    by_name: dict[str, HeaderEntry] = {}
    is_base_model = _is_base_model(tensor_entries)
    for entry in tensor_entries:
        name = f"model.{entry.name}" if is_base_model and not entry.name.startswith("lm_head.") else entry.name
        if name in by_name:
            folder_catalog.problems.append(Problem("duplicate", f"{folder.path(entry.file)}:{entry.name}", None,
                                          f"is also in {by_name[name].file}", "remove one of them"))  # fmt: skip
        if not _IGNORED.fullmatch(name):
            by_name[name] = entry
    for tensor in encoded_tensors(by_name, folder_catalog.description.quantization):
        if isinstance(tensor, Misfit):
            folder_catalog.problems.append(_problem(folder, tensor))
        else:
            folder_catalog.tensors[tensor.name] = tensor
    return folder_catalog


def family_in(folder: HubFolder) -> Family:
    """Family of a folder's model. Raises SpecError."""
    return family_of(folder.config()[0], folder.path(CONFIG))


def _is_base_model(tensor_entries: list[HeaderEntry]) -> bool:
    """Whether names lack the prefix `model.` that they have in a model with an output head."""
    names = {entry.name for entry in tensor_entries}
    return "embed_tokens.weight" in names and not any(name.startswith("model.") for name in names)


def _problem(folder: HubFolder, misfit: Misfit) -> Problem:
    path = f"{folder.path(misfit.entry.file)}:{misfit.entry.name}"
    return Problem(misfit.code, path, misfit.value, f"must be {misfit.rule}", "use the folder as published")
