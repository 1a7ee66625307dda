"""Reasoning and answers: the parser on any pieces of a text, and a thinking model over HTTP."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from epdd import families
from epdd.frontend.text.reasoning_parser import (CLOSE_MARK, OPEN_MARK, ReasoningParser, ThinkTokens, Thinking,
                                                 think_tokens, thinking)
from tests.frontend.conftest import TEMPLATE, build_checkpoint
from tests.frontend.bench import Bench, serve, texts, with_settings

OPENS = TEMPLATE.replace("{{- '<|im_start|>assistant\\n' }}\n{%- endif %}", """{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}""")
assert OPENS != TEMPLATE


def parsed(begun: bool, *pieces: str) -> tuple[str, str]:
    parser = ReasoningParser(begun)
    found = [parser.push(piece) for piece in pieces]
    return "".join(each[0] for each in found), "".join(each[1] for each in found) + parser.end()


O, C = OPEN_MARK, CLOSE_MARK


@pytest.mark.parametrize("begun, text, reasoning, answer", [
    (True, f"plan\n{C}\n\nred", "plan", "red"),
    (True, f"\nplan\n\nmore{C}red\n", "plan\n\nmore", "red\n"),
    (True, f"{O}\nplan{C}red", "plan", "red"),                  # opened again by the model
    (True, "plan, and cut", "plan, and cut", ""),
    (True, f"{C}red", "", "red"),
    (True, f"a{O}b{C}c{C}d{O}e", "a<think>b", "c</think>d<think>e"),     # only the first pair counts
    (False, f"{O}\nplan\n{C}\n\nred", "plan", "red"),
    (False, f"\n\n{O}plan{C} red", "plan", " red"),
    (False, "red", "", "red"),
    (False, "\nred\n", "", "\nred\n"),
    (False, "\n\n", "", "\n\n"),
    (False, f"red {O}plan{C}", "", "red <think>plan</think>"),      # not at the beginning: text
    (False, f"{C}red", "", "</think>red"),
    (False, "", "", ""),
])
def test_what_is_reasoning(begun: bool, text: str, reasoning: str, answer: str) -> None:
    assert parsed(begun, text) == (reasoning, answer)
    assert parsed(begun, *text) == (reasoning, answer)


@given(begun=st.booleans(), pieces=st.lists(st.text(f"a \n{O}{C}", max_size=6), max_size=8))
def test_any_cut_gives_the_same(begun: bool, pieces: list[str]) -> None:
    whole = parsed(begun, "".join(pieces))
    assert parsed(begun, *pieces) == whole
    assert not set("".join(whole)) & {O, C}


def test_which_checkpoints_think(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = think_tokens(tokenizer, TEMPLATE)
    assert found == ThinkTokens(tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>"))
    assert think_tokens(tokenizer, "{{ messages }}") is None
    assert thinking(found, "<|im_start|>assistant\n") == Thinking(found, False)
    assert thinking(found, "<|im_start|>assistant\n<think>\n") == Thinking(found, True)
    assert thinking(found, "<|im_start|>assistant\n<think>\n\n</think>\n\n") is None
    assert thinking(None, "<think>") is None


# --- over HTTP


def hosted(test: Any) -> Any:
    """As bench.hosted, with a checkpoint whose template opens the thinking."""

    def run(tmp_path: Path) -> None:
        family = families.load(str(build_checkpoint(tmp_path / "thinker", template=OPENS)))

        async def go() -> None:
            async with serve(family) as bench:
                await test(bench)

        uvloop.run(go())

    run.__doc__ = test.__doc__
    return run


SAID = "the picture\nshows a circle\n</think>\n\nred"


@hosted
async def test_a_whole_answer_and_its_usage(bench: Bench) -> None:
    bench.script.play = bench.script.say(SAID)
    body = await (await bench.chat(n=2)).json()
    for choice in body["choices"]:
        assert choice["message"] == {"role": "assistant", "content": "red", "refusal": None,
                                     "reasoning_content": "the picture\nshows a circle"}
    ids = bench.script.tokenizer.encode(SAID, add_special_tokens=False).ids
    thought = ids.index(bench.script.tokenizer.token_to_id("</think>")) + 1
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * thought}
    assert body["usage"]["completion_tokens"] == 2 * (len(ids) + 1)


@hosted
async def test_a_stream_says_the_same(bench: Bench) -> None:
    bench.script.play = bench.script.say(SAID)
    frames = await bench.frames(stream_options={"include_usage": True}, logprobs=True)
    deltas = [choice["delta"] for frame in frames[:-1] for choice in frame["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "the picture\nshows a circle"
    assert texts(frames) == "red"
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert frames[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3
    entries = [entry for frame in frames[:-1] for choice in frame["choices"] if choice["logprobs"]
               for entry in choice["logprobs"]["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == SAID


@hosted
async def test_cut_in_its_thoughts(bench: Bench) -> None:
    bench.script.play = bench.script.say(SAID)
    body = await (await bench.chat(max_tokens=2)).json()
    choice, = body["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == bench.script.tokenizer.decode(
        bench.script.tokenizer.encode(SAID, add_special_tokens=False).ids[:2])
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


@hosted
async def test_stops_are_looked_for_in_the_thoughts_too(bench: Bench) -> None:
    """As in vLLM; the closing tag as a stop gives the reasoning alone."""
    bench.script.play = bench.script.say(SAID)
    for stop in ("circle", "</think>"):
        message = (await (await bench.chat(stop=stop)).json())["choices"][0]["message"]
        assert message["reasoning_content"] == SAID.partition(stop)[0].rstrip("\n") and message["content"] == ""


@hosted
async def test_thinking_off(bench: Bench) -> None:
    bench.script.play = bench.script.say("red")
    body = await (await bench.chat(chat_template_kwargs={"enable_thinking": False}, response_format={
        "type": "json_object"})).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "red", "refusal": None}
    assert "completion_tokens_details" not in body["usage"]
    sampling = bench.script.requests[0].sampling
    assert sampling.grammar and sampling.think_end_id == -1     # the grammar holds at once


@hosted
async def test_a_format_begins_after_the_thoughts(bench: Bench) -> None:
    ids = [bench.script.tokenizer.token_to_id(tag) for tag in ("<think>", "</think>")]
    await bench.chat(response_format={"type": "json_object"})
    await bench.chat()
    first, second = (request.sampling for request in bench.script.requests)
    assert (first.think_start_id, first.think_end_id) == (-1, ids[1])
    assert (second.think_start_id, second.think_end_id) == (-1, -1)     # nothing to hold back


@hosted
async def test_calls_after_thoughts(bench: Bench) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    bench.script.play = bench.script.say(f"I could {call} now\n</think>\n\n{call}")
    tool = {"type": "function", "function": {"name": "look"}}
    choice = (await (await bench.chat(tools=[tool])).json())["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == f"I could {call} now"
    assert [each["function"]["name"] for each in choice["message"]["tool_calls"]] == ["look"]


@hosted
async def test_the_official_client_reads_it(bench: Bench) -> None:
    bench.script.play = bench.script.say(SAID)
    async with openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="tiny-vl", messages=[{"role": "user", "content": "hi"}])
        message = answer.choices[0].message
        assert message.reasoning_content == "the picture\nshows a circle"     # type: ignore[attr-defined]
        assert message.content == "red"
        details = answer.usage and answer.usage.completion_tokens_details
        assert details is not None and details.reasoning_tokens


@hosted
async def test_text_completions_stay_as_they_are(bench: Bench) -> None:
    bench.script.play = bench.script.say(SAID)
    async with bench.http.post(f"{bench.url}/v1/completions", json={"prompt": "x", "max_tokens": 99}) as answer:
        assert (await answer.json())["choices"][0]["text"] == SAID


def test_a_model_that_opens_its_thinking_itself(family: families.ModelInfo) -> None:
    """The template does not open the tag at the prompt's end; `model.reasoning` off leaves all text as it is."""
    async def go(reasoning: str) -> Any:
        async with serve(replace(family), with_settings(model={"reasoning": reasoning})) as bench:
            bench.script.play = bench.script.say(f"<think>\n{SAID}")
            body = await (await bench.chat(response_format={"type": "json_object"})).json()
            message = body["choices"][0]["message"]
            tokens = bench.script.requests[0].sampling
            ids = tuple(bench.script.tokenizer.token_to_id(tag) for tag in ("<think>", "</think>"))
            return message, (tokens.think_start_id, tokens.think_end_id), ids

    message, asked, ids = uvloop.run(go("auto"))
    assert message["reasoning_content"] == "the picture\nshows a circle" and message["content"] == "red"
    assert asked == ids
    message, asked, ids = uvloop.run(go("off"))
    assert message == {"role": "assistant", "content": f"<think>\n{SAID}", "refusal": None} and asked == (-1, -1)


@hosted
async def test_history_gives_thoughts_to_the_template(bench: Bench) -> None:
    """Qwen's templates remove reasoning from an answer's text; `reasoning_content` never gets into the text."""
    def prompt() -> list[int]:
        return bench.script.requests[-1].tokens

    history: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"},
                                     {"role": "user", "content": "b"}]
    await bench.chat(messages=history)
    plain = prompt()
    for extra in ({"content": "<think>\nsecret\n</think>\n\nyes"}, {"reasoning_content": "secret"},
                  {"reasoning": "secret"}):
        await bench.chat(messages=[history[0], {**history[1], **extra}, history[2]])
        assert prompt() == plain, json.dumps(extra)
