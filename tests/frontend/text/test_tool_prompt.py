"""Tools as Qwen's templates write them, for checkpoints whose template shows none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from epdd.checkpoint import chat_template
from epdd.frontend.requests.messages import Conversation, ImageRef, Message
from epdd.frontend.text.template import Template
from epdd.frontend.text.tool_prompt import with_tools_in_text

from tests.frontend.conftest import build_checkpoint

TOOL = {"type": "function", "function": {"name": "look", "description": "Größe?", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": [1, "ü"]}}}
WRITTEN = '<tool_call>\n{"name": "look", "arguments": {"at": [1, "ü"]}}\n</tool_call>'
BARE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_tools_join_the_system_message() -> None:
    said = with_tools_in_text(Conversation([Message("system", "Be brief."), Message("user", "hi")], [TOOL]))
    assert said.tools == [] and [message.role for message in said.messages] == ["system", "user"]
    system = said.messages[0].content
    assert isinstance(system, str) and system.startswith("Be brief.\n\n# Tools\n\n")
    assert ('<tools>\n{"type": "function", "function": {"name": "look", "description": "Größe?", "parameters": '
            '{"type": "object"}}}\n</tools>') in system
    assert system.endswith('{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')


def test_tools_make_a_system_message() -> None:
    said = with_tools_in_text(Conversation([Message("user", "hi")], [TOOL, TOOL]))
    assert [message.role for message in said.messages] == ["system", "user"]
    assert said.messages[0].content.count('"look"') == 2        # type: ignore[union-attr]


def test_calls_and_results_become_text() -> None:
    image = ImageRef("data:", "p")
    said = with_tools_in_text(Conversation([
        Message("user", "hi"), Message("assistant", "", {"tool_calls": [CALL, CALL], "name": "x"}),
        Message("tool", "a cat", {"tool_call_id": "c1"}), Message("tool", ["see ", image], {"tool_call_id": "c1"}),
        Message("assistant", "So:", {"tool_calls": [CALL]}), Message("tool", "{}"), Message("user", "and?")]))
    assert said.messages == [
        Message("user", "hi"), Message("assistant", f"{WRITTEN}\n{WRITTEN}", {"name": "x"}),
        Message("user", ["<tool_response>\na cat\n</tool_response>\n", "<tool_response>\n", "see ", image,
                         "\n</tool_response>"]),
        Message("assistant", f"So:\n{WRITTEN}"), Message("user", "<tool_response>\n{}\n</tool_response>"),
        Message("user", "and?")]
    assert said.images == [image]


def test_nothing_changes_without_tools() -> None:
    conversation = Conversation([Message("user", "hi"), Message("assistant", "yes"), Message("user", ["a", "b"])])
    assert with_tools_in_text(conversation) == conversation


def test_a_template_that_knows_tools_is_left_alone(tmp_path: Path) -> None:
    conversation = Conversation([Message("user", "hi"), Message("assistant", "", {"tool_calls": [CALL]}),
                                 Message("tool", "a cat")], [TOOL])

    def rendered(**options: Any) -> str:
        folder = build_checkpoint(tmp_path / str(len(options)), **options)
        return Template(chat_template.load(folder), "<image>").render(conversation, lambda value: value)

    own = rendered()
    assert "# Tools\n{\"type\"" in own and "<|im_start|>tool\na cat" in own and "<tools>" not in own
    bare = rendered(template=BARE)
    assert bare.startswith("[system]# Tools") and f"[assistant]{WRITTEN}[user]<tool_response>\na cat" in bare
