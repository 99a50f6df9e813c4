"""A disk that fails at a chosen operation, put in the place of the `os` that `trimtab.files` writes through."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from trimtab import files

ERRORS = {"no space": errno.ENOSPC, "i/o error": errno.EIO, "read-only": errno.EROFS}
KINDS = ("kill", "torn write", *ERRORS)
CHANGES = ("open", "write", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


class Killed(BaseException):
    """The process is gone: whatever its clean-up tries to change from now on has no effect."""


class FaultyOs:
    """Passes everything on to `os`, counts what changes the disk, and fails the operation of number `at` (from 1).

    `kill` and `torn write` fail all later ones as well, as a dead process changes nothing; a torn write puts half of
    its bytes on the disk first. The others fail once, or from then on where `lasting` is set. Nothing is really
    flushed: what a power loss takes is not imitated here, and flushing would only make the tests slow.
    """

    def __init__(self, kind: str = "", at: int = 0, *, lasting: bool = False) -> None:
        self.kind, self.at, self.lasting = kind, at, lasting
        self.count = 0
        self.log: list[tuple[str, tuple[Any, ...], Any]] = []
        """Name, arguments and result of each operation that went through."""

    def __getattr__(self, name: str) -> Any:
        return self._counted(name) if name in CHANGES else getattr(os, name)

    def _counted(self, name: str) -> Any:
        def operation(*arguments: Any) -> Any:
            self.count += 1
            if self.at and (self.count == self.at or (self.count > self.at and self._goes_on)):
                self._fail(name, arguments)
            result = None if name == "fsync" else getattr(os, name)(*arguments)
            self.log.append((name, arguments, result))
            return result

        return operation

    @property
    def _goes_on(self) -> bool:
        return self.lasting or self.kind not in ERRORS

    def _fail(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self.kind in ERRORS:
            raise OSError(ERRORS[self.kind], os.strerror(ERRORS[self.kind]))
        if self.kind == "torn write" and name == "write" and self.count == self.at:
            handle, view = arguments
            os.write(handle, view[: len(view) // 2])
        raise Killed(name)


@contextmanager
def disk(faulty: FaultyOs) -> Generator[FaultyOs]:
    """Everything that `trimtab.files` writes goes through `faulty`."""
    files.os = faulty  # type: ignore[assignment]
    try:
        yield faulty
    finally:
        files.os = os
