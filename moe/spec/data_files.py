"""Files of a corpus, or of one of its sources: by path, or a dataset's folder."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from moe.spec.base import MAX_PLACES, Place, Spec, Text
from moe.spec.errors import spec_error

Format = Literal["jsonl", "text", "parquet", "arrow"]
_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "text", ".text": "text", ".md": "text",
    ".py": "text", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow",
}  # fmt: skip
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zstd")
Split = Annotated[Text, Field(max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]


def format_of(path: str) -> Format | None:
    """Format from a path's suffix, ignoring compression; None if unknown."""
    name = path.rsplit("/", 1)[-1].lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return _FORMATS.get("." + name.rpartition(".")[2]) if "." in name else None


class FilesFields(Spec):
    """Fields that name files: `paths` or `dataset`."""

    FILE_FIELDS: ClassVar[tuple[str, ...]] = ("paths", "dataset")
    """Fields of which exactly one names the files."""

    paths: tuple[Place, ...] | None = Field(default=None, min_length=1, max_length=MAX_PLACES)
    """fsspec URLs under the service's data roots; `*` is expanded."""
    dataset: Place | None = None
    """Instead of `paths`: folder or fsspec URL of a dataset as the library `datasets` saves it (`save_to_disk`), or
    with the files of a dataset repository (`data/train-00000-of-00002.parquet`, `train.jsonl`)."""
    split: Split | None = None
    """Split of `dataset`. Default: `train`, or its only one."""

    @property
    def files_field(self) -> str:
        """Name of the field that names the files."""
        return next(name for name in self.FILE_FIELDS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _check_files(self) -> "FilesFields":
        fields = self.FILE_FIELDS
        present = [name for name in fields if getattr(self, name) is not None]
        if not present:
            raise spec_error(
                "missing", fields[0], None, f"is required, or {' or '.join(fields[1:])}", "add one of them"
            )
        if len(present) > 1:
            rule = f"does not apply in addition to {present[0]}"
            raise spec_error("not_applicable", present[1], None, rule, "omit one of them")
        if self.dataset is None and self.split is not None:
            rule = "applies only to a dataset"
            raise spec_error("not_applicable", "split", self.split, rule, "omit it, or set dataset")
        if self.dataset is not None and "*" in self.dataset:
            raise spec_error("invalid_value", "dataset", self.dataset, "must be one folder", "write its name without *")
        return self
