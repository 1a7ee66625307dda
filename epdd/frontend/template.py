"""The checkpoint's chat template: a conversation to one string, rendered as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from epdd.errors import BadRequest, ModelError
from epdd.frontend.messages import Conversation, Message
from epdd.frontend.tool_prompt import spelled

_PROBE = "epdd-probe"
_MARK = "\udfff "            # a lone surrogate, which no JSON text can hold
_TOOL = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}

Shield = Callable[[Any], Any]


class Template:
    """Renders conversations.  Some templates read only string contents, others only lists, and some know no tools:
    all are tried at load, and conversations are handed over in a form that works."""

    def __init__(self, source: str, variables: dict[str, str], placeholder: str) -> None:
        self.source = source
        self._template = _environment().from_string(source)
        self._variables = variables
        self._placeholder = placeholder     # what stands for an image where contents must be strings
        self._strings = self._shows(_PROBE)
        self._lists = self._shows([{"type": "text", "text": _PROBE}])
        self._tools = self._shows("" if self._strings else [], [_TOOL])
        if not (self._strings or self._lists):
            raise ModelError("the chat template shows no user text")

    def render(self, conversation: Conversation, shield: Shield) -> str:
        """The prompt's text; `shield` is applied to every string that came with the request.

        Raises BadRequest if the template refuses the conversation.
        """
        try:
            conversation = conversation if self._tools else spelled(conversation)
            messages = [self._message(message, shield) for message in conversation.messages]
            tools = shield(conversation.tools) or None
            if conversation.continued:
                return self._continued(messages, tools, conversation.options)
            return self._render(messages, tools, conversation.options, conversation.generation_prompt)
        except jinja2.TemplateError as error:
            raise BadRequest(f"The model's chat template refused: {str(error)[:300]}", param="messages") from None
        except RecursionError:
            raise BadRequest("The messages or tools are nested too deeply", param="messages") from None
        except (TypeError, ValueError, KeyError, AttributeError):
            # What a template does with a shape its author never met; the fault lies in the request.
            raise BadRequest("The model's chat template cannot render these messages", param="messages") from None

    def _render(self, messages: list[dict[str, Any]], tools: Any, options: dict[str, Any],
                generation_prompt: bool = True) -> str:
        return self._template.render(messages=messages, tools=tools, documents=None,
                                     add_generation_prompt=generation_prompt, **{**self._variables, **options})

    def _continued(self, messages: list[dict[str, Any]], tools: Any, options: dict[str, Any]) -> str:
        """Up to the end of the last message's last text, found as transformers does: by a mark behind it."""
        content = messages[-1]["content"]
        if isinstance(content, str):
            said = content
            messages[-1]["content"] = said + _MARK
        else:
            part = next(part for part in reversed(content) if part["type"] == "text")
            said = part["text"]
            part["text"] = said + _MARK
        text = self._render(messages, tools, options, False)
        before, mark, after = text.rpartition(_MARK.strip())
        if not mark or said.strip() not in before:
            raise BadRequest("continue_final_message: the model's chat template does not show the last message as it "
                             "is", param="continue_final_message")
        # Where the template took the blank behind the mark away, it would have taken the message's too.
        return before if after.startswith(" ") else before.rstrip()

    def _message(self, message: Message, shield: Shield) -> dict[str, Any]:
        content: Any = message.content
        if isinstance(content, str):
            content = shield(content)
            if not self._strings:
                content = [{"type": "text", "text": content}]
        elif self._lists:
            content = [{"type": "text", "text": shield(part)} if isinstance(part, str) else {"type": "image"}
                       for part in content]
        else:
            content = "".join(shield(part) if isinstance(part, str) else self._placeholder for part in content)
        return {"role": message.role, "content": content, **shield(message.fields)}

    def _shows(self, content: Any, tools: Any = None) -> bool:
        """Whether the probe, in one of them, is in the text."""
        try:
            text = self._render([{"role": "user", "content": content}], tools, {})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return False
        return _PROBE in text and "'type'" not in text      # a list printed as Python shows it is no text


def load(folder: str, placeholder: str) -> Template:
    """The template of a checkpoint folder.  Raises ModelError if there is none or it is damaged."""
    root = Path(folder)
    settings = _json(root / "tokenizer_config.json")
    variables = {name: value if isinstance(value, str) else value["content"]
                 for name, value in settings.items()
                 if name in ("bos_token", "eos_token", "unk_token", "pad_token") and value}
    try:
        return Template(_source(root, settings), variables, placeholder)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"{folder}: the chat template has a syntax error: {error}") from None


def _source(root: Path, settings: dict[str, Any]) -> str:
    """In transformers' order: a file of its own, the processor's JSON, the tokenizer's settings."""
    path = root / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    source = _json(root / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(source, list):
        source = {item["name"]: item["template"] for item in source}.get("default")
    if not isinstance(source, str):
        raise ModelError(f"{root}: no chat template (chat_template.jinja, chat_template.json, tokenizer_config.json)")
    return source


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from None
    return data if isinstance(data, dict) else {}


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
