"""What is remembered of content that killed workers, and for how long."""

from dataclasses import replace

import pytest

from epdd.dispatch import poison
from epdd.dispatch.poison import Poison
from epdd.errors import Rejected
from tests.dispatch.fleet import request


def test_it_is_refused_for_a_while_and_then_tried_again():
    now = [0.0]
    known = Poison(600.0, lambda: now[0])
    known.add_image(request("r", b"a").images[0].key)
    now[0] = 599.0
    with pytest.raises(Rejected) as caught:
        known.check(request("r", b"b", b"a"))
    assert caught.value.code == "image_rejected"
    known.check(request("r", b"b"))
    now[0] = 601.0
    known.check(request("r", b"a"))
    assert known.entries == 0 and (known.counts.images, known.counts.refused) == (1, 1)


def test_a_prompt_is_its_tokens_images_and_grammar():
    known, asked = Poison(600.0), request("r", b"a")
    known.add_prompt(asked)
    with pytest.raises(Rejected):
        known.check(replace(asked, id="other", n=2))
    known.check(request("r", b"b"))
    known.check(replace(asked, tokens=[8, *asked.tokens[1:]]))


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(poison, "KEYS_MAX", 3)
    known = Poison(600.0)
    for name in (b"a", b"b", b"c", b"d"):
        known.add_image(request("r", name).images[0].key)
    assert known.entries == 3
    known.check(request("r", b"a"))
