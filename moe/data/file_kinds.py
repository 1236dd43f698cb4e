"""Kinds of files that hold no text, by their first bytes."""

import codecs

from moe.spec import ProblemCode

HEAD_BYTES = 48
"""First bytes of a file that tell its kind."""
PARQUET_MAGIC, ARROW_MAGIC, ARROW_MESSAGE = b"PAR1", b"ARROW1\x00\x00", b"\xff\xff\xff\xff"
TABLE_MAGICS = (PARQUET_MAGIC, ARROW_MAGIC, ARROW_MESSAGE)
"""First bytes of Parquet files, of Arrow files with a footer, and of Arrow streams."""
_BINARY: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a Zip archive"), (b"PK\x05\x06", "an empty Zip archive"), (PARQUET_MAGIC, "a Parquet file"),
    (ARROW_MAGIC, "an Arrow file"), (ARROW_MESSAGE, "an Arrow stream"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a RAR archive"), (b"%PDF-", "a PDF document"), (b"SQLite format 3\x00", "an SQLite database"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"), (b"\x93NUMPY", "a NumPy array"), (b"Obj\x01", "an Avro file"),
    (b"\x04\x22\x4d\x18", "an LZ4 file, which is not supported"), (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"), (b"\x80\x04", "a Python pickle"), (b"\x80\x05", "a Python pickle"),
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer instead of the file"),
)  # fmt: skip
_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip


def not_text_problem(head: bytes) -> tuple[ProblemCode, str, str] | None:
    """(code, rule, remedy) of a file that begins with `head` and holds no UTF-8 text; None if it may hold some."""
    for mark, encoding in _ENCODINGS:
        if head.startswith(mark):
            remedy = f"save it as UTF-8: iconv -f {encoding} -t UTF-8"
            return "invalid_encoding", f"is {encoding} text, not UTF-8", remedy
    for magic, kind in _BINARY:
        if head.startswith(magic):
            remedy = "download the file itself: git lfs pull" if "LFS" in kind else "name text, or unpack it"
            return "wrong_type", f"is {kind}, not text", remedy
    if head[1:2] == b"\0" or head[:1] == b"\0":
        return "invalid_encoding", "starts with NUL bytes, like UTF-16 text", "save it as UTF-8"
    return None
