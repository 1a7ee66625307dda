"""Answers of the real engine with random weights and a grammar."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch

from epdd import families, wire
from epdd.errors import EpddError
from epdd.frontend.structured import structured_output, tool_schema as tool_fields
from epdd.frontend.structured.tool_call_parser import CallParser
from epdd.worker.language.sampling.sampler import Sampler
from epdd.worker.language.sampling.structured_output import GrammarCompiler, GrammarMask
from tests.models import schemas
from tests.worker.language import pd

DIGITS = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 10, "maximum": 99}},
          "required": ["a"], "additionalProperties": False}
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "maxLength": 4}}, "required": ["at"],
              "additionalProperties": False}
LOOK = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
SEE = {"type": "function", "function": {"name": "see"}}


def grammar(schema: dict[str, Any]) -> str:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    return structured_output.parse({"response_format": form}).grammar


def tools(**fields: Any) -> str:
    return structured_output.parse({"tools": [LOOK, SEE], **fields}).grammar


def valid(schema: dict[str, Any], value: Any) -> bool:
    kind = jsonschema.Draft202012Validator
    return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(value))


def answer(folder: str, **sampling: Any) -> tuple[str, wire.FromWorker, list[int]]:
    """Text, last message and tokens of one request at temperature 1."""
    bench = pd.Bench(folder)
    bench.submit("x", pd.prompt(folder, [20]), **({"max_tokens": 400, "temperature": 1.0, "seed": 1} | sampling))
    tokens = bench.run()["x"]
    return bench.text(tokens), bench.of("x")[-1], tokens


def constraint(folder: str, text: str, ignore_eos: bool = False) -> GrammarMask:
    return GrammarCompiler(folder, 640, families.load(folder).eos_ids).compile(
        wire.Sampling(max_tokens=1, grammar=text, ignore_eos=ignore_eos))


def test_200_random_schemas_are_kept(checkpoint: Callable[..., str]) -> None:
    """All run at once; every answer is bounded, so none may be cut by its length."""
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder, kv_tokens=1 << 15)
    wanted = {f"{kind.__name__} {seed}": kind(random.Random(seed)) for kind in schemas.KINDS for seed in range(40)}
    for seed, (name, schema) in enumerate(wanted.items()):
        bench.submit(name, pd.prompt(folder, [20], seed=seed), max_tokens=1000, temperature=1.0, seed=seed,
                     grammar=grammar(schema))
    answers = bench.run()
    assert len(wanted) == 200
    for name, schema in wanted.items():
        text, last = bench.text(answers[name]), bench.of(name)[-1]
        assert isinstance(last, wire.Done) and last.reason == "stop", (name, last, text)
        assert valid(schema, json.loads(text)), (name, schema, text)
    assert len(set(map(bench.text, answers.values()))) > 150      # not one and the same


def test_free_json_is_whole_or_cut_by_its_length(checkpoint: Callable[..., str]) -> None:
    """json_object is unbounded: a random model may never end, and a cut answer is the beginning of JSON."""
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder, kv_tokens=1 << 15)
    text = structured_output.parse({"response_format": {"type": "json_object"}}).grammar
    for seed in range(40):
        bench.submit(str(seed), pd.prompt(folder, [9], seed=seed), max_tokens=300, temperature=1.0, seed=seed,
                     grammar=text)
    answers = bench.run()
    reasons: Counter[str] = Counter()
    for name, tokens in answers.items():
        last = bench.of(name)[-1]
        assert isinstance(last, wire.Done)
        reasons[last.reason] += 1
        if last.reason == "stop":
            assert isinstance(json.loads(bench.text(tokens)), dict)
        else:
            again = constraint(folder, text)
            for token in tokens:
                assert again.legal()[token]
                again.accept(token)
    assert reasons["stop"] > 3


def test_whitespace_has_an_end(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    blanks = {pd.Bench.token(folder, blank): 100.0 for blank in "\n\t"}
    text, last, _ = answer(folder, grammar=grammar(DIGITS), logit_bias=blanks)
    assert valid(DIGITS, json.loads(text)) and last == wire.Done("x", "stop")
    assert text.startswith("{\n" + "\t" * 32 + '"')


def test_preempted_answers_keep_their_place_in_the_grammar(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    crowd = pd.Bench(folder, headroom=1, kv_tokens=384, max_batched_tokens=48)
    wanted = {str(seed): schemas.nested(random.Random(seed), 3) for seed in range(12)}
    options: dict[str, Any] = {"max_tokens": 300, "temperature": 1.0}
    for name, schema in wanted.items():
        crowd.submit(name, pd.prompt(folder, [30], seed=int(name)), seed=int(name), grammar=grammar(schema), **options)
    answers = crowd.run()
    assert crowd.engine.heartbeat().preempted > 3
    for name, schema in wanted.items():
        alone = pd.Bench(folder)
        alone.submit(name, pd.prompt(folder, [30], seed=int(name)), seed=int(name), grammar=grammar(schema), **options)
        assert alone.run()[name] == answers[name]
        assert valid(schema, json.loads(crowd.text(answers[name])))


@pytest.mark.parametrize("options", [
    {"temperature": 0.0}, {"top_k": 1}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.9}, {"temperature": 2.0},
    {"repetition_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"logit_bias": {token: -100.0 for token in range(640)}}, {"min_tokens": 300}, {"ignore_eos": True},
    {"min_tokens": 300, "ignore_eos": True}, {"logprobs": 20},
], ids=str)
def test_other_options_cannot_break_the_grammar(checkpoint: Callable[..., str], options: dict[str, Any]) -> None:
    text, last, _ = answer(checkpoint("qwen3_vl"), grammar=grammar(DIGITS), **options)
    assert valid(DIGITS, json.loads(text))
    assert last == wire.Done("x", "stop")      # the grammar's own end, no token needed


def test_bias_weighs_what_is_legal(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    seven = pd.Bench.token(folder, "7")
    assert json.loads(answer(folder, grammar=grammar(DIGITS), logit_bias={seven: 100.0})[0]) == {"a": 77}


def test_where_an_answer_may_end_or_go_on(checkpoint: Callable[..., str]) -> None:
    """A number may end after any digit: the model decides, min_tokens and ignore_eos delay the end."""
    folder = checkpoint("qwen3_vl")
    number = grammar({"type": "integer", "minimum": 0})
    eos = {token: 100.0 for token in families.load(folder).eos_ids}
    text, last, tokens = answer(folder, grammar=number, logit_bias=eos)
    assert isinstance(last, wire.Done) and last.stop_token in eos and len(tokens) == 2 and text.isdecimal()
    _, last, tokens = answer(folder, grammar=number, logit_bias=eos, min_tokens=7)
    assert isinstance(last, wire.Done) and last.stop_token in eos and len(tokens) in (8, 2)     # 0 cannot go on
    text, last, tokens = answer(folder, grammar=grammar({"type": "integer", "minimum": 1}), logit_bias=eos,
                                ignore_eos=True, max_tokens=30)
    assert last == wire.Done("x", "length") and len(tokens) == 30 and text.isdecimal()


def test_length_cuts_and_the_last_token_completes(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    whole, last, tokens = answer(folder, grammar=grammar(DIGITS))
    cut, end, fewer = answer(folder, grammar=grammar(DIGITS), max_tokens=len(tokens) - 1)
    assert end == wire.Done("x", "length") and fewer == tokens[:-1] and whole.startswith(cut)
    assert answer(folder, grammar=grammar(DIGITS), max_tokens=len(tokens))[1] == wire.Done("x", "stop")


def test_one_legal_token_has_a_finite_logprob(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder)
    bench.submit("x", pd.prompt(folder, [20]), max_tokens=100, top_k=1, logprobs=20,
                 grammar=grammar({"const": {"only": "this"}}))
    tokens = bench.run()["x"]
    assert json.loads(bench.text(tokens)) == {"only": "this"}
    said = [message for message in bench.of("x") if isinstance(message, wire.Tokens)]
    values = [value for message in said for _, value in message.logprobs[0].top] + [
        message.logprobs[0].logprob for message in said]
    assert len(values) == 21 * len(tokens) and all(math.isfinite(value) and value >= -9999 for value in values)


def test_a_stop_token_of_the_client_still_stops(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    colon = pd.Bench.token(folder, ":")
    text, last, _ = answer(folder, grammar=grammar(DIGITS), stop_token_ids=(colon,), logit_bias={colon: 100.0})
    assert last == wire.Done("x", "stop", colon) and text.rstrip(":").strip().endswith('"a"')


@pytest.mark.parametrize("text", ["start: %json {\"type\": 5}", "start: other", "no grammar"])
def test_a_bad_grammar_fails_its_request_only(checkpoint: Callable[..., str], text: str) -> None:
    bench = pd.Bench(checkpoint("qwen3_vl"))
    bench.submit("bad", pd.prompt(checkpoint("qwen3_vl"), [5]), grammar=text)
    last = bench.of("bad")[-1]
    assert isinstance(last, wire.Failed) and last.code == "invalid_request" and not bench.engine.busy


def test_a_schema_that_leads_nowhere_is_no_answer(checkpoint: Callable[..., str]) -> None:
    """`a` refers to itself: the request fails when the answer reaches it, instead of ending as if complete."""
    endless = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"],
               "additionalProperties": False}
    text, last, _ = answer(checkpoint("qwen3_vl"), grammar=grammar(endless))
    assert isinstance(last, wire.Failed) and last.code == "invalid_request"


def test_a_request_without_a_grammar_asks_for_no_mask(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder)
    bench.submit("x", pd.prompt(folder, [20]), max_tokens=5)
    assert all(request.sampler.plain for request in bench.engine._requests.values())
    bench.run()
    assert "_tokenizer" not in vars(bench.runner.language.grammar_compiler)


def test_text_is_free_until_a_call_begins(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    eos = list(families.load(folder).eos_ids)

    def follow(text: str) -> GrammarMask | None:
        """The state after a text; None if the grammar does not allow it."""
        at = constraint(folder, tools())
        try:
            for char in text:
                at.accept(pd.Bench.token(folder, char))
        except EpddError:
            return None
        return at

    call = '<tool_call>\n{"name": "look", "arguments": {"at": "<b>"}}\n</tool_call>'
    for text in ("", "hello", 'a < b, {"name": 1}\n', "<tool_", f"so: {call}", f"{call}\n{call}"):
        at = follow(text)
        assert at is not None and at.legal()[eos].all(), text
    for text in ("<tool_call>", f"{call}\n", call[:-1], call[:30]):
        at = follow(text)
        assert at is not None and not at.legal()[eos].any(), text
    for text in ("<tool_call>x", call.replace("look", "hook"), call.replace('"<b>"', "5"), f"{call}then"):
        assert follow(text) is None, text


@pytest.mark.parametrize(("fields", "names", "most"), [
    ({"tool_choice": "required"}, {"look", "see"}, 5),
    ({"tool_choice": "required", "parallel_tool_calls": False}, {"look", "see"}, 1),
    ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, {"look"}, 1),
])
def test_forced_calls_are_calls(checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
                                fields: dict[str, Any], names: set[str], most: int) -> None:
    """With ignore_eos there are as many calls as the grammar allows."""
    monkeypatch.setattr(tool_fields, "CALLS_MAX", 5)
    folder = checkpoint("qwen3_vl")
    bench = pd.Bench(folder, kv_tokens=1 << 15)
    for seed in range(4):
        bench.submit(str(seed), pd.prompt(folder, [20], seed=seed), max_tokens=3000, temperature=1.0, seed=seed,
                     ignore_eos=True, grammar=tools(**fields))
    seen = set()
    for name, tokens in bench.run().items():
        parser = CallParser()
        calls = parser.push(bench.text(tokens)).calls
        assert bench.of(name)[-1] == wire.Done(name, "stop") and not parser.inside and parser.calls == most
        for call in [call for call in calls if call.id]:
            seen.add(call.name)
            arguments = json.loads("".join(part.arguments for part in calls if part.index == call.index))
            assert valid(PARAMETERS, arguments) if call.name == "look" else arguments == {}
    assert seen == names


def test_tokens_that_stand_for_text_are_text(checkpoint: Callable[..., str]) -> None:
    """Control tokens and ids without a token are never allowed inside an answer; the end token only at its end."""
    folder = checkpoint("qwen3_vl")
    free = constraint(folder, tools())
    legal = free.legal()
    ids = families.load(folder)
    assert legal.shape == (640,) and legal[list(ids.eos_ids)].all()
    assert not legal[ids.image_token_id] and not legal[-1]
    assert not constraint(folder, grammar(DIGITS)).legal()[list(ids.eos_ids)].any()


def test_a_ban_gives_way_only_where_nothing_else_is_legal() -> None:
    class Two(GrammarMask):
        def __init__(self, legal: list[int]) -> None:
            self.mask = torch.zeros(10, dtype=torch.bool)
            self.mask[legal] = True

        def legal(self) -> torch.Tensor:
            return self.mask

    def chosen(legal: list[int], **options: Any) -> int:
        sampling = wire.Sampling(5, temperature=0.0, **options)
        return Sampler(sampling, [], frozenset({9}), 10, torch.device("cpu"), Two(legal)).choose(torch.arange(10.0))

    assert chosen([2, 3]) == 3
    assert chosen([2, 3], logit_bias={3: -100.0}) == 2
    assert chosen([2, 3], logit_bias={3: -100.0, 2: -100.0}) == 3
    assert chosen([2, 9], min_tokens=3) == 2
    assert chosen([9], min_tokens=3) == 9


@pytest.mark.parametrize("opens", [False, True])
def test_a_grammar_begins_after_the_thoughts(checkpoint: Callable[..., str], opens: bool) -> None:
    """Reasoning is free text that cannot end the answer; the text after the closing tag fits the grammar."""
    folder = checkpoint("qwen3_vl")
    start, end = 11, 12     # any two tokens will do
    bench = pd.Bench(folder, kv_tokens=1 << 14)
    for seed in range(30):
        # A random model would hardly ever write these two by itself.
        bias = {start: 60.0, end: 100.0} if opens and seed % 2 else {end: 6.0}
        bench.submit(str(seed), pd.prompt(folder, [20], seed=seed), max_tokens=400, temperature=1.0, seed=seed,
                     grammar=grammar(DIGITS), think_end_id=end, think_start_id=start if opens else -1,
                     logit_bias=bias)
    ended = 0
    for name, tokens in bench.run().items():
        last = bench.of(name)[-1]
        assert isinstance(last, wire.Done)
        if opens and not int(name) % 2:
            begun = tokens[0] == start
        else:
            begun = True
            assert not opens or tokens[0] == start
        if begun and end not in tokens:
            assert last.reason == "length"      # it never ends inside
            continue
        answer = tokens[tokens.index(end) + 1:] if begun else tokens
        text = bench.text(answer)
        assert valid(DIGITS, json.loads(text)), (name, text)
        assert last.reason == "stop" and (not begun or text.lstrip("\n")[0] == "{")
        ended += 1
    assert ended >= 25


def test_one_line_break_may_stand_between_thoughts_and_grammar(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("qwen3_vl")
    made = GrammarCompiler(folder, 640, families.load(folder).eos_ids)
    line, letter, end = (pd.Bench.token(folder, text) for text in ("\n", "x", "z"))

    def after(text: str, *tokens: int) -> list[bool]:
        """Whether a line break, x, and the end may follow."""
        limits = made.compile(wire.Sampling(max_tokens=9, grammar=text, think_end_id=end))
        for token in tokens:
            assert limits.legal()[token]
            limits.accept(token)
        legal = limits.legal()
        return [bool(legal[token]) for token in (line, letter, families.load(folder).eos_ids[0])]

    assert after('start: "x"', letter) == [True, True, False]               # thinking: all but the end
    assert after('start: "x"', letter, end) == [True, True, False]          # a break, or the grammar
    assert after('start: "x"', end, line) == [False, True, False]           # one break only
    assert after('start: "\\nx"', end, line) == [False, True, False]        # here it was the grammar's own
    assert after('start: "x"', end, line, letter) == [False, False, True]
