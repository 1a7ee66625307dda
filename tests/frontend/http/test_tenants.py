"""A request uses the caches of its API key and cache_salt, and workers learn neither."""

from __future__ import annotations

from typing import Any

import pytest

from epdd.dispatch import prefix_affinity
from epdd.dispatch.crash_policy import CrashPolicy
from epdd.dispatch.request import Request
from epdd.errors import Rejected

from tests.frontend.bench import Bench, hosted
from tests.frontend.http.test_auth import bearer
from tests.frontend.images.pictures import asking, picture

KEYS: Any = {"api_keys": ("sk-one", "sk-two")}
LOOK = asking(picture(), {"type": "text", "text": "what is this?"})


async def seen(bench: Bench, key: str = "", path: str = "/v1/chat/completions", **fields: Any) -> Request:
    """The request that dispatch gets."""
    body = {"max_tokens": 4, **({"messages": LOOK} if "chat" in path else {"prompt": "hello " * 100}), **fields}
    answer = await bench.http.post(bench.url + path, json=body, headers=bearer(key) if key else {})
    assert answer.status == 200, await answer.text()
    return bench.script.requests[-1]


@hosted(server=KEYS)
async def test_keys_share_nothing(bench: Bench) -> None:
    one, again, two = [await seen(bench, key) for key in ("sk-one", "sk-one", "sk-two")]
    assert one.salt == again.salt != two.salt and len(one.salt) == 32
    assert one.images[0].key == again.images[0].key != two.images[0].key
    assert prefix_affinity.chain(one) == prefix_affinity.chain(again)
    assert not set(prefix_affinity.chain(one)) & set(prefix_affinity.chain(two))
    assert "sk-one" not in repr(one)
    texts = [await seen(bench, key, "/v1/completions") for key in ("sk-one", "sk-two")]
    assert texts[0].salt == one.salt and texts[1].salt == two.salt


@pytest.mark.parametrize("shared", [False, True])
def test_a_key_is_one_tenant_whatever_it_shares(family: Any, shared: bool) -> None:
    @hosted(server={**KEYS, "share_caches": shared})
    async def test(bench: Bench) -> None:
        for path in ("/v1/chat/completions", "/v1/completions"):
            one, salted, two = [await seen(bench, key, path, **fields) for key, fields in (
                ("sk-one", {}), ("sk-one", {"cache_salt": "a"}), ("sk-two", {}))]
            assert one.tenant == salted.tenant != two.tenant and len(one.tenant) == len(two.tenant) == 32
            assert "sk-one" not in repr(one)

    test(family)


@hosted()
async def test_without_keys_all_are_one_tenant(bench: Bench) -> None:
    assert (await seen(bench, "sk-any")).tenant == (await seen(bench, cache_salt="a")).tenant == ""


@hosted(server=KEYS)
async def test_a_salt_divides_what_a_key_shares(bench: Bench) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        plain, a, again, b = [await seen(bench, "sk-one", path, **({"cache_salt": salt} if salt else {}))
                              for salt in ("", "a", "a", "b")]
        other = await seen(bench, "sk-two", path, cache_salt="a")
        assert a.salt == again.salt and len({each.salt for each in (plain, a, b, other)}) == 4


@hosted()
async def test_without_keys_only_a_salt_divides(bench: Bench) -> None:
    plain, named, salted = await seen(bench), await seen(bench, "sk-any"), await seen(bench, cache_salt="a")
    assert plain.salt == named.salt == "" != salted.salt
    assert plain.images[0].key == named.images[0].key != salted.images[0].key


@hosted(server={**KEYS, "share_caches": True})
async def test_keys_that_share_by_setting(bench: Bench) -> None:
    one, two, salted = await seen(bench, "sk-one"), await seen(bench, "sk-two"), await seen(bench, "sk-two",
                                                                                            cache_salt="a")
    assert one.salt == two.salt == "" and one.images[0].key == two.images[0].key != salted.images[0].key


@pytest.mark.parametrize("salt", ["", 1, ["a"], {}])
def test_what_is_no_salt(family: Any, salt: Any) -> None:
    @hosted()
    async def test(bench: Bench) -> None:
        answer = await bench.chat(cache_salt=salt)
        assert answer.status == 400 and (await answer.json())["error"]["param"] == "cache_salt"

    test(family)


@hosted(server=KEYS)
async def test_what_kills_workers_is_refused_whoever_sends_it(bench: Bench) -> None:
    one, two = await seen(bench, "sk-one"), await seen(bench, "sk-two", cache_salt="other")
    known = CrashPolicy(600.0)
    known.reject_image(one.images[0].content)
    with pytest.raises(Rejected):
        known.check(two)
    known = CrashPolicy(600.0)
    known.reject_prompt(one)
    with pytest.raises(Rejected):
        known.check(two)
