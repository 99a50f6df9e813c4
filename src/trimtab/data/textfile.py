"""Text files, gzipped or not, read within a budget; and where exactly one stops being readable. Loads no torch."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from trimtab.errors import DataError, did_you_mean
from trimtab.text import safe
from trimtab.units import MIB, format_bytes

LONGEST_TEXT_BYTES = MIB
"""A single text above this is a whole book in one row: most of it would be cut, so it is refused."""
LONGEST_LINE_CHARACTERS = 16 * MIB
_CHUNK_BYTES = MIB
_SAMPLE_BYTES = 4 * MIB
_USUAL_ENCODINGS = ("utf-8", "utf-16", "gbk", "gb18030", "big5", "shift_jis", "euc-kr", "cp1251", "cp1252", "latin-1")


class Budget:
    """Bytes that all files together may unpack to; guards against files made to fill memory and disk."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, count: int, name: str) -> None:
        """Counts `count` bytes of file `name`.

        Raises:
            DataError: the budget is spent.
        """
        self.used_bytes += count
        if self.used_bytes > self.limit_bytes:
            raise DataError(
                f"the data unpacks to more than {format_bytes(self.limit_bytes)}, which is the limit here "
                "(50 GiB, or the free space of the cache disk).",
                cure="Free disk space, or name fewer files in data.train.",
                location=name,
            )


@dataclass(frozen=True)
class TextSource:
    """One text file and how to read it. `name` is what messages call it."""

    path: Path
    name: str
    gzipped: bool
    encoding: str
    budget: Budget
    on_bytes: Callable[[int], None] | None = None

    def at(self, line: int) -> str:
        return f"{self.name}:{line}"

    def aside(self) -> TextSource:
        """The same file for a look ahead: what it reads counts in no budget and no progress but its own."""
        return replace(self, budget=Budget(self.budget.limit_bytes - self.budget.used_bytes), on_bytes=None)

    def open_text(self) -> io.TextIOWrapper:
        """The file as text with its line ends as they are; a BOM is dropped."""
        return io.TextIOWrapper(io.BufferedReader(_Counted(self), _CHUNK_BYTES), self.codec, newline="")

    @property
    def codec(self) -> str:
        return "utf-8-sig" if codecs.lookup(self.encoding).name == "utf-8" else self.encoding

    def open_bytes(self) -> BinaryIO:
        """The unpacked bytes."""
        return cast("BinaryIO", gzip.open(self.path, "rb")) if self.gzipped else self.path.open("rb")

    def lines(self) -> Iterator[str]:
        """Physical lines with their ends.

        Raises:
            DataError: bytes that do not decode, a NUL byte, a damaged gzip file, an over-long line, the budget.
        """
        with self.open_text() as stream:
            number = 0
            while line := self._next_line(stream):
                number += 1
                if len(line) >= LONGEST_LINE_CHARACTERS:
                    raise self._too_long(number)
                if "\0" in line:
                    raise self._nul(number, line.index("\0") + 1)
                yield line

    def chunks(self, characters: int) -> Iterator[str]:
        """The text in pieces of about `characters`; raises as `lines` does, but looks for no NUL byte."""
        with self.open_text() as stream:
            while piece := self.guard(lambda: stream.read(characters)):
                yield piece

    def _next_line(self, stream: io.TextIOWrapper) -> str:
        return self.guard(lambda: stream.readline(LONGEST_LINE_CHARACTERS))

    def guard(self, read: Callable[[], str]) -> str:
        """`read()`, with its errors turned into messages."""
        try:
            return read()
        except UnicodeError:
            raise locate_undecodable(self) from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"the gzip file is damaged ({safe(str(error), limit=120)}).",
                cure="Copy or download it again; `gzip -t` checks it.",
                location=self.name,
            ) from None

    def _too_long(self, line: int) -> DataError:
        return DataError(
            f"line {line} is longer than {LONGEST_LINE_CHARACTERS:,} characters.",
            cure=f"Cut its texts to at most {format_bytes(LONGEST_TEXT_BYTES)} each, one row per line.",
            location=self.at(line),
        )

    def _nul(self, line: int, column: int) -> DataError:
        guess = guess_encoding(self)
        if guess and guess.startswith("utf-16"):
            cure = _cure(guess)
            what = f"a NUL byte at column {column}; the file looks like {guess}."
        else:
            cure = "Remove the NUL bytes, for instance with `tr -d '\\000'`."
            what = f"a NUL byte at column {column}; text files have none."
        return DataError(what, cure=cure, location=self.at(line))


class _Counted(io.RawIOBase):
    """The unpacked bytes of a source, counted against its budget."""

    def __init__(self, source: TextSource) -> None:
        self._source = source
        self._inner = source.open_bytes()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        block = self._inner.read(len(buffer))
        buffer[: len(block)] = block
        self._source.budget.take(len(block), self._source.name)
        if self._source.on_bytes is not None:
            self._source.on_bytes(len(block))
        return len(block)

    def close(self) -> None:
        self._inner.close()
        super().close()


def check_encoding(encoding: str) -> None:
    """Raises DataError when Python knows no such text encoding."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding=encoding).detach()
    except (LookupError, ValueError):
        raise DataError(
            f"data.encoding: {safe(encoding, limit=40)} is no text encoding.",
            cure=did_you_mean(encoding, _USUAL_ENCODINGS),
        ) from None


def _cure(encoding: str) -> str:
    return f"Set data.encoding: {encoding} (`--set data.encoding={encoding}`; for eval `--encoding {encoding}`)."


def locate_undecodable(source: TextSource) -> DataError:
    """The error for the first bytes that the encoding cannot read: line, byte offset, and an encoding that can."""
    offset, line, bad = _first_undecodable(source)
    guess = guess_encoding(source)
    where = "of the unpacked text " if source.gzipped else ""
    shown = " ".join(f"0x{byte:02x}" for byte in bad)
    known = f" The file can be read as {guess} (a guess)." if guess else ""
    cure = _cure(guess) if guess else "Save the file as UTF-8, or set data.encoding to what it is."
    return DataError(
        f"line {line} is not {source.encoding}: byte {offset} {where}is {shown}.{known}",
        cure=cure,
        location=source.at(line),
    )


def _first_undecodable(source: TextSource) -> tuple[int, int, bytes]:
    """(offset in bytes from 0, line from 1, the bytes) of the first fault."""
    decoder = codecs.getincrementaldecoder(source.codec)()
    seen, line = 0, 1
    previous_cr = False
    with source.open_bytes() as stream:
        while True:
            block = stream.read(_CHUNK_BYTES)
            seen += len(block)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                good = error.object[: error.start].decode(source.codec, errors="ignore")
                offset = seen - len(error.object) + error.start
                return offset, line + _line_ends(good, previous_cr), error.object[error.start : error.end][:4]
            except UnicodeError:  # utf-16 without a BOM says only that
                return 0, line, block[:2]
            if not block:
                return seen, line, b""
            line += _line_ends(text, previous_cr)
            previous_cr = text.endswith("\r")


def _line_ends(text: str, previous_cr: bool) -> int:
    count = text.count("\n") + text.count("\r") - text.count("\r\n")
    return count - 1 if previous_cr and text.startswith("\n") else count


def guess_encoding(source: TextSource) -> str | None:
    """An encoding that reads the start of the file and looks right, or None. A guess, for messages only."""
    with source.open_bytes() as stream:
        sample = stream.read(_SAMPLE_BYTES)
    if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    zeros = sample.count(0)
    if zeros > len(sample) // 5:
        return "utf-16-le" if sample[1::2].count(0) >= sample[0::2].count(0) else "utf-16-be"
    high = [byte for byte in sample if byte >= 0x80]
    if _looks_like_gbk(sample):
        return "gbk"
    if not high:
        return None
    # 0x80 to 0x9f are control characters in latin-1, which no text has, and quotes and dashes in cp1252.
    return "cp1252" if any(byte < 0xA0 for byte in high) and _decodes(sample, "cp1252") else "latin-1"


def _looks_like_gbk(sample: bytes) -> bool:
    """Most non-ASCII characters are common Chinese ones: two bytes, both from 0xa1 on."""
    decoder = codecs.getincrementaldecoder("gbk")()
    try:
        text = decoder.decode(sample)
    except UnicodeDecodeError:
        return False
    wide = [character for character in text if ord(character) >= 0x80]
    chinese = sum("\u4e00" <= character <= "\u9fff" or "\u3000" <= character <= "\u30ff" for character in wide)
    common = sum(len(c.encode("gbk", errors="ignore")) == 2 and c.encode("gbk")[1] >= 0xA1 for c in wide)
    return bool(wide) and chinese >= 0.6 * len(wide) and common >= 0.6 * len(wide)


def _decodes(sample: bytes, encoding: str) -> bool:
    try:
        sample.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True
