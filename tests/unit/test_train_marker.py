"""The marker: complete or refused, and its checks of the checkpoint files."""

import io
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.marker import Marker

FILES = {"__0_0.distcp": b"weights" * 1000, "spec.json": b"{}", "tokenizers/tokenizer.json": b"bpe"}


def marker(step=50, attempt=1, group=0, files=FILES):
    return Marker(
        step=step, attempt=attempt, group=group, num_workers=2, created_at="2026-01-01T00:00:00+00:00",
        files={path: markers.seal(content) for path, content in files.items()},
    )  # fmt: skip


def test_a_marker_is_bytes_and_belongs_to_its_name():
    assert Marker.from_bytes(marker().to_bytes()) == marker()
    assert marker().name == "step-00000050.a1.g0"
    assert marker().size_bytes == 7005


@given(st.data())
def test_torn_anywhere_or_with_any_byte_changed_it_is_refused(data):
    content = marker().to_bytes()
    index = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        broken = content[:index]
    else:
        new_byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[index]))
        broken = content[:index] + bytes([new_byte]) + content[index + 1 :]
    with suppress(ValueError):
        assert Marker.from_bytes(broken) == marker()  # only white space between values may change


@pytest.fixture(params=["plain", "file", "memory"])
def folder(request, tmp_path):
    urls = {"plain": f"{tmp_path}/f", "file": f"file://{tmp_path}/f", "memory": f"memory://{tmp_path.name}"}
    folder = Folder(urls[request.param])
    yield folder
    folder.remove("")


def commit(folder, **fields):
    new_marker = marker(**fields)
    for path, content in FILES.items():
        folder.write(f"{new_marker.name}/{path}", content)
    folder.write(new_marker.name + markers.SUFFIX, new_marker.to_bytes())
    return new_marker


def test_newest_first_by_steps_then_attempt_then_group(folder):
    assert markers.list_committed(folder) == []
    for step, attempt, group in [(50, 1, 0), (100, 1, 0), (100, 2, 0), (100, 1, 3), (60, 3, 0)]:
        commit(folder, step=step, attempt=attempt, group=group)
    folder.write("step-00000900.a1.g0/spec.json", b"{}")  # never committed
    folder.write("notes.commit.json", b"{}")  # not a checkpoint
    assert markers.list_committed(folder) == [
        "step-00000100.a2.g0", "step-00000100.a1.g3", "step-00000100.a1.g0", "step-00000060.a3.g0",
        "step-00000050.a1.g0",
    ]  # fmt: skip


def test_faults_are_named(folder):
    new_marker = commit(folder)
    assert markers.read(folder, new_marker.name) == new_marker
    assert markers.fault(folder, new_marker) is None
    path, content = f"{new_marker.name}/__0_0.distcp", FILES["__0_0.distcp"]
    folder.write(path, content[:-5])
    assert markers.fault(folder, new_marker) == "__0_0.distcp has 6995 bytes instead of 7000"
    folder.write(path, content[:100] + b"X" + content[101:])
    assert markers.fault(folder, new_marker) == "__0_0.distcp does not match its checksum"
    assert markers.fault(folder, new_marker, ["spec.json"]) is None
    folder.remove(path)
    assert markers.fault(folder, new_marker) == "__0_0.distcp is missing"
    folder.write("step-00000099.a1.g0.commit.json", new_marker.to_bytes())
    with pytest.raises(ValueError, match=r"its marker belongs to step-00000050\.a1\.g0"):
        markers.read(folder, "step-00000099.a1.g0")


class _Growing(io.BytesIO):
    """File that grows once its length is known; like some stores, its `seek` returns None."""

    num_read = 0

    def seek(self, *args):
        super().seek(*args)

    def tell(self):
        return 7000

    def read(self, size=-1):
        block = super().read(size)
        self.num_read += len(block)
        return block


def test_a_file_that_grows_is_read_no_further_than_what_was_sealed(folder, monkeypatch):
    file = _Growing(bytes(1 << 24))
    monkeypatch.setattr(Folder, "open", lambda *_: file)
    assert "grew beyond 7000 bytes" in markers.fault(folder, marker(), ["__0_0.distcp"])
    assert file.num_read <= 2 << 20


def test_markers_are_read_from_their_folder_alone(tmp_path):
    target, folder = tmp_path / "outside", tmp_path / "checkpoints"
    for directory in (target, folder):
        directory.mkdir()
    (target / f"{marker().name}{markers.SUFFIX}").write_bytes(marker().to_bytes())
    (folder / f"{marker().name}{markers.SUFFIX}").symlink_to(target / f"{marker().name}{markers.SUFFIX}")
    with pytest.raises(OSError, match="outside"):
        markers.read(Folder(str(folder)), marker().name)
    checkpoints = Folder(str(tmp_path / "job")).subfolder("checkpoints")
    (tmp_path / "job").mkdir()
    assert markers.list_committed(checkpoints) == []
    (tmp_path / "job" / "checkpoints").symlink_to(target)
    for look in (markers.list_committed, lambda location: markers.read(location, marker().name)):
        with pytest.raises(OSError, match="outside"):
            look(checkpoints)
