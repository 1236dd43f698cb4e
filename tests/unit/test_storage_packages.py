"""Which package a URL needs, and what is said where it is missing."""

import errno
import sys
from importlib import import_module

import pytest

from moe.storage.folder import Folder
from moe.storage.packages import problem_of


@pytest.mark.parametrize(
    "url", ["/data", "data", "file:///data", "local://data", "memory://jobs", "s3://bucket/jobs", "GS://b"]
)
def test_usable_urls(url: str) -> None:
    assert problem_of(url) is None


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("s3://bucket/jobs", "s3fs", "s3"),
        ("S3a://bucket", "s3fs", "s3"),
        ("gs://bucket", "gcsfs", "gcs"),
        ("gcs://b", "gcsfs", "gcs"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in for an installation without the package, which this one has: Python refuses to import it.
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(import_module("fsspec.registry")._registry, url.partition(":")[0].lower(), raising=False)
    problem = problem_of(url)
    assert problem is not None
    assert f"the package {package}," in problem
    assert f"pip install 'shardyard[{extra}]'" in problem


def test_a_folder_without_its_package_is_an_os_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # a stand-in, as above
    monkeypatch.delitem(import_module("fsspec.registry")._registry, "gs", raising=False)
    with pytest.raises(OSError, match=r"shardyard\[gcs\]") as raised:
        Folder("gs://bucket/jobs")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSYS, "gs://bucket/jobs")


def test_other_packages_and_unknown_protocols() -> None:
    assert "needs a package that is not installed" in str(problem_of("abfs://container/jobs"))
    assert "(='nosuch')" in str(problem_of("nosuch://bucket"))
