"""The README in both languages: every command, option, key and make target in it exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trimtab.cli import main
from trimtab.cli.options import read_settings
from trimtab.jobfile import job_from_flags, parse_job

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh-CN.md")


def commands_in(text: str) -> list[list[str]]:
    lines = re.findall(r"(?:^|`)(?:\.venv/bin/)?trimtab ([^`#\n]*)", text, re.MULTILINE)
    return [shlex.split(line.replace("\\|", "|")) for line in lines if line.strip()]


@pytest.mark.parametrize("name", READMES)
def test_every_command_and_option_in_the_readme_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    helps: dict[str, str] = {}
    for words in commands_in((ROOT / name).read_text(encoding="utf-8")):
        command = words[0]
        if command.startswith("-"):
            continue
        if command not in helps:
            with pytest.raises(SystemExit):
                main([command, "--help"])
            helps[command] = capsys.readouterr().out
        assert "Usage" in helps[command], f"{name} names `trimtab {command}`"
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", helps[command]), f"{name}: trimtab {command} has no {option}"


@pytest.mark.parametrize("name", READMES)
def test_settings_and_job_file_of_the_readme_are_accepted(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for words in commands_in(text):
        settings = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
        if settings:
            job_from_flags({"model.path": "m", "data.train": "d", **read_settings(settings)})
    block = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert block is not None
    assert parse_job(block[1]).method.kind == "lora"


def test_both_readmes_have_the_same_parts() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in READMES]
    first, second = (sorted(words[0] for words in commands_in(text)) for text in texts)
    assert first == second
    for sign in ("\n## ", "\n| ", "\n- ", "```"):
        assert texts[0].count(sign) == texts[1].count(sign), sign


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in READMES:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
