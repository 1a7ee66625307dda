"""Renders a conversation by the checkpoint's chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2

from epdd.checkpoint.chat_template import FAULTS, ChatTemplate
from epdd.errors import BadRequest
from epdd.frontend.requests.messages import Conversation, Message
from epdd.frontend.text.tool_prompt import with_tools_in_text

_MARK = "\udfff "            # a lone surrogate, which JSON text cannot hold

Shield = Callable[[Any], Any]


class Template:
    """Renders conversations in the form that the template takes: contents as strings or lists, tools as tools or in
    text."""

    def __init__(self, template: ChatTemplate, placeholder: str) -> None:
        self._template = template
        self._placeholder = placeholder     # of an image, if contents must be strings

    def render(self, conversation: Conversation, shield: Shield) -> str:
        """The prompt's text; `shield` is applied to every string that came with the request.

        Raises BadRequest if the template refuses the conversation.
        """
        try:
            conversation = conversation if self._template.tools else with_tools_in_text(conversation)
            messages = [self._message(message, shield) for message in conversation.messages]
            tools = shield(conversation.tools) or None
            if conversation.continued:
                return self._continued(messages, tools, conversation.options)
            return self._template.render(messages, tools, conversation.options, conversation.generation_prompt)
        except jinja2.TemplateError as error:
            raise BadRequest(f"The model's chat template refused: {str(error)[:300]}", param="messages") from None
        except RecursionError:
            raise BadRequest("The messages or tools are nested too deeply", param="messages") from None
        except FAULTS:
            # The template rendered others at the start, so the fault lies in the request.
            raise BadRequest("The model's chat template cannot render these messages", param="messages") from None

    def _continued(self, messages: list[dict[str, Any]], tools: Any, options: dict[str, Any]) -> str:
        """Up to the end of the last message's last text, found as in transformers: by a mark after it."""
        content = messages[-1]["content"]
        if isinstance(content, str):
            said = content
            messages[-1]["content"] = said + _MARK
        else:
            part = next(part for part in reversed(content) if part["type"] == "text")
            said = part["text"]
            part["text"] = said + _MARK
        text = self._template.render(messages, tools, options, False)
        before, mark, after = text.rpartition(_MARK.strip())
        if not mark or said.strip() not in before:
            raise BadRequest("continue_final_message: the model's chat template does not show the last message as it "
                             "is", param="continue_final_message")
        # If the template stripped the blank after the mark, it would have stripped the message's too.
        return before if after.startswith(" ") else before.rstrip()

    def _message(self, message: Message, shield: Shield) -> dict[str, Any]:
        content: Any = message.content
        if isinstance(content, str):
            content = shield(content)
            if not self._template.strings:
                content = [{"type": "text", "text": content}]
        elif self._template.lists:
            content = [{"type": "text", "text": shield(part)} if isinstance(part, str) else {"type": "image"}
                       for part in content]
        else:
            content = "".join(shield(part) if isinstance(part, str) else self._placeholder for part in content)
        return {"role": message.role, "content": content, **shield(message.fields)}
