"""Tokens to text: whole characters, stop strings, marks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epdd.families.vocabulary import Vocabulary
from epdd.frontend.text.detokenizer import Decoder, StopStrings, TextStream

from tests.frontend.conftest import build_tokenizer

TOKENIZER = build_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
IDS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40)
REPLACEMENT = "\ufffd"


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@given(IDS, st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_what_the_library_decodes(ids: list[int], skip: bool) -> None:
    decoder = Decoder(VOCABULARY, skip)
    text = "".join(decoder.push(token) for token in ids) + decoder.end()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_replacement_character_in_mid_stream(text: str) -> None:
    text = text.replace(REPLACEMENT, "")
    ids = encode(text)
    decoder = Decoder(VOCABULARY, True)
    pieces = [decoder.push(token) for token in ids]
    assert all(REPLACEMENT not in piece for piece in pieces)
    assert decoder.end() == ""
    assert "".join(pieces) == TOKENIZER.decode(ids)


@pytest.mark.parametrize("char", ["\U0001FAE0", "\U0001F979", "\u9f9c"])
def test_a_character_over_several_tokens_comes_whole(char: str) -> None:
    alone = TOKENIZER.get_vocab()
    # Byte by byte: the trained merges would hide the case.
    letters = {bytes(VOCABULARY.bytes(token)): token for token in alone.values() if len(VOCABULARY.bytes(token)) == 1}
    ids = [letters[bytes([byte])] for byte in char.encode()]
    decoder = Decoder(VOCABULARY, True)
    assert [decoder.push(token) for token in ids] == [""] * (len(ids) - 1) + [char]
    cut = Decoder(VOCABULARY, True)
    assert [cut.push(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert cut.open
    assert cut.end() == REPLACEMENT     # one, however many bytes there were


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [TOKENIZER.token_to_id("<|im_end|>"), *encode("hi"), TOKENIZER.token_to_id("<tool_call>")]
    for skip, text in ((True, "hi<tool_call>"), (False, "<|im_end|>hi<tool_call>")):
        decoder = Decoder(VOCABULARY, skip)
        assert "".join(map(decoder.push, ids)) == text


def test_an_id_beyond_the_vocabulary_is_no_text() -> None:
    assert VOCABULARY.bytes(100_000) == b""


def expected(text: str, stops: list[str]) -> str:
    """The text up to the stop string that is complete first; of several, the longest."""
    ends = [(end, end - len(stop)) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    return text[:min(ends)[1]] if ends else text


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
       st.lists(st.integers(1, 5), min_size=20, max_size=20))
@settings(max_examples=500, deadline=None)
def test_stops_do_not_depend_on_the_cutting(text: str, stops: list[str], sizes: list[int]) -> None:
    finder, given_out, at = StopStrings(stops), "", 0
    for size in sizes:
        given_out += finder.push(text[at:at + size])
        at += size
        # Sent text must not be part of a later stop string.
        assert expected(text, stops).startswith(given_out)
    given_out += finder.end()
    assert given_out == expected(text, stops)
    assert finder.hit == any(stop in text for stop in stops)


def test_a_stop_over_several_tokens_leaks_no_beginning() -> None:
    stream: TextStream[int] = TextStream(VOCABULARY, ["DEFGHIJ"])
    out = [stream.push([token]).text for letter in "ABCDEFGHIJK" for token in encode(letter)]
    assert "".join(out) == "ABC"
    assert stream.stopped
    assert stream.end().text == ""


def test_held_text_is_flushed_when_no_stop_follows() -> None:
    stream: TextStream[int] = TextStream(VOCABULARY, ["DEFGHIJ"])
    assert "".join(stream.push(encode(letter)).text for letter in "ABCDEFG") == "ABC"
    assert stream.end().text == "DEFG"
    assert not stream.stopped


def test_stop_equal_to_the_first_token() -> None:
    stream: TextStream[int] = TextStream(VOCABULARY, ["A"])
    assert stream.push(encode("A")).text == ""
    assert stream.stopped and stream.tokens == 1


def test_stops_are_not_looked_for_below_min_tokens() -> None:
    stream: TextStream[int] = TextStream(VOCABULARY, ["B"], min_tokens=3)
    out = "".join(stream.push(encode(letter)).text for letter in "ABCDBE")
    assert out == "ABCD"
    assert stream.tokens == 5


def test_marks_travel_with_the_text_of_their_token() -> None:
    stream: TextStream[str] = TextStream(VOCABULARY, ["DEF"])
    got = [stream.push(encode(letter), [letter]) for letter in "ABDECDEF"]
    assert [(piece.text, piece.marks) for piece in got] == [
        ("A", ["A"]), ("B", ["B"]), ("", []), ("", []), ("DEC", ["D", "E", "C"]), ("", []), ("", []), ("", [])]
    assert stream.end().marks == []     # D, E and F became the stop string


@given(IDS, st.lists(st.integers(1, 4), min_size=40, max_size=40), st.lists(st.sampled_from(["a", "he", "\n"]),
                                                                            max_size=2))
@settings(max_examples=200, deadline=None)
def test_batches_of_tokens_change_nothing(ids: list[int], sizes: list[int], stops: list[str]) -> None:
    def run(batches: list[list[int]]) -> tuple[str, list[int], int]:
        stream: TextStream[int] = TextStream(VOCABULARY, stops)
        pieces = [stream.push(batch, batch) for batch in batches] + [stream.end()]
        return ("".join(piece.text for piece in pieces), [m for piece in pieces for m in piece.marks], stream.tokens)

    batches, at = [], 0
    for size in sizes:
        batches.append(ids[at:at + size])
        at += size
    assert run(batches) == run([[token] for token in ids])


def test_every_mark_comes_when_nothing_stops() -> None:
    ids = encode("Größe, naïve 龜 🫠")
    stream: TextStream[int] = TextStream(VOCABULARY)
    pieces = [stream.push([token], [token]) for token in ids] + [stream.end()]
    assert [mark for piece in pieces for mark in piece.marks] == ids


def test_a_stop_string_that_belongs_to_the_text() -> None:
    for stops, text, want in ((["b"], "abc", "ab"), (["bc", "b"], "abc", "ab"), (["x"], "abc", "abc")):
        for size in (1, 2, 3):
            stop = StopStrings(stops, include=True)
            pieces = [stop.push(text[at:at + size]) for at in range(0, len(text), size)]
            assert "".join(pieces) + stop.end() == want


def test_a_stop_token_that_belongs_to_the_text() -> None:
    token = TOKENIZER.token_to_id("<|im_end|>")
    for skip, want in ((True, "hi"), (False, "hi<|im_end|>")):
        stream: TextStream[None] = TextStream(VOCABULARY, skip_special=skip)
        assert stream.push(encode("hi")).text + stream.end(token).text == want
