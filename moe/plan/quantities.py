"""Quantities in words: counts, numbers of parameters, bytes, seconds, and names of kinds of time."""


def pluralize(number: int, noun: str, plural: str = "s") -> str:
    """Format `1 worker`, `2 workers`, `3 micro-batches` (with `plural="es"`)."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def format_parameters(number: int) -> str:
    """Format `1.2 B parameters`, as models are named."""
    for unit, letter in ((10**9, " B"), (10**6, " M"), (10**3, " K")):
        if number >= 0.99995 * unit:  # below, a number is not rounded up to `1000.0` of the smaller unit
            return f"{number / unit:.1f}{letter} parameters"
    return f"{number} parameters"


def format_bytes(num_bytes: int) -> str:
    """Format `0.41 GiB`, or `37 MiB` for less than a tenth of a GiB."""
    large = num_bytes >= 1024**3 / 10
    return f"{num_bytes / 1024**3:,.2f} GiB" if large else f"{num_bytes / 1024**2:,.0f} MiB"


def format_seconds(seconds: float) -> str:
    """Format `1,170 s`, `12.3 s`, `41.5 ms`: three significant digits, or whole seconds."""
    seconds = seconds if seconds >= 1000 else float(f"{seconds:.3g}")  # 999.7 s would otherwise be `1e+03 s`
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{seconds * 1000:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def time_kind_name(name: str) -> str:
    """Words for a kind of time, such as `all_to_all_s`."""
    words = {"products_s": "matrix products", "all_to_all_s": "all-to-all", "gather_s": "gather and scatter",
             "all_reduce_s": "all-reduce", "send_s": "sending", "bubble_s": "pipeline bubble",
             "data_s": "waiting for data", "module_s": "arithmetic and collectives"}  # fmt: skip
    return words.get(name, name.removesuffix("_s"))
