"""Checkpoints that are whole or not there, in safetensors and JSON.

A checkpoint is written aside, flushed, named in the index, renamed, read back and compared with its hashes; only then
are older ones removed. So at any moment a crash leaves the old newest checkpoint, or the new one, and never a part.

    checkpoints/index.json                 which folders are this run's, in the order in which they were saved
    checkpoints/step-00000123/             weights.safetensors, optimizer.safetensors, state.json, manifest.json

Order is by the sequence number in the index, never by name or time of change: both lie after copies and restores.
Nothing is removed that the index does not name, whose manifest has another run's id, or that holds a file of the
user's; links are never followed.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trimtab import files
from trimtab.errors import RunError
from trimtab.train.tensorfiles import Groups, check_finite, group_bytes, tensor_file

FORMAT = 1
INDEX = "index.json"
MANIFEST = "manifest.json"
STATE = "state.json"
_WEIGHT_FILE = re.compile(r"[a-z0-9_]+\.safetensors")
_FOLDER = re.compile(r"step-[0-9]{8,}(-[0-9]+)?")
_OVERHEAD_BYTES = 64 * 1024


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written and read back."""

    path: Path
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Loaded:
    """A checkpoint whose every byte was compared with its manifest. Tensors are on the CPU."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


@dataclass(frozen=True)
class _Entry:
    """What the index says of one checkpoint."""

    sequence: int
    name: str
    step: int
    metric: float | None
    is_best: bool


class _Damaged(Exception):  # noqa: N818 - a finding, which the store turns into a message
    """What is wrong with a checkpoint, or with the index."""


class CheckpointStore:
    """The checkpoints of one run. `messages` says what the last call passed over or could not clean up."""

    def __init__(self, run_dir: Path, run_id: str, keep: int) -> None:
        assert keep >= 1, keep
        self.messages: list[str] = []
        self._root = run_dir / "checkpoints"
        self._run_id = run_id
        self._keep = keep
        # Part of the names of what is in the making or being removed; an id that was edited by hand stays harmless.
        self._mark = hashlib.sha256(run_id.encode("utf-8", errors="replace")).hexdigest()[:16]
        self._cleaned = False
        # By sequence number: a name is used again once its damaged folder is gone.
        self._damaged: set[int] = set()

    def save(
        self,
        step: int,
        tensors: Groups,
        state: Mapping[str, Any],
        *,
        metric: float | None = None,
        is_best: bool = False,
    ) -> Saved:
        """Writes and verifies a checkpoint, then lets go of those beyond the newest `keep` and the best.

        `tensors`: a file for each group (`weights`, `optimizer`), name -> tensor of any device. `metric` is kept in the
        index for readers.

        Raises:
            RunError: a number is not finite, no space, not allowed, or the disk gives other bytes back. The older
                checkpoints are as they were.
        """
        start = time.perf_counter()
        self.messages = []
        check_finite(tensors, step)
        raw_state = _state_bytes(state, step)
        self._prepare()
        needed = sum(group_bytes(group) for group in tensors.values()) + len(raw_state) + _OVERHEAD_BYTES
        files.require_space(self._root, needed, f"the checkpoint of step {step}")
        named = self._entries()
        # A crash before the rename leaves a name without a folder. The new checkpoint may take that name, so the dead
        # entry must go: rotation would remove the new one for the old.
        entries = [entry for entry in named if _is_folder(self._root / entry.name)]
        finite = metric if metric is not None and math.isfinite(metric) else None
        entry = _Entry(1 + max((e.sequence for e in named), default=0), self._free_name(step), step, finite, is_best)
        path = self._root / entry.name
        try:
            self._write(entry, tensors, raw_state, entries)
            files.fsync_folder(self._root)
        except OSError as error:
            raise files.write_error(error, path, needed) from error
        try:
            manifest = self._verify(path)
        except _Damaged as damage:
            self._damaged.add(entry.sequence)
            raise RunError(
                f"the checkpoint of step {step} was written, but the disk gives it back otherwise: {damage}.",
                cure="Check the disk, or choose another by output.run. Older checkpoints are as they were.",
            ) from damage
        self._rotate([*entries, entry])
        size = sum(facts["bytes"] for facts in manifest["files"].values())
        return Saved(path, time.perf_counter() - start, size)

    def newest(self) -> Loaded | None:
        """The newest whole checkpoint; None where there is none. Damaged ones are passed over with a message."""
        return self._first_whole(self._known())

    def best(self) -> Loaded | None:
        """The newest whole one of those saved as the best; None where there is none."""
        return self._first_whole([entry for entry in self._known() if entry.is_best])

    def load(self, path: Path) -> Loaded:
        """One checkpoint by its folder. RunError where it is damaged or another run's."""
        try:
            return self._load(path)
        except _Damaged as damage:
            raise RunError(f"checkpoint {path} cannot be used: {damage}.", cure="Choose another one.") from damage

    # ----------------------------------------------------------------------------------------------------- reading

    def _known(self) -> list[_Entry]:
        """What the index names and is there, the newest first."""
        self.messages = []
        return [entry for entry in reversed(self._entries()) if _is_folder(self._root / entry.name)]

    def _first_whole(self, entries: list[_Entry]) -> Loaded | None:
        for entry in entries:
            try:
                return self._load(self._root / entry.name)
            except _Damaged as damage:
                self._damaged.add(entry.sequence)
                self.messages.append(f"checkpoint {self._root / entry.name} is passed over: {damage}")
        return None

    def _load(self, path: Path) -> Loaded:
        manifest = self._verify(path)
        try:
            state = files.read_json(path / STATE)
            tensors = {
                name.partition(".")[0]: load_file(path / name)
                for name in manifest["files"]
                if _WEIGHT_FILE.fullmatch(name)
            }
        except (OSError, ValueError, SafetensorError) as error:
            raise _Damaged(f"cannot be read ({error})") from error
        return Loaded(path, manifest["step"], tensors, state)

    def _verify(self, path: Path) -> dict[str, Any]:
        """The manifest, once every file has the size and hash that it tells."""
        manifest = self._manifest(path)
        for name, facts in manifest["files"].items():
            file = path / name
            try:
                if not file.is_file() or file.is_symlink():
                    raise _Damaged(f"{name} is missing")
                size = file.stat().st_size
                if size != facts["bytes"]:
                    raise _Damaged(f"{name} has {size} bytes instead of {facts['bytes']}")
                if files.sha256_of(file) != facts["sha256"]:
                    raise _Damaged(f"{name} has other content than was written")
            except OSError as error:
                raise _Damaged(f"{name} cannot be read ({error.strerror or error})") from error
        return manifest

    def _manifest(self, path: Path) -> dict[str, Any]:
        """The manifest of a folder that is this run's, as far as it can be told without reading the files."""
        if not _is_folder(path):
            raise _Damaged("it is not a folder")
        manifest = _read_sealed(path / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise _Damaged(f"its format is {manifest.get('format')!r}, this program reads {FORMAT}")
        if manifest.get("run_id") != self._run_id or manifest.get("name") != path.name:
            raise _Damaged("it was saved by another run, or renamed")
        _file_names(manifest)
        return manifest

    def _entries(self) -> list[_Entry]:
        """The index in the order of saving; built anew from the manifests where it is lost or damaged."""
        path = self._root / INDEX
        try:
            document = _read_sealed(path)
            if document.get("run_id") != self._run_id:
                raise _Damaged("it is another run's")
            entries = [_entry_of(fields) for fields in document.get("entries") or ()]
        except _Damaged as damage:
            entries = self._entries_of_folders()
            if path.exists() or entries:
                self.messages.append(f"{path} is read from the checkpoints anew: {damage}")
        return sorted(entries, key=lambda entry: entry.sequence)

    def _entries_of_folders(self) -> list[_Entry]:
        found: list[_Entry] = []
        for path in sorted(self._root.glob("step-*")):
            try:
                found.append(_entry_of(self._manifest(path)))
            except _Damaged:
                continue
        return found

    # ----------------------------------------------------------------------------------------------------- writing

    def _prepare(self) -> None:
        """Makes the folder, and once per process removes what a killed one left in the making."""
        if self._root.is_dir() and self._cleaned:
            return
        files.make_folder(self._root, probe_name=f".tmp-{self._mark}-probe")
        self._cleaned = True
        for path in sorted(self._root.glob(f".tmp-{self._mark}-*")):
            self._try_remove(path, [*(p.name for p in path.glob("*.safetensors")), STATE, MANIFEST])
        for path in sorted(self._root.glob(f".trash-{self._mark}-*")):
            self._remove_trash(path)

    def _free_name(self, step: int) -> str:
        """`step-00000123`, or with `-2` and so on where that is taken: a step may be saved again, or a user's folder
        may lie there."""
        plain = f"step-{step:08d}"
        name, number = plain, 1
        while (self._root / name).exists() or (self._root / name).is_symlink():
            number += 1
            name = f"{plain}-{number}"
        return name

    def _write(self, entry: _Entry, tensors: Groups, raw_state: bytes, entries: list[_Entry]) -> None:
        """Writes aside, names it in the index, then renames: a folder of ours that no index names never exists."""
        temp = self._root / f".tmp-{self._mark}-{entry.name}-{uuid.uuid4().hex[:8]}"
        names = [f"{group}.safetensors" for group in tensors]
        try:
            files.make_new_folder(temp)
            written = {
                name: files.write_new(temp / name, tensor_file(group))
                for name, group in zip(names, tensors.values(), strict=True)
            }
            written[STATE] = files.write_new(temp / STATE, [raw_state])
            manifest = {"format": FORMAT, "run_id": self._run_id, **asdict(entry)}
            manifest["files"] = {name: asdict(facts) for name, facts in written.items()}
            files.write_new(temp / MANIFEST, [files.sealed(manifest)])
            files.fsync_folder(temp)
            self._write_index([*entries, entry])
            files.rename_new(temp, self._root / entry.name)
        except BaseException:
            self._try_remove(temp, [*names, STATE, MANIFEST])
            raise

    def _write_index(self, entries: list[_Entry]) -> None:
        document = {"format": FORMAT, "run_id": self._run_id, "entries": [asdict(entry) for entry in entries]}
        aside = self._root / f".tmp-{self._mark}-index-{uuid.uuid4().hex[:8]}"
        files.write_atomic(self._root / INDEX, files.sealed(document), aside=aside)

    def _rotate(self, entries: list[_Entry]) -> None:
        """Removes what is beyond the rules and tidies the index. The new checkpoint is safe: nothing here may fail."""
        there = [entry for entry in entries if _is_folder(self._root / entry.name)]
        newest_first = [entry for entry in reversed(there) if entry.sequence not in self._damaged]
        best = next((entry for entry in newest_first if entry.is_best), None)
        again = [entry for entry in there[:-1] if entry.step == there[-1].step]
        kept = [entry for entry in newest_first if entry not in again][: self._keep]
        if best is not None:
            kept.append(best)
        for entry in there:
            if entry not in kept:
                self._discard(self._root / entry.name)
        try:
            self._write_index([entry for entry in there if entry in kept])
        except RunError as error:
            self.messages.append(error.message)

    def _discard(self, path: Path) -> None:
        """Removes a checkpoint of this run; leaves it, with a message, where it is not this run's alone."""
        try:
            manifest = self._manifest(path)
            strangers = {child.name for child in path.iterdir()} - {*manifest["files"], MANIFEST}
            if strangers:
                raise _Damaged(f"it holds other files ({', '.join(sorted(strangers)[:3])})")
            trash = self._root / f".trash-{self._mark}-{path.name}-{uuid.uuid4().hex[:8]}"
            files.rename_new(path, trash)
        except (_Damaged, OSError) as reason:
            self.messages.append(f"old checkpoint {path} is left: {reason}")
            return
        self._try_remove(trash, [*manifest["files"], MANIFEST])

    def _remove_trash(self, path: Path) -> None:
        """What an earlier process had begun to remove. The manifest goes last, so until then it tells whose it is;
        without one only an empty folder is removed."""
        try:
            manifest = _read_sealed(path / MANIFEST)
            names = [*_file_names(manifest), MANIFEST]
        except _Damaged:
            self._try_remove(path, [])
            return
        if manifest.get("run_id") == self._run_id:
            self._try_remove(path, names)

    def _try_remove(self, path: Path, names: list[str]) -> None:
        """Removes files by name and then the folder if it is empty, or a lone file. A link is left as it is."""
        try:
            if _is_folder(path):
                for name in names:
                    files.remove_file(path / name)
                files.remove_empty_folder(path)
            elif path.is_file() and not path.is_symlink():
                files.remove_file(path)
        except OSError as error:
            self.messages.append(f"{path} could not be removed: {error.strerror or error}")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _read_sealed(path: Path) -> dict[str, Any]:
    try:
        return files.read_sealed(path)
    except FileNotFoundError as error:
        raise _Damaged(f"{path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _Damaged(f"{path.name} cannot be read, or has other content than was written") from error


def _file_names(manifest: dict[str, Any]) -> list[str]:
    """The files that a manifest names. The seal proves no origin, so nothing but our own names is believed: with a
    `../` in one of them, clearing up would remove a file of the user's."""
    listed: Any = manifest.get("files")
    if not isinstance(listed, dict) or any(name != STATE and not _WEIGHT_FILE.fullmatch(name) for name in listed):
        raise _Damaged(f"{MANIFEST} names files that no checkpoint has")
    if not all(isinstance(facts, dict) and {"bytes", "sha256"} <= facts.keys() for facts in listed.values()):
        raise _Damaged(f"{MANIFEST} does not tell the size and hash of each file")
    return list(listed)


def _entry_of(fields: Any) -> _Entry:
    """What the index or a manifest says of one checkpoint, believed only in the form in which it is written here."""
    try:
        values = {name: fields[name] for name in _Entry.__dataclass_fields__}
    except (KeyError, TypeError) as error:
        raise _Damaged("an entry lacks a field") from error
    counted = isinstance(values["sequence"], int) and isinstance(values["step"], int)
    if not counted or not isinstance(values["name"], str) or not _FOLDER.fullmatch(values["name"]):
        raise _Damaged("an entry is not of this program's form")
    return _Entry(**values)


def _state_bytes(state: Mapping[str, Any], step: int) -> bytes:
    try:
        return files.json_bytes(dict(state))
    except ValueError as error:
        raise RunError(
            f"the checkpoint of step {step} is not saved: its state holds a number that is not finite.",
            cure="Go on from the last checkpoint with a lower training.learning_rate.",
        ) from error
