"""Every field of a chat request: accepted values, refusals, and the field that a refusal names."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdd.errors import BadRequest, EpddError, NotFound
from epdd.families import Defaults, ModelInfo
from epdd.frontend.requests import completion_requests, request_validation
from epdd.frontend.requests.completion_requests import Chat
from epdd.frontend.requests.messages import Conversation, ImageRef, Message
from epdd.frontend.requests.schema import ChatBody
from epdd.wire import Sampling

USER = {"role": "user", "content": "hi"}
PIXEL = "data:image/png;base64,AAAA"


def parse(family: ModelInfo, **fields: Any) -> Chat:
    return completion_requests.parse(orjson.dumps({"messages": [USER], **fields}), family, ("tiny-vl",))[0]


def talk(family: ModelInfo, *messages: Any, **fields: Any) -> Conversation:
    return completion_requests.parse(orjson.dumps({"messages": messages, **fields}), family, ("tiny-vl",))[1]


def refused(family: ModelInfo, **fields: Any) -> EpddError:
    with pytest.raises(BadRequest) as caught:
        parse(family, **fields)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_the_apis_own_where_the_checkpoint_says_nothing(family: ModelInfo) -> None:
    assert parse(family) == Chat(model="tiny-vl", sampling=Sampling(max_tokens=0))
    sampling = parse(family).sampling
    assert (sampling.temperature, sampling.top_p, sampling.logprobs, sampling.seed) == (1.0, 1.0, -1, None)


def test_the_checkpoints_defaults_fill_what_is_left_out(family: ModelInfo) -> None:
    own = replace(family, defaults=Defaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05))
    sampling = parse(own).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.7, 0.8, 20, 1.05)
    sampling = parse(own, temperature=0, top_p=1, top_k=0, repetition_penalty=1).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0, 1, 0, 1)


def test_all_fields_arrive(family: ModelInfo) -> None:
    chat = parse(
        family, model="tiny-vl", max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2,
        presence_penalty=-1, frequency_penalty=2, seed=-3, stop=["a", "b"], stop_token_ids=[4, 5],
        logit_bias={"3": -100, "7": 2.5}, bad_words=["no"], allowed_token_ids=[9, 3],
        truncate_prompt_tokens=50, include_stop_str_in_output=True, logprobs=True, top_logprobs=20, n=8, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True}, ignore_eos=True, min_tokens=2,
        skip_special_tokens=False)
    assert chat == Chat(
        model="tiny-vl",
        sampling=Sampling(max_tokens=7, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1,
                          repetition_penalty=1.2, presence_penalty=-1.0, frequency_penalty=2.0, seed=-3,
                          logit_bias={3: -100.0, 7: 2.5}, logprobs=20, ignore_eos=True, stop_token_ids=(4, 5),
                          allowed_token_ids=(9, 3)),
        n=8, include_stop=True, bad_words=("no",), truncate=50,
        stop=("a", "b"), stream=True, include_usage=True, continuous_usage=True,
        skip_special_tokens=False)


def test_null_means_absent(family: ModelInfo) -> None:
    names = [name for name in ChatBody.__struct_fields__ if name != "messages"]
    assert parse(family, **dict.fromkeys(names)) == parse(family)


def test_fields_without_effect_are_named_and_ignored(family: ModelInfo) -> None:
    chat = parse(family, zeta=1, alpha={"a": [1]}, user="me", echo=False)
    assert chat == replace(parse(family), ignored=("alpha", "echo", "user", "zeta"))


@pytest.mark.parametrize(("fields", "param"), [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 1 << 63}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": ["ok", ""]}, "stop[1]"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [10_000]}, "stop_token_ids"),
    ({"stop_token_ids": [5, True]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"10000": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"3": 101}}, "logit_bias"),
    ({"logit_bias": [3]}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"mm_processor_kwargs": {"fps": 2}}, "mm_processor_kwargs.fps"),
    ({"mm_processor_kwargs": {"min_pixels": 0}}, "mm_processor_kwargs.min_pixels"),
    ({"mm_processor_kwargs": {"min_pixels": 9000, "max_pixels": 8000}}, "mm_processor_kwargs.min_pixels"),
    ({"response_format": "text"}, "response_format"),
    ({"tools": {}}, "tools"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"evil": True}}, "chat_template_kwargs.evil"),
    ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_choice": "red"}, "guided_choice"),
    ({"regex": 5}, "regex"),
    ({"structured_outputs": "red"}, "structured_outputs"),
    ({"bad_words": ["a", ""]}, "bad_words[1]"),
    ({"bad_words": "a"}, "bad_words"),
    ({"bad_words": ["x" * 250] * 9}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10_000]}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "messages": [{"role": "assistant", "content": []}]}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True,
      "messages": [{"role": "assistant", "content": "a"}]}, "continue_final_message"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"model": 5}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [USER] * 10_001}, "messages"),
    ({"messages": [{"role": "user", "content": ["a"] * 10_001}]}, "messages[0].content"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user", "content": None}]}, "messages[1].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["a", 5]}]}, "messages[0].content[1]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "video_url"}]}]},
     "messages[0].content[1]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0].image_url.url"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
     "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "user", "content": "hi", "name": 5}]}, "messages[0].name"),
])
def test_refusals_name_the_field(family: ModelInfo, fields: dict[str, Any], param: str) -> None:
    error = refused(family, **fields)
    assert error.param == param
    assert param.partition("[")[0].partition(".")[0] in error.message
    assert len(error.message) < 300


def test_a_refusal_says_what_was_sent(family: ModelInfo) -> None:
    assert refused(family, max_tokens=-1).message == "max_tokens is -1; it must be at least 1"
    assert refused(family, temperature=3).message == "temperature is 3; it must be from 0 to 2"


def test_token_limits(family: ModelInfo) -> None:
    assert parse(family, max_tokens=3, max_completion_tokens=9).sampling.max_tokens == 9
    assert parse(family, max_completion_tokens=9).sampling.max_tokens == 9
    assert parse(family, max_tokens=3, max_completion_tokens=None).sampling.max_tokens == 3
    assert parse(family, max_tokens=10 ** 9).sampling.max_tokens == 10 ** 9
    assert parse(family, max_tokens=10 ** 18).sampling.max_tokens == completion_requests.TOKENS_MAX


def test_another_spelling_of_all_tokens(family: ModelInfo) -> None:
    assert parse(family, top_k=-1).sampling.top_k == parse(family, top_k=0).sampling.top_k == 0


def test_seed_minus_one_is_none(family: ModelInfo) -> None:
    assert (parse(family, seed=-1).sampling.seed, parse(family, seed=-2).sampling.seed) == (None, -2)


def test_logprobs_without_top(family: ModelInfo) -> None:
    assert parse(family, logprobs=True).sampling.logprobs == 0
    assert parse(family, logprobs=False, top_logprobs=0).sampling.logprobs == -1


def test_another_model_is_404(family: ModelInfo) -> None:
    with pytest.raises(NotFound) as caught:
        parse(family, model="gpt-4" + "x" * 5000)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert len(caught.value.message) < 200


def test_pixel_options_stay_inside_the_checkpoint(family: ModelInfo) -> None:
    def pixels(**options: int) -> tuple[int, int]:
        chat = parse(family, mm_processor_kwargs=options)
        return chat.min_pixels, chat.max_pixels

    assert (family.min_pixels, family.max_pixels) == (3136, 200704)
    assert pixels() == (0, 0)
    assert pixels(max_pixels=10 ** 12) == (0, 200704)
    assert pixels(min_pixels=1, max_pixels=5) == (3136, 3136)
    assert pixels(min_pixels=4000, max_pixels=5000) == (4000, 5000)


@pytest.mark.parametrize("body", [
    b"", b"{", b"nonsense", b"[]", b"5", b"null", b'"text"', b"\xff\xfe", b'{"temperature": NaN}',
    b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
])
def test_bodies_that_are_no_request(family: ModelInfo, body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        completion_requests.parse(body, family, ("tiny-vl",))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("element", [b"[],", b"{},", b"1,"])
def test_a_body_of_nothing_but_elements(family: ModelInfo, element: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "x": [' + element * 2_000_000 + b"1]}"
    with pytest.raises(BadRequest, match="elements"):
        completion_requests.parse(body, family, ("tiny-vl",))


def test_contents_of_every_kind(family: ModelInfo) -> None:
    assert talk(family, {"role": "user", "content": ""}).messages == [Message("user", "")]
    assert talk(family, {"role": "user", "content": []}).messages == [Message("user", [])]
    assert talk(family, {"role": "assistant", "content": None}).messages == [Message("assistant", "")]
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
             {"type": "image_url", "image_url": PIXEL}, {"type": "input_image", "image_url": PIXEL}]
    said = talk(family, USER, {"role": "user", "content": parts})
    assert said.messages[1].content == [
        "a", ImageRef(PIXEL, "messages[1].content[1]"), ImageRef(PIXEL, "messages[1].content[2]"),
        ImageRef(PIXEL, "messages[1].content[3]")]
    assert [image.param for image in said.images] == [f"messages[1].content[{index}]" for index in (1, 2, 3)]


def test_developer_is_system(family: ModelInfo) -> None:
    assert talk(family, {"role": "developer", "content": "be brief"}).messages == [Message("system", "be brief")]


def test_what_sdks_echo_is_accepted(family: ModelInfo) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": [1, 2]}"}, "index": 0}
    said = talk(
        family, USER,
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
         "function_call": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a cat", "name": None})
    assert said.messages[1] == Message("assistant", "", {"tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": [1, 2]}}}]})
    assert said.messages[2] == Message("tool", "a cat", {"tool_call_id": "c1"})


def test_reasoning_has_one_name(family: ModelInfo) -> None:
    for name in ("reasoning", "reasoning_content"):
        said = talk(family, {"role": "assistant", "content": "so", name: "because"})
        assert said.messages[0].fields == {"reasoning_content": "because"}


def test_tool_arguments_that_are_no_json_stay_text(family: ModelInfo) -> None:
    call = {"function": {"name": "look", "arguments": "{broken"}}
    said = talk(family, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert said.messages[0].fields["tool_calls"][0]["function"]["arguments"] == "{broken"


def test_what_the_answer_must_look_like_reaches_template_and_sampling(family: ModelInfo) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    assert talk(family, USER, tools=[tool]).tools == [tool]
    assert talk(family, USER, tools=[tool], tool_choice="none").tools == []
    for fields in ({"tools": [tool]}, {"response_format": {"type": "json_object"}}):
        chat = parse(family, **fields)
        assert chat.sampling.grammar == chat.structure.grammar != ""


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                                  max_size=3), max_leaves=6)


@given(st.dictionaries(st.sampled_from(sorted(ChatBody.__struct_fields__)), VALUES, max_size=6))
def test_any_json_is_taken_or_refused_cleanly(fields: dict[str, Any]) -> None:
    family = ModelInfo("qwen2_vl", "x", 1, (2, 1, 3), 14, 2, 2, 3136, 200704, (), (), 8, 1, 4096, 100, ())
    try:
        body = json.dumps({"messages": [USER], **fields}).encode()
        chat, conversation = completion_requests.parse(body, family, ("tiny-vl",))
    except (BadRequest, NotFound) as error:
        assert error.message and len(error.message) < 400
    else:
        assert chat.n in range(1, 9) and conversation.messages


def test_a_refused_body_of_many_parts_leaves_nothing() -> None:
    """An object that outlives each refusal pins the memory around it, a megabyte a body."""
    body = json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}]}).encode()

    def refused(times: int) -> int:
        for _ in range(times):
            with pytest.raises(BadRequest):
                request_validation.parse(body, ChatBody, False)
        gc.collect()
        return sys.getallocatedblocks()

    before = refused(2)
    assert refused(20) - before < 10
