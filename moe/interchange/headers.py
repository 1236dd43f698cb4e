"""Reading of safetensors headers, before any weights. No torch."""

from moe.data.locations import Location
from moe.spec import ProblemCode, spec_error
from moe.storage.tensor_header import HeaderEntry, read_header


def entries(file: str, location: Location, place: str) -> list[HeaderEntry]:
    """Tensors of a file, in byte order. Raises SpecError, with file and tensor, if the file is truncated, unreadable or
    not in the safetensors format, or has complex numbers."""
    try:
        with location.raw() as stream:
            tensor_entries = read_header(stream, file)
        for entry in tensor_entries:
            if entry.dtype == "C64":
                raise ValueError(f"{entry.name!r} has the dtype {entry.dtype!r}, which is not supported")
    except (ValueError, OSError) as error:
        code: ProblemCode = "unreadable" if isinstance(error, OSError) else "corrupt"
        remedy = "download the file again"
        raise spec_error(code, place, str(location), f"is not a valid {file}: {error}", remedy) from None
    return tensor_entries
