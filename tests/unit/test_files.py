"""Files are whole or not there, whatever the disk does."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import ERRORS, KINDS, FaultyOs, Killed, disk
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab import files
from trimtab.errors import RunError

OLD, NEW = b"old content", b"something new, and longer"
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def write_operations(path: Path) -> int:
    with disk(FaultyOs()) as counted:
        files.write_atomic(path, NEW)
    return counted.count


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_operation_leaves_the_old_file_or_the_new(tmp_path: Path, kind: str) -> None:
    operations = write_operations(tmp_path / "count")
    assert operations >= 4  # open, write, flush, rename
    for at in range(1, operations + 1):
        path = tmp_path / f"{at}" / "file.json"
        path.parent.mkdir()
        path.write_bytes(OLD)
        with disk(FaultyOs(kind, at)), pytest.raises((RunError, Killed)) as caught:
            files.write_atomic(path, NEW)
        assert path.read_bytes() in (OLD, NEW), at
        if isinstance(caught.value, RunError):
            assert caught.value.cure
            assert list(path.parent.iterdir()) == [path], "what was written aside is cleaned up"


def test_a_disk_that_stays_full_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with (
        disk(FaultyOs("no space", 2, lasting=True)),
        pytest.raises(RunError, match=r"no space .* 25 B needed, .* free"),
    ):
        files.write_atomic(path, NEW)
    assert path.read_bytes() == OLD


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, view: real(handle, view[:3]))
    written = files.write_new(tmp_path / "file", [NEW, memoryview(OLD)])
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == NEW + OLD
    assert (written.bytes, written.sha256) == (len(NEW + OLD), hashlib.sha256(NEW + OLD).hexdigest())


@pytest.mark.parametrize("size", [0, 1, files.CHUNK_BYTES, files.CHUNK_BYTES + 1])
def test_the_hash_while_writing_is_that_of_the_file(tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    written = files.write_new(tmp_path / "file", [memoryview(content)[:size]])
    assert written.bytes == (tmp_path / "file").stat().st_size == size
    assert written.sha256 == files.sha256_of(tmp_path / "file") == hashlib.sha256(content[:size]).hexdigest()


def test_small_files_are_written_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    files.write_json(tmp_path / "run.json", {"status": "interrupted"})
    assert files.read_json(tmp_path / "run.json") == {"status": "interrupted"}


def test_a_new_file_never_replaces_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "file", [NEW])
    assert (tmp_path / "file").read_bytes() == OLD


def test_a_rename_to_a_taken_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError):
        files.rename_new(tmp_path / "made", tmp_path / "taken")
    files.rename_new(tmp_path / "made", tmp_path / "free")
    assert (tmp_path / "free").is_dir()


@settings(max_examples=60, deadline=None)
@given(value=JSON_VALUES)
def test_json_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "value.json"
    with disk(FaultyOs()):
        files.write_json(path, value)
    assert files.read_json(path) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [-float("inf")]}])
def test_numbers_that_json_cannot_say_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(tmp_path / "file", value)
    assert not list(tmp_path.iterdir())


def test_text_is_utf8_on_every_system_and_half_a_surrogate_pair_survives(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "text", "字 é\n")
    assert (tmp_path / "text").read_bytes() == "字 é\n".encode()
    files.write_json(tmp_path / "json", {"a": "\ud83d"})
    assert files.read_json(tmp_path / "json") == {"a": "\ud83d"}


def test_any_flipped_bit_of_a_sealed_document_is_found(tmp_path: Path) -> None:
    document = {"step": 7, "best": None, "name": "é", "files": {"a": {"bytes": 12, "sha256": "ab"}}}
    whole = files.sealed(document)
    path = tmp_path / "sealed"
    path.write_bytes(whole)
    assert files.read_sealed(path) == document
    for bit in range(0, len(whole) * 8, 13):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError):
            files.read_sealed(path)


def test_folders_are_made_with_their_parents_and_left_empty(tmp_path: Path) -> None:
    files.make_folder(tmp_path / "a" / "b")
    files.make_folder(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path, inside: bool) -> None:
    (tmp_path / "f").write_bytes(OLD)
    with pytest.raises(RunError, match=r"f.* cannot be a folder: a file is in the way"):
        files.make_folder(tmp_path / "f" / "x" if inside else tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == OLD


@pytest.mark.parametrize(
    ("kind", "said"),
    [("read-only", "may not be written"), ("no space", "no space"), ("i/o error", "cannot be written")],
)
def test_a_folder_that_cannot_be_written_is_told_before_work_begins(tmp_path: Path, kind: str, said: str) -> None:
    with disk(FaultyOs(kind, 1)), pytest.raises(RunError, match=said) as caught:
        files.make_folder(tmp_path)
    assert "output.run" in caught.value.cure
    assert not list(tmp_path.iterdir())


def test_a_name_that_no_folder_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no name of a folder"):
        files.make_folder(tmp_path / "a\0b")


def test_missing_space_is_told_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("trimtab.files.shutil.disk_usage", lambda path: usage(10**12, 10**12, 3 * 1024**2))
    files.require_space(tmp_path, 3 * 1024**2, "a checkpoint")
    with pytest.raises(RunError, match=r"a checkpoint needs 5\.0 GiB in .*, but only 3\.0 MiB are free") as caught:
        files.require_space(tmp_path / "not" / "there", 5 * 1024**3, "a checkpoint")
    assert "output.run" in caught.value.cure


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert files.free_bytes(tmp_path / "a" / "b") > 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flush of a folder")
def test_a_folder_is_flushed_and_a_system_without_that_call_is_borne(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def refuse(handle: int) -> None:
        seen.append(handle)
        raise OSError(errno.EINVAL, "not for folders")

    monkeypatch.setattr(os, "fsync", refuse)
    files.fsync_folder(tmp_path)
    assert seen
    monkeypatch.undo()
    with disk(FaultyOs("i/o error", 2)), pytest.raises(OSError, match=os.strerror(ERRORS["i/o error"])):
        files.fsync_folder(tmp_path)


def test_removing_what_is_not_there_is_fine_and_a_link_goes_alone(tmp_path: Path) -> None:
    files.remove_file(tmp_path / "nothing")
    (tmp_path / "kept").write_bytes(OLD)
    try:
        (tmp_path / "link").symlink_to(tmp_path / "kept")
    except OSError:
        pytest.skip("links are not allowed here")
    files.remove_file(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
