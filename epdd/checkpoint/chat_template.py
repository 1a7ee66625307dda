"""A checkpoint's chat template: its file, which forms of messages it renders, and how it ends an answer.

Templates are rendered as transformers does it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from epdd.errors import ModelError
from epdd.families.files import read_json

_PROBE = "epdd-probe"
_TOOL = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
# The template printed the list of parts itself, as Python or JSON, instead of the text in it.
_PRINTED = re.compile(rf"""['"]text['"]: ?['"]{_PROBE}""")
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# What a template may raise if it does not handle a conversation.
FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_FAULTS = (*FAULTS, MemoryError)


class ChatTemplate:
    """A compiled template.  Some templates take only strings as content, some only lists, some have no tools, and some
    require a system message: test renderings tell which."""

    def __init__(self, source: str, tokens: dict[str, str], path: str = "chat_template.jinja") -> None:
        """`tokens`: name of a special token -> its text.  `path`: file of the template, for error messages.

        Raises ModelError if the template does not compile or renders no user text.
        """
        self.source = source
        self.path = path
        self.tokens = tokens
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"{path}: the chat template has a syntax error: {error}; correct it, or take it from the "
                             "original checkpoint") from None
        plain, listed = _PROBE, [{"type": "text", "text": _PROBE}]
        self.needs_system = False
        self.needs_system = not (self._shows(plain) or self._shows(listed))
        self.strings = self._shows(plain)
        self.lists = self._shows(listed)
        self.tools = self._shows("" if self.strings else [], [_TOOL])
        if not (self.strings or self.lists):
            raise ModelError(f"{path}: the chat template shows no user text; take the template of the original "
                             "checkpoint")

    def render(self, messages: list[dict[str, Any]], tools: Any, options: dict[str, Any],
               add_generation_prompt: bool = True) -> str:
        """Text of the prompt.  Raises what Jinja and the code of the template raise: FAULTS."""
        return self._template.render(messages=messages, tools=tools, documents=None,
                                     add_generation_prompt=add_generation_prompt, **{**self.tokens, **options})

    def shows_image(self, token: str) -> bool:
        """Whether an image in a list of parts is rendered as one `token`.  With string contents epdd writes it."""
        if not self.lists:
            return True
        try:
            return self.render(self._conversation([{"type": "image"}, {"type": "text", "text": _PROBE}]), None,
                               {}).count(token) == 1
        except _FAULTS:
            return False

    def end_of_turn(self) -> str:
        """Text that the template writes after an assistant's answer; empty if that cannot be found out."""
        form: Callable[[str], Any] = (lambda text: text) if self.strings else (
            lambda text: [{"type": "text", "text": text}])
        messages = [*self._conversation(form("a")), {"role": "assistant", "content": form(_PROBE)}]
        try:
            return self.render(messages, None, {}, add_generation_prompt=False).partition(_PROBE)[2]
        except _FAULTS:
            return ""

    def _conversation(self, content: Any) -> list[dict[str, Any]]:
        system = "Be brief." if isinstance(content, str) else [{"type": "text", "text": "Be brief."}]
        first = [{"role": "system", "content": system}] if self.needs_system else []
        return [*first, {"role": "user", "content": content}]

    def _shows(self, content: Any, tools: Any = None) -> bool:
        """Whether the prompt contains the probe that `content` or `tools` holds."""
        try:
            text = self.render(self._conversation(content), tools, {})
        except _FAULTS:
            return False
        return _PROBE in text and not _PRINTED.search(text)


def load(root: Path) -> ChatTemplate:
    """The template of a checkpoint folder.  Raises ModelError if it is missing or damaged."""
    path = root / "tokenizer_config.json"
    settings = read_json(path, {})
    source, file = _source(root, settings)
    return ChatTemplate(source, _special_tokens(path, settings), str(file))


def _special_tokens(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens in tokenizer_config.json.  Raises ModelError."""
    found = {}
    for name in _TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None and not isinstance(text, str):
            raise ModelError(f"{path}: {name} is {json.dumps(value)[:80]}, not a token's text; correct it")
        if text:
            found[name] = text
    return found


def _source(root: Path, settings: dict[str, Any]) -> tuple[str, Path]:
    """The template and its file, searched in transformers' order: processor_config.json, chat_template.json,
    chat_template.jinja, tokenizer_config.json."""
    for name in ("processor_config.json", "chat_template.json"):
        path = root / name
        value = read_json(path, {}).get("chat_template")
        if value is not None:
            return _default(value, path), path
    path = root / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8-sig"), path
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); download it again") from None
    path = root / "tokenizer_config.json"
    if (value := settings.get("chat_template")) is None:
        raise ModelError(f"{root}: no chat template (chat_template.jinja, chat_template.json, or chat_template in "
                         "tokenizer_config.json); take that of the model it was made from")
    return _default(value, path), path


def _default(value: Any, path: Path) -> str:
    """The template, or if there are several the one named "default"."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {item.get("name"): item.get("template") for item in value}
    if isinstance(value, dict):
        names = ", ".join(map(str, value))
        if not isinstance(value := value.get("default"), str):
            raise ModelError(f"{path}: chat_template has no entry named default (it has {names}); name one so")
    if not isinstance(value, str):
        raise ModelError(f"{path}: chat_template is no text; take that of the model it was made from")
    return value


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks text for training; here its body is rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        # As a call, not inline: assignments inside do not reach outside, as in transformers.
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes for HTML, and models were not trained on that.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
