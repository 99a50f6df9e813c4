"""From what `model.path` says (a folder, a GGUF file or a hub id) to an ordinary model folder on the disk."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from trimtab.errors import ModelError, did_you_mean
from trimtab.files import from_home
from trimtab.models import gguf
from trimtab.models.facts import read_config
from trimtab.models.gguf_file import MAGIC
from trimtab.models.weight_files import check_weights
from trimtab.text import clean_name, safe
from trimtab.units import format_bytes

TOKENIZER_FILES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "merges.txt", "tokenizer_config.json",
)  # fmt: skip
# What a hub model is made of here; pickles and the code of other frameworks stay there.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "README.md"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(path: str, *, cache_dir: Path, trust_remote_code: bool = False) -> Path:
    """The folder of the model, checked: config.json, whole safetensors and a tokenizer are there.

    A GGUF file is converted once into `cache_dir`. A hub id is downloaded into the hub's own cache, or found there
    without a connection.

    Raises:
        ModelError: nothing there (names close ones), or a folder that lacks a part or holds a damaged one.
    """
    given = from_home(path)
    if given.is_dir():
        folder = given
    elif given.is_file():
        folder = _from_file(given, cache_dir)
    elif _HUB_ID.fullmatch(path) and not _looks_like_path(path):
        folder = _from_hub(path, trust_remote_code)
    else:
        raise _missing(given)
    folder = folder.resolve()
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Raises ModelError where config.json, the weights or the tokenizer are missing or damaged."""
    if not (folder / "config.json").is_file():
        _point_inside(folder)
    read_config(folder)
    check_weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES[:-2]):
        raise ModelError(
            f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES[:4])} is there.",
            cure="Copy the tokenizer's files of the same model into that folder.",
        )


def _point_inside(folder: Path) -> None:
    """A folder without config.json that holds model folders or GGUF files: say which."""
    inside = sorted(str(child.parent) for child in folder.glob("*/config.json"))
    inside += sorted(str(child) for child in folder.glob("*.gguf"))
    if inside:
        shown = ", ".join(safe(name, limit=120) for name in inside[:3])
        raise ModelError(f"{folder} has no config.json, but holds {shown}.", cure=f"Use `model.path: {inside[0]}`.")


def _looks_like_path(path: str) -> bool:
    """`./x`, `~/x`, `C:\\x`, `a/b/c`, or a first part that exists here: not a hub id."""
    if path.startswith((".", "~", "/")) or "\\" in path or path.endswith((".gguf", ".safetensors")):
        return True
    parts = path.split("/")
    return len(parts) == 1 or len(parts) > 2 or Path(parts[0]).is_dir()


def _from_file(path: Path, cache_dir: Path) -> Path:
    with path.open("rb") as file:
        is_gguf = file.read(4) == MAGIC
    if not is_gguf and path.suffix == ".gguf":
        raise ModelError(f"{path} is not a GGUF file: it does not begin with 'GGUF'.", cure="Download the file again.")
    if not is_gguf:
        raise ModelError(f"{path} is a file, not a model.", cure=f"Use its folder: `model.path: {path.parent}`.")
    return _convert_once(path, cache_dir)


def _convert_once(path: Path, cache_dir: Path) -> Path:
    """The converted folder; made aside and renamed, so that a stopped conversion leaves no half folder."""
    parent = cache_dir / "gguf"
    target = parent / f"{clean_name(path.stem, fallback='model', limit=40)}-{gguf.source_key(path)}"
    if (target / "config.json").is_file():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _check_space(path, parent)
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=parent) as made:
            aside = Path(made) / "model"
            aside.mkdir()
            gguf.convert(path, aside)
            _move_into_place(aside, target)
    except OSError as error:
        raise ModelError(
            f"{path} could not be converted in {parent}: {error.strerror or error}.",
            cure="Free some space, or make that folder writable.",
        ) from error
    return target


def _move_into_place(aside: Path, target: Path) -> None:
    try:
        aside.rename(target)
    except OSError:
        # Another process converted the same file meanwhile: its folder is as good.
        if not (target / "config.json").is_file():
            raise


def _check_space(path: Path, folder: Path) -> None:
    # 4-bit weights become 32-bit ones: about eight times the file, and never more than the float32 limit or 4 times it.
    needed = min(path.stat().st_size * 8, gguf.FULL_PRECISION_LIMIT_BYTES + path.stat().st_size * 4)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"Converting {path} may take {format_bytes(needed)} in {folder}, where {format_bytes(free)} are free.",
            cure="Free some space there.",
        )


def _from_hub(name: str, trust_remote_code: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    patterns = [*_HUB_PATTERNS, "*.py"] if trust_remote_code else _HUB_PATTERNS
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (errors.RepositoryNotFoundError, errors.GatedRepoError, errors.HFValidationError) as error:
        raise ModelError(
            f"The hub has no model '{name}' that may be read from here ({type(error).__name__}).",
            cure=f"Check the name; for a gated model run `hf auth login`; or give a folder: {_near(Path(name))}",
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise ModelError(
            f"'{name}' is no folder here, and the hub could not be reached to fetch it ({type(error).__name__}).",
            cure=f"On a machine with a connection run `hf download {name} --local-dir DIR`, copy DIR here, and set"
            f" `model.path: DIR`. {_near(Path(name))}".strip(),
        ) from error


def _missing(path: Path) -> ModelError:
    return ModelError(f"There is no model at {safe(str(path), limit=300)}.", cure=_near(path) or "Check `model.path`.")


def _near(path: Path) -> str:
    """A hint with the entries beside `path` that look alike."""
    parent = path.parent
    if not parent.is_dir():
        return ""
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf")
    hint = did_you_mean(path.name, names[:500])
    return hint.split(" Known:")[0] if hint.startswith("Did you mean") else ""
