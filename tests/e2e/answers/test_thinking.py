"""A thinking checkpoint with random weights, through the whole daemon: the grammar holds from the closing tag on."""

import json

import pytest

from tests.e2e.daemon import running
from tests.models import checkpoints

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PROMPT_END = "<|im_start|>assistant{{ '\n' }}"
SCHEMA = {"type": "object", "properties": {"x": {"enum": ["yes", "no"]}}, "required": ["x"],
          "additionalProperties": False}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = checkpoints.build(tmp_path_factory.mktemp("thinking") / "thinker")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first = max(added["id"] for added in tokenizer["added_tokens"]) + 1
    tokenizer["added_tokens"] += [
        {"id": first + at, "content": tag, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": False} for at, tag in enumerate(TAGS)]
    path.write_text(json.dumps(tokenizer))
    template = folder / "chat_template.jinja"
    source = template.read_text()
    assert PROMPT_END in source
    template.write_text(source.replace(
        PROMPT_END, PROMPT_END + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
                                 "{% else %}<think>\n{% endif %}"))
    with running(folder, encoder__workers=1) as daemon:
        daemon.close = first + 1
        yield daemon.ready()


def ask(daemon, **fields):
    """At temperature 1, with a bias on the closing tag, which a random model hardly ever writes."""
    return daemon.chat("is the red circle left?", max_tokens=300, temperature=1, seed=3,
                       logit_bias={str(daemon.close): 8.0}, **fields)


def test_a_schema_holds_after_the_thoughts(daemon):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = ask(daemon, response_format=form)
    choice, = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"]) in ({"x": "yes"}, {"x": "no"})
    thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert choice["message"]["reasoning_content"] and 1 < thought < body["usage"]["completion_tokens"]


def test_a_forced_call_comes_after_the_thoughts(daemon):
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    choice, = ask(daemon, tools=[tool], tool_choice="required", parallel_tool_calls=False)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look"]


def test_without_thinking_the_schema_holds_at_once(daemon):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = ask(daemon, response_format=form, chat_template_kwargs={"enable_thinking": False})
    message = body["choices"][0]["message"]
    assert json.loads(message["content"]) in ({"x": "yes"}, {"x": "no"}) and "reasoning_content" not in message
    assert "completion_tokens_details" not in body["usage"]


def test_an_answer_without_constraints_is_divided_alike_whole_and_streamed(daemon):
    whole = ask(daemon)["choices"][0]["message"]
    assert whole["reasoning_content"]
    status, text = daemon.post({
        "messages": [{"role": "user", "content": "is the red circle left?"}], "max_tokens": 300, "temperature": 1,
        "seed": 3, "logit_bias": {str(daemon.close): 8.0}, "stream": True})
    assert status == 200
    deltas = [choice["delta"] for line in text.splitlines() if line.startswith("data: {")
              for choice in json.loads(line[6:])["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole.get(name)
