"""The official client, unmodified: synchronous, asynchronous, streamed and not."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from epdd.errors import Overloaded, WorkerLost

from tests.frontend.api.test_chat import asking, picture
from tests.frontend.bench import Bench, hosted


@hosted()
async def test_asynchronous(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello world")
    async with openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in await client.models.list()] == ["tiny-vl"]
        assert (await client.models.retrieve("tiny-vl")).id == "tiny-vl"
        answer = await client.chat.completions.create(
            model="tiny-vl", messages=asking("what ", picture()), logprobs=True, top_logprobs=2,  # type: ignore
            extra_body={"top_k": 5, "ignore_eos": True})
        assert answer.choices[0].message.content == "hello world"
        assert answer.usage and answer.usage.prompt_tokens_details
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert answer.choices[0].logprobs and len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
        assert bench.script.requests[-1].sampling.top_k == 5
        stream: Any = await client.chat.completions.create(
            model="tiny-vl", messages=asking("hi"), stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello world"
        assert chunks[-1].usage.total_tokens > 0 and chunks[-2].choices[0].finish_reason == "stop"


@hosted()
async def test_synchronous(bench: Bench) -> None:
    bench.script.play = bench.script.say("hello world")

    def use() -> None:
        with openai.OpenAI(base_url=f"{bench.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="tiny-vl", messages=[{"role": "user", "content": "hi"}])
            assert answer.choices[0].message.content == "hello world"
            with client.chat.completions.create(model="tiny-vl", stream=True,
                                                messages=[{"role": "user", "content": "hi"}]) as stream:
                assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello world"

    await asyncio.to_thread(use)


@hosted()
async def test_errors_are_its_own_classes(bench: Bench) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="none", max_retries=0) as client:
        async def ask(**fields: Any) -> Any:
            return await client.chat.completions.create(**{"model": "tiny-vl", "messages": asking("x"), **fields})

        with pytest.raises(openai.BadRequestError) as bad:
            await ask(messages=asking({"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}))
        assert (bad.value.code, bad.value.param) == ("invalid_base64_image", "messages[0].content[0]")
        assert bad.value.request_id
        with pytest.raises(openai.NotFoundError) as unknown:
            await ask(model="gpt")
        assert unknown.value.code == "model_not_found"
        bench.door.refuse = Overloaded("many")
        with pytest.raises(openai.RateLimitError):
            await ask()
        bench.door.refuse = None
        bench.script.play = bench.script.say("hello", fail=WorkerLost("gone"))
        with pytest.raises(openai.InternalServerError):
            await ask()
        text = ""
        with pytest.raises(openai.APIError, match="gone"):
            async for chunk in await ask(stream=True):
                text += chunk.choices[0].delta.content or ""
        assert text == "hello"
