"""Tokens to text where a character spans tokens; stop strings; chat templates."""

from __future__ import annotations

import json

import pytest

from dbo.errors import ConfigError
from launch.text import StopStrings, TextCodec, cut_at_stop
from tests.launch.tiny import byte_level


@pytest.fixture
def codec() -> TextCodec:
    return TextCodec(byte_level(), None, {})


@pytest.mark.parametrize("text", ["plain words", "añb", "日本語のテキスト", "👩‍👩‍👧 and 🎉!", "é" * 20])
def test_text_grows_by_whole_characters_to_the_same_text(codec, text):
    stream = StopStrings(codec, ["never"])
    seen = [""]
    for token in codec.encode(text):
        assert not stream.push(token)
        assert "\ufffd" not in stream.text
        assert stream.text.startswith(seen[-1])
        seen.append(stream.text)
    assert stream.text == text == codec.decode(codec.encode(text))


@pytest.mark.parametrize(("stop", "at"), [("語", "日本語"), ("b c", "a b c"), ("🎉", "x🎉"), ("x", "x")])
def test_a_stop_string_is_seen_with_its_last_token(codec, stop, at):
    tokens = codec.encode(at)
    stream = StopStrings(codec, ["unseen", stop])
    assert [stream.push(t) for t in tokens] == [False] * (len(tokens) - 1) + [True]


def test_special_tokens_are_no_text(codec):
    stream = StopStrings(codec, ["ab"])
    end = codec.tokenizer.token_to_id("<end>")
    assert [stream.push(t) for t in (*codec.encode("a"), end, *codec.encode("b"))] == [False, False, True]


def test_text_is_cut_at_the_first_stop_string():
    assert cut_at_stop("one two three", ["three", "two"]) == "one "
    assert cut_at_stop("one", ["x"]) == cut_at_stop("one", []) == "one"


def write_model(directory, **config) -> None:
    byte_level().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.mark.parametrize("kind", ["string", "list", "file"])
def test_chat_templates_are_found_where_published_models_keep_them(tmp_path, kind):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    template = {"string": TEMPLATE, "list": named, "file": "not this one"}[kind]
    write_model(tmp_path, chat_template=template, bos_token={"content": "<s>"})
    if kind == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    codec = TextCodec.read(tmp_path)
    assert codec.decode(codec.encode_chat([{"role": "user", "content": "hi"}])) == "<s>[user]hi>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ range(1000000) }}",
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_an_error_of_the_prompt(tmp_path, template):
    write_model(tmp_path, chat_template=template)
    with pytest.raises(ValueError, match="chat template"):
        TextCodec.read(tmp_path).encode_chat([{"role": "user", "content": "hi"}])


def test_a_model_without_template_or_tokenizer_says_so(tmp_path):
    assert TextCodec.read(tmp_path) is None
    write_model(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        TextCodec.read(tmp_path).encode_chat([])
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        TextCodec.read(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        TextCodec.read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TextCodec.read(tmp_path)
