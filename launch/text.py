"""Text to tokens and back: the tokenizer of a model directory, its chat template, stop strings.

Its own file because it is the only one that knows `tokenizers` and `jinja2`, and because a byte-level token may hold a
part of a character: text is only ever taken from whole sequences of tokens.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dbo.errors import ConfigError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TextCodec:
    """Encodes prompts and decodes answers as the model directory says."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str]):
        self.tokenizer, self.chat_template, self.special_tokens = tokenizer, chat_template, special_tokens

    @classmethod
    def read(cls, directory: Path) -> TextCodec | None:
        """The codec of a model directory, or None if it has no `tokenizer.json`. Raises ConfigError."""
        file = directory / "tokenizer.json"
        if not file.exists():
            return None
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError("--model", str(file), "a tokenizer.json that tokenizers can read", str(error)) from None
        settings = _read_json(directory / "tokenizer_config.json")
        named = {name: settings[name] for name in _SPECIAL_NAMES if settings.get(name)}
        special = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items()}
        return cls(tokenizer, _chat_template(directory, settings), special)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with what the tokenizer adds of its own (a begin token, say)."""
        return list(self.tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation that the model shall answer. Raises ValueError."""
        if self.chat_template is None:
            raise ValueError("the model has no chat template; give a prompt instead of messages")
        try:
            text = (
                _environment()
                .from_string(self.chat_template)
                .render(messages=messages, add_generation_prompt=True, **self.special_tokens)
            )
        except Exception as error:  # the template is foreign code
            raise ValueError(f"the chat template refuses the messages: {error}") from None
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


class StopStrings:
    """The text of a growing answer, watched for stop strings.

    Tokens are decoded from a moving start: the text that ended at the last whole character is known, and each new
    token decodes only the tokens since the one before it (the two-offset scheme of text-generation-inference). A
    trailing U+FFFD means that a character is not complete yet.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str]):
        self.codec, self.stop = codec, tuple(stop)
        self.text = ""
        self._ids: list[int] = []
        self._start = self._known = 0  # tokens [start, known) are already in `text`; start gives context for the rest

    def push(self, token_id: int) -> bool:
        """Add a token; True when a stop string has appeared."""
        self._ids.append(token_id)
        before = self.codec.decode(self._ids[self._start : self._known])
        now = self.codec.decode(self._ids[self._start :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return False
        searched_from = max(len(self.text) - max(map(len, self.stop)) + 1, 0)
        self.text += now[len(before) :]
        self._start, self._known = self._known, len(self._ids)
        return any(stop in self.text[searched_from:] for stop in self.stop)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError("--model", str(file), "a template in UTF-8", str(error)) from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that published chat templates expect; templates are foreign code, hence the sandbox."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("--model", str(file), "a JSON object", str(error)) from None
