"""What is opened lies beneath the folder, whatever links there are and whenever they come."""

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.storage import confined

NAMES = ("a", "b", "c")
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
targets = st.lists(st.sampled_from((*NAMES, "..")), min_size=1, max_size=4).map("/".join)


def _grow(top: Path, files: list[str], links: list[tuple[str, str, bool]]) -> Path:
    """A folder `root` beside a folder `secret`, with files that hold their own path, and links to anywhere."""
    root = top / "root"
    for folder in (root, top / "secret"):
        folder.mkdir()
    (top / "secret" / "a").write_text("secret")
    for name in files:
        path = root / name
        if not any(each.is_file() for each in path.parents) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("allowed")
    for name, target, is_absolute in links:
        path = root / name
        if path.parent.is_dir() and not os.path.lexists(path):
            path.symlink_to(root / target if is_absolute else target)
    return root


@given(
    files=st.lists(paths, max_size=4),
    links=st.lists(st.tuples(paths, targets, st.booleans()), max_size=4),
    wanted=paths | st.just("../secret/a"),
)
def test_it_opens_what_a_plain_open_would_if_that_lies_beneath_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, files: list[str], links: list[tuple[str, str, bool]], wanted: str
) -> None:
    root = _grow(tmp_path_factory.mktemp("top"), files, links)
    path = root / wanted
    try:
        with confined.open_file(str(root), str(path)) as file:
            content = file.read().decode()
    except OSError:
        assert not (path.is_file() and path.resolve().is_relative_to(root))
    else:
        assert path.resolve().is_relative_to(root)
        assert content == path.read_text() == "allowed"


@pytest.mark.parametrize("part", ["folder", "folder/file"])
def test_a_swap_for_a_link_is_never_followed_however_often_it_comes(tmp_path: Path, part: str) -> None:
    """While another thread swaps a part of the path for a link and back, hundreds of times."""
    root, secret = tmp_path / "root", tmp_path / "secret"
    for folder, content in ((root / "folder", "allowed"), (secret, "secret")):
        folder.mkdir(parents=True)
        (folder / "file").write_text(content)
    swapped, aside, link = root / part, root / "aside", root / "link"
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            link.symlink_to(secret / Path(part).relative_to("folder"))
            swapped.rename(aside)
            link.rename(swapped)
            swapped.unlink()
            aside.rename(swapped)

    swapping = threading.Thread(target=swap)
    swapping.start()
    read, refused = 0, 0
    try:
        while read < 300 or refused < 300:
            try:
                with confined.open_file(str(root), str(root / "folder/file")) as file:
                    assert file.read() == b"allowed"
                read += 1
            except OSError:
                refused += 1
    finally:
        over.set()
        swapping.join()


def test_a_process_whose_own_folder_is_gone_opens_through_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("allowed")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with confined.open_file(str(tmp_path), str(tmp_path / "link")) as file:
        assert file.read() == b"allowed"


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    root = "/" if kind == "device" else str(tmp_path)
    with pytest.raises(OSError, match=r"not a regular file|is a folder"):
        confined.open_file(root, "/dev/null" if kind == "device" else str(path))


def test_a_folder_is_listed_as_it_is_and_links_out_of_it_are_not(tmp_path: Path) -> None:
    root = _grow(tmp_path, ["a", "b/c"], [("out", "../secret", False)])
    (root / "within").symlink_to("b")
    for path, names in ((root, {"a", "b", "out", "within"}), (root / "b", {"c"}), (root / "within", {"c"})):
        with confined.listing(str(root), str(path)) as entries:
            assert {entry.name for entry in entries} == names
    for path in (root / "out", tmp_path / "secret", tmp_path):
        with pytest.raises(confined.Outside), confined.listing(str(root), str(path)):
            pass


def test_a_file_that_is_renamed_while_its_folder_is_looked_at_hides_no_other(tmp_path: Path) -> None:
    """Writers seal a draft by renaming it."""
    for number in range(50):
        (tmp_path / f"sealed-{number}").write_text("x" * number)
    sealing = threading.Event()

    def seal() -> None:
        while not sealing.is_set():
            (tmp_path / "draft").touch()
            (tmp_path / "draft").rename(tmp_path / "new")

    thread = threading.Thread(target=seal)
    thread.start()
    try:
        for _ in range(300):
            found = confined.sizes(str(tmp_path), str(tmp_path))
            assert {name: size for name, size in found.items() if name.startswith("sealed")} == {
                f"sealed-{number}": number for number in range(50)
            }
    finally:
        sealing.set()
        thread.join()


@given(
    files=st.lists(paths, max_size=4),
    links=st.lists(st.tuples(paths, targets, st.booleans()), max_size=4),
    wanted=paths | st.just("../secret/a"),
)
def test_it_creates_what_it_is_asked_to_and_changes_nothing_through_a_link(
    tmp_path_factory: pytest.TempPathFactory, files: list[str], links: list[tuple[str, str, bool]], wanted: str
) -> None:
    top = tmp_path_factory.mktemp("top")
    root = _grow(top, files, links)
    path = root / wanted

    def content() -> dict[Path, str]:
        return {each: each.read_text() for each in top.rglob("*") if each.is_file() and not each.is_symlink()}

    before = content()
    leads_through_a_link = any(each.is_symlink() for each in path.parents)
    try:
        with confined.create(str(root), str(path)) as file:
            file.write(b"new")
    except OSError:
        assert content() == before
        assert leads_through_a_link or ".." in wanted or path.is_dir() or any(map(Path.is_file, path.parents))
    else:
        assert content() == before | {path: "new"}
        assert not leads_through_a_link


def test_what_breaks_off_leaves_nothing_and_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")

    def break_off() -> None:
        with confined.create(str(tmp_path), str(tmp_path / "file")) as file:
            file.write(b"after")
            assert (tmp_path / "file").read_text() == "before"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"file": "before"}


def test_no_folder_that_is_swapped_for_a_link_is_written_into(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    for folder in (root, secret):
        folder.mkdir()
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            shutil.rmtree(root / "folder", ignore_errors=True)
            with suppress(FileExistsError):  # made by whoever writes
                (root / "folder").symlink_to(secret)
            with suppress(OSError):
                (root / "folder").unlink()

    swapping = threading.Thread(target=swap)
    swapping.start()
    written, refused = 0, 0
    try:
        while swapping.is_alive() and (written < 10 or refused < 10):
            try:
                with confined.create(str(root), str(root / "folder/file")) as file:
                    file.write(b"new")
                written += 1
            except OSError:
                refused += 1
    finally:
        over.set()
        swapping.join()
    assert min(written, refused) >= 10
    assert list(secret.iterdir()) == []


@given(
    files=st.lists(paths, max_size=4),
    links=st.lists(st.tuples(paths, targets, st.booleans()), max_size=4),
    gone=paths | st.just("../secret/a") | st.just("."),
)
def test_it_removes_what_it_is_asked_to_and_nothing_through_a_link(
    tmp_path_factory: pytest.TempPathFactory, files: list[str], links: list[tuple[str, str, bool]], gone: str
) -> None:
    top = tmp_path_factory.mktemp("top")
    root = _grow(top, files, links)
    path = root / gone
    before = set(top.rglob("*"))
    leads_through_a_link = any(each.is_symlink() for each in path.parents)
    try:
        confined.remove(str(root), str(path))
    except OSError:
        assert set(top.rglob("*")) == before
        assert leads_through_a_link or ".." in gone or path not in before
    else:
        assert set(top.rglob("*")) == before - {each for each in before if each.is_relative_to(path)}
        assert not leads_through_a_link


@pytest.mark.parametrize("part", ["folder", "folder/inner"])
def test_nothing_is_removed_from_a_folder_that_is_swapped_for_a_link(tmp_path: Path, part: str) -> None:
    """While another thread swaps a part of the path for a link, again and again."""
    root, secret = tmp_path / "root", tmp_path / "secret"
    for folder in (root, secret / "inner"):
        folder.mkdir(parents=True)
    (secret / "inner/file").write_text("secret")
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            shutil.rmtree(root / part, ignore_errors=True)
            with suppress(OSError):  # made by whoever writes, or not yet there
                (root / part).symlink_to(secret / Path(part).relative_to("folder"))
            with suppress(OSError):
                (root / part).unlink()

    swapping = threading.Thread(target=swap)
    swapping.start()
    removed, refused = 0, 0
    try:
        while swapping.is_alive() and (removed < 10 or refused < 10):
            with suppress(OSError), confined.create(str(root), str(root / "folder/inner/file")) as file:
                file.write(b"new")
            try:
                confined.remove(str(root), str(root / "folder/inner"))
                removed += 1
            except OSError:
                refused += 1
    finally:
        over.set()
        swapping.join()
    assert min(removed, refused) >= 10
    assert (secret / "inner/file").read_text() == "secret"
