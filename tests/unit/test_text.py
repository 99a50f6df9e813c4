"""Text made safe for terminals, and names made safe for every file system."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import RunError
from trimtab.text import check_name, clean_name, cut, safe, width


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b]0;pwn\x07", "\\x1b]0;pwn\\x07"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\u202eb", "a\\u202eb"),
        ("\n2026-01-01 INFO fake", "\\n2026-01-01 INFO fake"),
        ("a\x9bb", "a\\x9bb"),
        ("\ud800", "\\ud800"),
        ("你好\tworld", "你好\\tworld"),
    ],
)
def test_hostile_text_is_shown_as_escapes(hostile: str, shown: str) -> None:
    assert safe(hostile) == shown


def test_line_feeds_stay_when_asked_but_escape_sequences_do_not() -> None:
    assert safe("a\nb\x1b", newlines=True) == "a\nb\\x1b"


def test_a_long_text_is_cut_with_an_ellipsis() -> None:
    assert safe("x" * 5_000_000, limit=10) == "x" * 9 + "…"
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "ab…"


@given(st.text(), st.integers(1, 40))
def test_safe_text_never_holds_a_control_character_and_never_exceeds_the_limit(text: str, limit: int) -> None:
    shown = safe(text, limit=limit)
    assert len(shown) <= limit
    assert not any(unicodedata.category(character) == "Cc" for character in shown)
    shown.encode("utf-8")


@given(st.text(alphabet=st.characters(codec="utf-8", categories=["L", "N", "P", "S"])))
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert safe(text) == text


def test_width_counts_wide_characters_twice() -> None:
    assert width("ab") == 2
    assert width("你好") == 4
    assert width("e\u0301") == 1


@pytest.mark.parametrize("name", ["a", "Qwen2.5-0.5B_run.1", "x" * 64, "_", ".hidden"])
def test_plain_names_are_accepted(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "a/b", "a\\b", "..", ".", "nul", "CON.txt", "com1", "x" * 65, "a b", "-rf", "a.", "a\x00", "名"]
)
def test_names_that_some_system_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(RunError) as caught:
        check_name(name)
    assert caught.value.cure


@given(st.text())
def test_a_cleaned_name_is_always_accepted(text: str) -> None:
    assert check_name(clean_name(text))
