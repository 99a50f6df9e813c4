"""Files that are whole or not there: written aside, flushed to the disk, then renamed. Loads no torch.

Everything that changes the disk goes through this module's `os`, so that a test can fail each operation in turn.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import RunError
from trimtab.units import format_bytes

CHUNK_BYTES = 8 * 1024**2
_WORTH_A_THREAD_BYTES = 256 * 1024
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_BINARY if sys.platform == "win32" else 0)
_BUSY_RETRIES = 20 if sys.platform == "win32" else 0
"""On Windows a virus scanner or indexer holds a fresh file open for a moment, and a rename then fails."""


@dataclass(frozen=True)
class Written:
    """What is on the disk now."""

    sha256: str
    bytes: int


def write_new(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Writes a file that must not exist yet, flushes it to the disk, and hashes on the way.

    Raises:
        OSError: as the system says; a part of the file may be left.
    """
    digest, total = hashlib.sha256(), 0
    handle = os.open(path, _NEW_FILE, 0o666)
    try:
        with ThreadPoolExecutor(1) as hasher:
            for part in _parts(chunks):
                total += len(part)
                if len(part) < _WORTH_A_THREAD_BYTES:
                    # Small documents must be written even where the system gives no thread any more.
                    digest.update(part)
                    _write_all(handle, part)
                    continue
                # Hashing and writing both leave the interpreter's lock, and take about as long.
                hashed = hasher.submit(digest.update, part)
                _write_all(handle, part)
                hashed.result()
        os.fsync(handle)
    finally:
        os.close(handle)
    return Written(digest.hexdigest(), total)


def _parts(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def _write_all(handle: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(handle, view) :]


def write_atomic(path: Path, data: bytes | str, *, aside: Path | None = None) -> None:
    """Puts `data` (text as UTF-8) at `path`: after a crash the old content is there, or the new, never a mixture.

    `aside` is where it is written first, for those who know what a crash may leave there by its name; the same folder.

    Raises:
        RunError: no space, or not allowed.
    """
    content = data.encode("utf-8") if isinstance(data, str) else data
    aside = aside or path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        try:
            write_new(aside, [content])
            replace(aside, path)
        except OSError:
            remove_file(aside)
            raise
        fsync_folder(path.parent)
    except OSError as error:
        raise write_error(error, path, len(content)) from error


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of a JSON document.

    Raises:
        ValueError: a number in it is not finite, which JSON cannot say.
        RunError: see `write_atomic`.
    """
    write_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """A JSON document in UTF-8, indented; ValueError for numbers that are not finite."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair has no UTF-8; the backslash form is what JSON has for it.
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def read_json(path: Path) -> Any:
    """A JSON document. Raises OSError or ValueError."""
    return json.loads(path.read_bytes().decode("utf-8"))


def sealed(document: dict[str, Any]) -> bytes:
    """A JSON document beside the hash of itself, so that a flipped bit in it is found too."""
    return json_bytes({"sha256": _seal(document), "content": document})


def read_sealed(path: Path) -> dict[str, Any]:
    """What `sealed` made. Raises OSError, or ValueError where it is not as it was written."""
    document = read_json(path)
    content = document.get("content") if isinstance(document, dict) else None
    if not isinstance(content, dict) or document.get("sha256") != _seal(content):
        raise ValueError(f"{path} has other content than was written")
    return content


def _seal(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode("ascii")).hexdigest()


def sha256_of(path: Path) -> str:
    """Hash of the file's content, in hexadecimal."""
    digest = hashlib.sha256()
    buffer = bytearray(min(CHUNK_BYTES, max(1, path.stat().st_size)))
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def replace(source: Path, target: Path) -> None:
    """Renames a file over another in one step."""
    _retried(os.replace, source, target)


def rename_new(source: Path, target: Path) -> None:
    """Renames a file or folder to a name that is free."""
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    _retried(os.rename, source, target)


def _retried(operation: Any, source: Path, target: Path) -> None:
    for _ in range(_BUSY_RETRIES):
        try:
            operation(source, target)
            return
        except PermissionError:
            time.sleep(0.05)
    operation(source, target)


def remove_file(path: Path) -> None:
    """Removes a file, or a link itself, if it is there."""
    try:
        os.unlink(path)  # noqa: PTH108 - through `os`, as everything that changes the disk
    except FileNotFoundError:
        return


def remove_empty_folder(path: Path) -> None:
    """Removes a folder; OSError where anything is left in it."""
    os.rmdir(path)  # noqa: PTH106


def make_new_folder(path: Path) -> None:
    """Makes one folder that must not exist yet."""
    os.mkdir(path)  # noqa: PTH102


def fsync_folder(path: Path) -> None:
    """Makes the names in a folder survive a power loss, where the system has such a call."""
    if sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


def make_folder(path: Path, *, probe_name: str = ".probe") -> None:
    """Makes a folder with its parents and proves that files can be written into it.

    `probe_name` begins the name of the file that proves it, which a crash may leave.

    Raises:
        RunError: a file in the way, not allowed, no space, or a name that the system refuses.
    """
    probe = path / f"{probe_name}-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            write_new(probe, [b"\0"])
        finally:
            remove_file(probe)
    except (FileExistsError, NotADirectoryError) as error:
        raise RunError(f"{path} cannot be a folder: a file is in the way.", cure="Choose another folder.") from error
    except OSError as error:
        raise write_error(error, path, 1) from error
    except ValueError as error:
        raise RunError(f"{str(path)!r} is no name of a folder: {error}.", cure="Choose another folder.") from error


def from_home(name: str) -> Path:
    """`name` as a path, with a leading `~/` as the home folder. Other names may begin with `~` and stay as they are."""
    path = Path(name)
    try:
        return path.expanduser() if name == "~" or name.startswith(("~/", "~\\")) else path
    except RuntimeError:  # no home is known, or `~\x` where a backslash parts nothing
        return path


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write there; `folder` or one of its parents must exist."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    return shutil.disk_usage(there).free


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """RunError where the disk cannot take `needed_bytes`. `what` names the thing, for instance 'a checkpoint'."""
    free = free_bytes(folder)
    if free < needed_bytes:
        raise RunError(
            f"{what} needs {format_bytes(needed_bytes)} in {folder}, but only {format_bytes(free)} are free.",
            cure="Free some space, or choose another disk by output.run.",
        )


def write_error(error: OSError, path: Path, needed_bytes: int) -> RunError:
    """The error for people behind a failed write."""
    if error.errno in _NO_SPACE:
        free = format_bytes(free_bytes(path.parent))
        return RunError(
            f"no space to write {path}: {format_bytes(needed_bytes)} needed, {free} free (or a quota is met).",
            cure="Free some space, or choose another disk by output.run.",
        )
    reason = error.strerror or str(error)
    if error.errno in _NOT_ALLOWED:
        return RunError(
            f"{path} may not be written: {reason}.", cure="Choose a folder that you may write by output.run."
        )
    return RunError(f"{path} cannot be written: {reason}.", cure="Check the disk, or choose another by output.run.")
