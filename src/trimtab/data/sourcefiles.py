"""What `data.train` names, as a list of files that exist and have a known format. Loads no torch."""

from __future__ import annotations

import errno
import json
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimtab.errors import DataError, nearest
from trimtab.files import from_home
from trimtab.text import safe

Family = Literal["csv", "tsv", "json", "text", "parquet", "arrow"]

_FAMILIES: dict[str, Family] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
TEXT_FAMILIES = ("csv", "tsv", "json", "text")
_KNOWN = "CSV, TSV, JSON, JSON lines, Parquet, Arrow, text"
_OTHER_ENDINGS = {
    ".xlsx": "Save the sheet as CSV (UTF-8).",
    ".xls": "Save the sheet as CSV (UTF-8).",
    ".zip": "Unpack it first and name the files inside.",
    ".tar": "Unpack it first and name the files inside.",
    ".tgz": "Unpack it first and name the files inside.",
    ".bz2": "Unpack it first, or compress with gzip.",
    ".xz": "Unpack it first, or compress with gzip.",
    ".zst": "Unpack it first, or compress with gzip.",
    ".pkl": "Save the table as Parquet: pickle files can run code and are not read.",
    ".pickle": "Save the table as Parquet: pickle files can run code and are not read.",
}
_NOT_DATA = re.compile(r"(readme|licen[cs]e|dataset_infos?\.json|dataset_dict\.json|.*\.md$|\.)", re.IGNORECASE)
_HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<split>\w+))?")


@dataclass(frozen=True)
class SourceFile:
    """One file to read. `name` is what messages call it: the path as the user wrote it."""

    path: Path
    name: str
    family: Family
    gzipped: bool = False

    @property
    def is_text(self) -> bool:
        return self.family in TEXT_FAMILIES


def resolve(sources: Sequence[str]) -> list[SourceFile]:
    """Files for names of files, folders and hub data sets, in the order given.

    A folder stands for the data files directly in it, sorted by name, which must be of one format; or it is a data set
    that `datasets` has saved. `owner/name` or `owner/name:split` that is no path is a hub data set (split: train).

    Raises:
        DataError: nothing there, no permission, no known format.
    """
    found: list[SourceFile] = []
    for source in sources:
        found.extend(_resolve_one(source))
    if not found:
        raise DataError("no data is named.", cure="Set data.train to a file or folder.")
    return found


def _resolve_one(source: str) -> list[SourceFile]:
    path = from_home(source)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        match = _HUB_ID.fullmatch(source)
        if match and not path.parent.is_dir() and _family_of(path) is None:
            return _from_hub(match["name"], match["split"] or "train")
        raise _missing(path, source) from None
    except (OSError, ValueError) as error:
        raise _unreachable(source, error) from None
    if stat.S_ISDIR(mode):
        return _folder(path, source)
    return [_file(path, source, mode)]


def _unreachable(source: str, error: OSError | ValueError) -> DataError:
    name = safe(source, limit=200)
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return DataError("is a symbolic link that leads back to itself.", cure="Name the real file.", location=name)
    if isinstance(error, PermissionError):
        return DataError("no permission to read it.", cure=f"Run: chmod u+r {name}", location=name)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(f"cannot be opened ({safe(reason, limit=100)}).", cure="Check the name.", location=name)


def _missing(path: Path, source: str) -> DataError:
    """Names the nearest file of the folder, or the part of the path that is missing."""
    name = safe(source, limit=200)
    parent = path.parent
    if not parent.is_dir():
        return DataError(
            f"there is no folder '{safe(str(parent), limit=200)}'.",
            cure=f"Correct the path; it is taken from the current folder, {safe(str(Path.cwd()), limit=200)}.",
            location=name,
        )
    try:
        names = sorted(item.name for item in parent.iterdir())
    except OSError:
        names = []
    guess = nearest(path.name, names)
    if guess:
        return DataError("there is no such file.", cure=f"Did you mean '{safe(guess, limit=100)}'?", location=name)
    listing = ", ".join(safe(one, limit=60) for one in names[:8])
    cure = f"The folder has: {listing}." if listing else "The folder is empty."
    return DataError("there is no such file.", cure=cure, location=name)


def _family_of(path: Path) -> tuple[Family, bool] | None:
    """(format, gzipped) by the ending, or None."""
    suffix = path.suffix.lower()
    gzipped = suffix == ".gz"
    if gzipped:
        suffix = Path(path.stem).suffix.lower()
    family = _FAMILIES.get(suffix)
    if family is None or (gzipped and family not in TEXT_FAMILIES):
        return None
    return family, gzipped


def _file(path: Path, source: str, mode: int) -> SourceFile:
    name = safe(source, limit=300)
    if not stat.S_ISREG(mode):
        raise DataError("is neither a file nor a folder.", cure="Name a file.", location=name)
    known = _family_of(path)
    if known is None:
        ending = path.suffix.lower()
        cure = _OTHER_ENDINGS.get(ending, f"Known formats: {_KNOWN}; rename or convert the file.")
        raise DataError(f"the ending '{safe(ending, limit=20)}' tells no known format.", cure=cure, location=name)
    if path.stat().st_size == 0:
        raise DataError("the file is empty (0 bytes).", cure="Give a file with rows.", location=name)
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise _unreachable(source, error) from None
    return SourceFile(path, name, *known)


def _folder(path: Path, source: str) -> list[SourceFile]:
    name = safe(source, limit=200)
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise _unreachable(source, error) from None
    names = {entry.name for entry in entries}
    if "state.json" in names:
        return _saved_by_datasets(path, source)
    if "dataset_dict.json" in names:
        raise _several_splits(path, name)
    files = [entry for entry in entries if not _NOT_DATA.match(entry.name) and _family_of(entry) is not None]
    if not files:
        raise _no_data(entries, name)
    families: dict[str, list[str]] = {}
    for entry in files:
        known = _family_of(entry)
        families.setdefault(known[0] if known else "", []).append(entry.name)
    if len(families) > 1:
        listing = "; ".join(f"{kind}: {safe(', '.join(sorted(of)[:3]), limit=80)}" for kind, of in families.items())
        raise DataError(
            f"the folder has files of {len(families)} formats ({listing}).",
            cure="Name the files that belong to the data set, for instance data.train: [a.csv, b.csv].",
            location=name,
        )
    return [found for entry in files for found in _resolve_one(str(Path(source) / entry.name))]


def _no_data(entries: Sequence[Path], name: str) -> DataError:
    folders = [entry.name for entry in entries if entry.is_dir()]
    if folders:
        inside = safe(", ".join(folders[:5]), limit=120)
        cure = f"Folders inside are not searched ({inside}); name one, for instance {name.rstrip('/')}/{folders[0]}."
    else:
        cure = f"Known formats: {_KNOWN}."
    return DataError(f"the folder has no data files among {len(entries)} entries.", cure=cure, location=name)


def _several_splits(path: Path, name: str) -> DataError:
    splits = sorted(entry.name for entry in path.iterdir() if (entry / "state.json").is_file())
    listing = safe(", ".join(splits), limit=120)
    first = splits[0] if splits else "train"
    return DataError(
        f"the folder holds several splits ({listing}).",
        cure=f"Name one: data.train: {name.rstrip('/')}/{'train' if 'train' in splits else first}",
        location=name,
    )


def _saved_by_datasets(path: Path, source: str) -> list[SourceFile]:
    """The Arrow files that `state.json` lists."""
    name = safe(str(Path(source) / "state.json"), limit=200)
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        files = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            "the folder was not saved whole by `datasets`.", cure="Save it again with save_to_disk.", location=name
        ) from None
    # A name with a path in it would read a file elsewhere.
    if not files or any(not isinstance(file, str) or Path(file).name != file for file in files):
        raise DataError("lists no data files.", cure="Save it again with save_to_disk.", location=name)
    return [found for file in files for found in _resolve_one(str(Path(source) / file))]


def _from_hub(name: str, split: str) -> list[SourceFile]:
    """The Arrow files that the library `datasets` has downloaded for a data set."""
    try:
        import datasets
        import datasets.exceptions
    except ImportError:
        raise DataError(
            f"'{name}' is no file or folder; to read it as a hub data set the library `datasets` is needed.",
            cure="Run: pip install datasets",
        ) from None
    try:
        loaded = datasets.load_dataset(name, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = safe(str(error).strip().split("\n")[0], limit=200)
        raise DataError(
            f"the hub data set '{name}' (split {split}) cannot be read: {reason}",
            cure="Check the name, the split (owner/name:split) and the connection, or name a local file.",
        ) from None
    paths = [Path(entry["filename"]) for entry in loaded.cache_files] if isinstance(loaded, datasets.Dataset) else []
    shown = [name] if len(paths) == 1 else [f"{name} part {number}" for number in range(1, len(paths) + 1)]
    if not paths:
        raise DataError(f"the hub data set '{name}' (split {split}) has no rows.", cure="Take another split.")
    return [SourceFile(path, one, "arrow") for path, one in zip(paths, shown, strict=True)]
