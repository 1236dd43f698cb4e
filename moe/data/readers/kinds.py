"""The kinds of files with a schema, by their formats."""

from moe.data.compression import DAMAGED
from moe.data.data_file import DataFile
from moe.data.file_kinds import ARROW_MAGIC, ARROW_MESSAGE, PARQUET_MAGIC
from moe.data.readers.arrow_files import ArrowFiles
from moe.data.readers.parquet_files import ParquetFiles
from moe.data.readers.tables import TableKind
from moe.spec.data_files import Format, format_of

_KINDS: dict[Format, type[TableKind]] = {"parquet": ParquetFiles, "arrow": ArrowFiles}
_MAGICS: dict[bytes, Format] = {PARQUET_MAGIC: "parquet", ARROW_MAGIC: "arrow", ARROW_MESSAGE: "arrow"}


def table_kind(format: Format | None) -> TableKind | None:
    """Kind of files of this format; None for those without a schema."""
    return _KINDS[format]() if format in _KINDS else None


def table_format(file: DataFile) -> Format | None:
    """`parquet` or `arrow` for a file that is one by its name or its first bytes; None for others. Links of model hubs'
    caches lead to files without suffixes."""
    format = format_of(file.location.path)
    if format in _KINDS:
        return format
    try:
        with file.location.raw() as raw:
            head = raw.read(len(ARROW_MAGIC))
    except DAMAGED as error:
        raise file.unreadable(error) from None
    return next((format for magic, format in _MAGICS.items() if head.startswith(magic)), None)
