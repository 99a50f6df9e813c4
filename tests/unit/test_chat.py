"""Chat formats, templates, and the exact place of every answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data.chat import ChatTemplate, Rendered, detect_format, load_template, render, to_messages
from trimtab.data.sandbox import BadTemplateError, SafeTemplate
from trimtab.errors import DataError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Templates of the shapes that published models have, in our own words: each with a peculiarity of its family.
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (  # no generation prompt; the system text goes into the first user turn; contents are stripped
    "{% set system = '' %}{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>' ~ "
    "messages[0]['content'] ~ '<</SYS>>' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ system if loop.first else '' }}"
    "{{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
HEADERS = (  # strips contents, writes BOS once
    "{{ bos_token }}{% for m in messages %}<|h|>{{ m['role'] }}<|/h|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n{% endif %}"
)
THINKING = (  # the last answer gets an empty thought, earlier ones lose theirs: not prefix-stable
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% if loop.last %}<think>\n\n</think>\n\n{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEPT_THOUGHT = (
    "<think>{{ m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '\n\n' }}</think>"
    "\n\n{{ m.content.split('</think>')[-1] }}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}<end>{% endgeneration %}\n"
    "{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)
BARE_GENERATION = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}"
)
VICUNA = (  # closes only the last answer
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}{% elif m.role == 'assistant' %}"
    " ASSISTANT: {{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT:{% else %}{{ eos_token }}{% endif %}"
)
SINGLE_SPACE = "{% for m in messages %}{{ m.role }} {{ m.content.split() | join(' ') }}<end>{% endfor %}"
ALL = {
    "chatml": CHATML,
    "inst": INST,
    "headers": HEADERS,
    "thinking": THINKING,
    "generation": GENERATION,
    "bare": BARE_GENERATION,
    "vicuna": VICUNA,
}


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def answers(rendered: Rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.answers]


def template(source: str) -> ChatTemplate:
    return ChatTemplate("test", source, TOKENS)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["id", "messages"], "messages"),
        (["conversations", "system"], "sharegpt"),
        (["instruction", "input", "output"], "alpaca"),
        (["prompt", "completion"], "prompt_completion"),
        (["question", "answer"], None),
        (["text", "label"], None),
    ],
)
def test_format_is_known_by_its_columns(columns: list[str], expected: str | None) -> None:
    assert detect_format(columns) == expected


def test_four_formats_give_the_same_messages() -> None:
    expected = chat("Hi", "Hello", system="Be brief.")
    rows: dict[str, dict[str, Any]] = {
        "messages": {"messages": expected},
        "sharegpt": {
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
            "system": "Be brief.",
        },
        "alpaca": {"instruction": "Hi", "input": None, "output": "Hello", "system": "Be brief."},
        "prompt_completion": {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "completion": "Hello",
        },
    }
    assert [to_messages(row, fmt) for fmt, row in rows.items()] == [expected] * 4


def test_alpaca_puts_history_first_and_input_under_the_instruction() -> None:
    row = {"instruction": "Sum up.", "input": "A long text.", "output": "Short.", "history": [["Hi", "Hello"]]}
    assert to_messages(row, "alpaca") == chat("Hi", "Hello", "Sum up.\n\nA long text.", "Short.")


def test_question_and_answer_are_read_when_the_job_asks_for_them() -> None:
    assert to_messages({"question": "Why?", "answer": "So."}, "prompt_completion") == chat("Why?", "So.")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (chat("a", "b", "c"), "an assistant's answer must be last"),
        ([*chat("a"), *chat("b", "c")], "two user turns in a row"),
        (chat("a", "b")[1:], "without a user turn before it"),
        ([*chat("a", "b"), {"role": "system", "content": "s"}], "only the first may be one"),
        ([{"role": "system", "content": "s"}], "must be last"),
        (chat("a", " "), "every assistant message is empty"),
        (chat(" ", "b"), r"message 1 \(user\) is empty"),
        ([{"role": "tool", "content": "a"}], "role 'tool'"),
        ([{"role": "user", "content": 3}], r"is a number \(3\), text is expected"),
        ([{"role": "user", "content": [{"type": "text"}]}], "is a list, text is expected"),
        ([{"content": "a"}], "neither 'role' nor 'from'"),
        (["a"], "message 1 is text"),
        ([], "empty list"),
        (None, "'messages' is missing"),
    ],
)
def test_a_broken_conversation_is_refused_with_its_reason(messages: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        to_messages({"messages": messages}, "messages")


def test_other_columns_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="'output' is missing"):
        to_messages({"instruction": "a", "output": None}, "alpaca")
    with pytest.raises(ValueError, match="entry 1 of 'history'"):
        to_messages({"instruction": "a", "output": "b", "history": [["q"]]}, "alpaca")
    with pytest.raises(ValueError, match="'history' is text"):
        to_messages({"instruction": "a", "output": "b", "history": "q"}, "alpaca")
    with pytest.raises(ValueError, match="'system' is a number"):
        to_messages({"prompt": "a", "completion": "b", "system": 1}, "prompt_completion")


@pytest.mark.parametrize(
    ("source", "ending", "closed"),
    [
        (CHATML, "<|im_end|>", True),
        (INST, " </s>", True),
        (HEADERS, "<|eot|>", True),
        (GENERATION, "<end>", True),
        (BARE_GENERATION, "<end>", True),
    ],
    ids=["chatml", "inst", "headers", "generation", "bare"],
)
def test_an_answer_reaches_to_its_end_of_turn(source: str, ending: str, closed: bool) -> None:
    rendered = render(chat("One?", "First.", "Two?", "Second.", system="Be brief."), template(source))
    assert answers(rendered) == ["First." + ending, "Second." + ending]
    assert rendered.closed is closed


def test_a_template_that_rewrites_earlier_turns_still_gives_every_answer() -> None:
    rendered = render(chat("One?", "First.", "Two?", "Second."), template(THINKING))
    # The empty thought is what the model has to write after the generation prompt.
    assert answers(rendered) == ["First.<|im_end|>", "<think>\n\n</think>\n\nSecond.<|im_end|>"]


def test_a_thought_that_the_template_cuts_leaves_the_rest_of_the_answer() -> None:
    rendered = render(chat("One?", "<think>hm</think>\nFirst.", "Two?", "Second."), template(THINKING))
    assert answers(rendered)[0] == "First.<|im_end|>"
    assert "hm" not in rendered.text


def test_a_thought_that_the_template_keeps_in_the_last_answer_counts() -> None:
    # As Qwen3 does: a thought in the content takes the place of the empty one, so no sentinel leads to it.
    source = THINKING.replace("<think>\n\n</think>\n\n{{ m.content }}", KEPT_THOUGHT)
    rendered = render(chat("One?", "First.", "Two?", "<think>hm</think>Second."), template(source))
    assert answers(rendered) == ["First.<|im_end|>", "<think>hm</think>\n\nSecond.<|im_end|>"]
    assert rendered.closed


def test_a_template_that_closes_only_the_end_gives_the_last_answer_its_end() -> None:
    rendered = render(chat("One?", "First.", "Two?", "Second."), template(VICUNA))
    assert answers(rendered) == [" First.", " Second.</s>"]


def test_an_open_answer_is_told() -> None:
    rendered = render(chat("a", "b"), template("{% for m in messages %}{{ m.content }}\n{% endfor %}"))
    assert answers(rendered) == ["b"]
    assert rendered.closed is False


def test_an_empty_answer_in_the_middle_does_not_count() -> None:
    assert answers(render(chat("a", " ", "b", "c"), template(CHATML))) == ["c<|im_end|>"]


def test_an_answer_that_also_stands_in_the_question_is_found_in_its_own_turn() -> None:
    rendered = render(chat("yes or no", "yes", "no or yes", "no"), template(HEADERS))
    assert answers(rendered) == ["yes<|eot|>", "no<|eot|>"]
    assert rendered.answers[0][0] == rendered.text.index("yes<|eot|>")


def test_a_template_that_changes_answers_is_refused_with_a_cure() -> None:
    with pytest.raises(ValueError, match=r"data\.template: chatml"):
        render(chat("a", "two  blanks"), template(SINGLE_SPACE))


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(ValueError, match="refuses this conversation: no system"):
        render(chat("a", "b"), template("{{ raise_exception('no system') }}"))


_words = st.text(st.characters(codec="utf-8", exclude_characters="\ue0f0\ue0f1"), max_size=20)


@pytest.mark.parametrize("name", [*ALL, "shipped chatml", "shipped alpaca", "shipped plain"])
@given(texts=st.lists(st.tuples(_words, _words), min_size=1, max_size=3), system=st.none() | _words)
@settings(max_examples=12, deadline=None)
def test_every_answer_is_found_whatever_the_contents(
    name: str, texts: list[tuple[str, str]], system: str | None
) -> None:
    contents = [f"{side}x" for pair in texts for side in pair]
    chosen = load_template(name.split()[1], None, TOKENS) if name.startswith("shipped") else template(ALL[name])
    rendered = render(chat(*contents, system=system), chosen)
    found = answers(rendered)
    assert len(found) == len(texts)
    for answer, content in zip(found, contents[1::2], strict=True):
        assert content.strip() in answer
    starts_and_ends = [edge for span in rendered.answers for edge in span]
    assert starts_and_ends == sorted(starts_and_ends)


def test_shipped_templates_end_an_answer_with_the_eos() -> None:
    for name, expected in (("chatml", "b<|im_end|></s>"), ("alpaca", "b</s>"), ("plain", "b</s>")):
        assert answers(render(chat("a", "b"), load_template(name, None, TOKENS))) == [expected]


def test_chatml_writes_no_second_end_where_the_eos_is_its_own() -> None:
    chosen = load_template("chatml", None, {"eos_token": "<|im_end|>"})
    assert answers(render(chat("a", "b"), chosen)) == ["b<|im_end|>"]


def test_a_shipped_template_writes_the_bos_that_the_tokenizer_would() -> None:
    text = load_template("alpaca", None, TOKENS, adds_bos=True).text(chat("a"), add_generation_prompt=True)
    assert text == "<s>### Instruction:\na\n\n### Response:\n"


def test_the_prompt_of_a_shipped_template_is_the_beginning_of_its_training_text() -> None:
    for name in ("chatml", "alpaca", "plain"):
        chosen = load_template(name, None, TOKENS)
        rendered = render(chat("a", "b"), chosen)
        prompt = chosen.text(chat("a"), add_generation_prompt=True)
        assert rendered.text.startswith(prompt)
        assert rendered.answers[0][0] == len(prompt)


def test_templates_come_from_a_name_a_file_or_the_tokenizer(tmp_path: Any) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}", encoding="utf-8")
    assert load_template(str(file), None, {}).text(chat("é"), add_generation_prompt=False) == "é"
    assert load_template(None, {"default": "A", "tool_use": "B"}, {}).source == "A"
    assert load_template(None, "A", {}).name == "tokenizer"


def test_a_missing_or_broken_template_is_refused_with_a_cure(tmp_path: Any) -> None:
    with pytest.raises(DataError, match=r"no chat template.*data\.template: chatml"):
        load_template(None, None, {})
    with pytest.raises(DataError, match="Did you mean 'chatml'"):
        load_template("chatlm", None, {})
    with pytest.raises(DataError, match="no valid Jinja"):
        load_template(None, "{% if %}", {})
    file = tmp_path / "latin.jinja"
    file.write_bytes(b"\xe9")
    with pytest.raises(DataError, match="Save it as UTF-8"):
        load_template(str(file), None, {})


def test_equal_templates_have_equal_digests_and_tokens_matter() -> None:
    assert template("A").digest == template("A").digest
    assert template("A").digest != template("B").digest
    assert template("A").digest != ChatTemplate("test", "A", {}).digest


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in 'a' * 999999 %}{% endfor %}",
        "{{ 'a' * 8000000000 }}",
        "{{ [1] * 8000000000 }}",
        "{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s=9) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 'a'.ljust(8000000000) }}",
        "{% set f = 'a'.zfill %}{{ f(8000000000) }}",
        "{{ ('a' * 99999) | replace('a', 'a' * 99999) }}",
        "{{ ('a' * 99999).replace('a', 'a' * 99999) }}",
        "{{ 'a'.join(['b' * 900000] * 900000) }}",
        "{{ ['b' * 900000] * 900000 | join }}",
        "{{ 'a' | indent(8000000000, true) }}",
        "{{ '%8000000000d' % 1 }}",
        "{{ '{:8000000000}'.format(1) }}",
        "{{ 9 ** 999999999 }}",
        "{{ range(99999999) | list }}",
        "{{ messages.append(1) }}",
        "{{ {} | tojson(indent=99999999) }}",
        "{{ missing.attribute }}",
        "{% for i in range(1000) %}{{ 'a' * 900000 }}{% endfor %}",
    ],
)
def test_a_hostile_template_ends_in_one_line(source: str) -> None:
    with pytest.raises(BadTemplateError):
        SafeTemplate(source).render(chat("a"), {}, add_generation_prompt=False)


def test_what_published_templates_use_is_allowed() -> None:
    source = (
        "{%- for m in messages if m.role != 'x' %}{% if loop.index0 > 0 %}{% break %}{% endif %}{{ m | tojson }}"
        "{% endfor %}{{ strftime_now('%Y') }}{{ messages | map(attribute='content') | join(',') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    )
    text = SafeTemplate(source).render(chat("<é>", "b"), {}, add_generation_prompt=False)
    assert text == '{"role": "user", "content": "<é>"}2024<é>,b1'
