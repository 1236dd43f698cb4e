"""Packages of file systems: which one a URL needs, and how it is installed."""

import re

from fsspec import get_filesystem_class

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)://")
_EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs")}
"""Package and extra of this project by protocol."""


def problem_of(url: str) -> str | None:
    """Rule and remedy for a URL whose file system is unknown or not installed; None for usable URLs and for paths."""
    match = _URL.match(url)
    if match is None:
        return None
    protocol = match["protocol"].lower()
    try:
        get_filesystem_class(protocol)
    except ValueError:
        return f"names no file system (={protocol!r}); use a path, or a URL such as s3://BUCKET/FOLDER"
    except ImportError as error:
        if protocol not in _EXTRAS:
            return f"needs a package that is not installed here: {error}; the cluster's nodes need it, too"
        package, extra = _EXTRAS[protocol]
        return (
            f"needs the package {package}, which is not installed here; pip install 'shardyard[{extra}]', also on the "
            "cluster's nodes"
        )
    return None
