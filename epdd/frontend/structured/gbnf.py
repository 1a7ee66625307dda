"""Translates grammars of llama.cpp (GBNF), xgrammar and SGLang (EBNF) into llguidance's Lark.

llguidance splits an answer into lexemes and takes each as long as possible, so `[a-z]+ "z"` as two lexemes never ends.
Therefore everything without recursion becomes one lexeme, whose language is exact: a whole grammar without recursion,
otherwise each rule and each run of a sequence without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

RULES_MAX = 500
DEPTH_MAX = 24              # of brackets; llguidance reads 32
TIMES_MAX = 100_000         # of a repetition
SIGNS_MAX = 4               # repetitions one after another: each adds a bracket, and writing recurses for each

# Unambiguous: backtracking over two ways to match would take seconds.
_TOKEN = re.compile(r"""
    (?P<space>[ \t\r\n]+|\#[^\n]*)
  | (?P<name>[A-Za-z0-9_-]+)
  | (?P<text>"(?:\\.|[^"\\\n])*")
  | (?P<set>\[(?:\\.|[^\]\\])*\])
  | (?P<times>\{[ ]*(?:[0-9]+[ ]*)?(?:,[ ]*(?:[0-9]+[ ]*)?)?\})
  | (?P<sign>::=|[|()*+?.])
""", re.VERBOSE | re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = "/(?s:.)/"


@dataclass(frozen=True)
class _Node:
    """A part of a rule: `lark` with a {} for each child."""

    lark: str
    below: tuple[_Node, ...] = ()
    rule: str = ""              # name of the rule that it refers to
    sequence: bool = False


@dataclass
class _Writer:
    """Writes the Lark rules."""

    plain: frozenset[str]       # rules without recursion
    names: dict[str, str]
    lines: list[str] = field(default_factory=list)
    pieces: int = 0

    def rule(self, name: str, node: _Node) -> None:
        self.lines.append(f"{self.names[name]}: {self.text(node, name in self.plain)}")

    def text(self, node: _Node, lexeme: bool) -> str:
        """`lexeme`: it lies inside a lexeme."""
        if node.rule:
            return self.names[node.rule]
        if not node.sequence or lexeme:
            return node.lark.format(*(self.text(part, lexeme) for part in node.below))
        runs: list[list[_Node]] = []
        written: list[str] = []
        for part in (*node.below, None):
            if part is not None and self._is_plain(part):
                if not runs:
                    runs.append([])
                runs[-1].append(part)
                continue
            if runs:
                written.append(self._lexeme(runs.pop()))
            if part is not None:
                written.append(self.text(part, False))
        return " ".join(written)

    def _lexeme(self, run: list[_Node]) -> str:
        if len(run) == 1 and run[0].rule:
            return self.names[run[0].rule]
        self.pieces += 1
        name = f"PIECE{self.pieces}"
        self.lines.append(f"{name}: {' '.join(self.text(part, True) for part in run)}")
        return name

    def _is_plain(self, node: _Node) -> bool:
        return all(name in self.plain for name in _named(node))


def lark(grammar: str) -> str:
    """The grammar in Lark.  Raises ValueError with the fault and its line."""
    rules = _Parser(grammar).rules()
    if "root" not in rules:
        raise ValueError("it has no rule named root")
    uses = {name: set(_named(node)) for name, node in rules.items()}
    for name, used in uses.items():
        for missing in sorted(used - rules.keys()):
            raise ValueError(f"rule {name[:40]} uses {missing[:40]}, which is not defined")
    plain = _without_recursion(uses)
    names = {name: f"RULE{at}" if name in plain else f"rule{at}" for at, name in enumerate(rules)}
    writer = _Writer(plain, names)
    for name, node in rules.items():
        writer.rule(name, node)
    return "\n".join([f"start: {names['root']}", *writer.lines])


def _named(node: _Node) -> Iterator[str]:
    """The rules that a node uses."""
    left = [node]
    while left:
        one = left.pop()
        if one.rule:
            yield one.rule
        left += one.below


def _without_recursion(uses: dict[str, set[str]]) -> frozenset[str]:
    """Rules from which no recursive rule can be reached: collected from the leaves upwards."""
    users: dict[str, list[str]] = {name: [] for name in uses}
    for name, used in uses.items():
        for other in used:
            users[other].append(name)
    left = {name: len(used) for name, used in uses.items()}
    free = [name for name, count in left.items() if not count]
    found = set(free)
    while free:
        for user in users[free.pop()]:
            left[user] -= 1
            if not left[user]:
                found.add(user)
                free.append(user)
    return frozenset(found)


class _Parser:
    """A rule ends where the next one begins, so alternatives may have their own lines."""

    def __init__(self, grammar: str) -> None:
        self._tokens: list[tuple[str, str, int]] = []       # kind, text, place
        at = 0
        while at < len(grammar):
            found = _TOKEN.match(grammar, at)
            if found is None:
                raise ValueError(f"line {grammar.count(chr(10), 0, at) + 1}: {grammar[at:at + 10]!r} is no part of a "
                                 "grammar")
            if found.lastgroup != "space":
                self._tokens.append((str(found.lastgroup), found[0], at))
            at = found.end()
        self._grammar = grammar
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._at < len(self._tokens):
            kind, name, _ = self._tokens[self._at]
            if kind != "name" or self._sign(1) != "::=":
                raise self._fault("a rule begins with its name and ::=")
            if name in rules:
                raise self._fault(f"rule {name[:40]} is defined twice")
            self._at += 2
            rules[name] = self._alternatives()
            if len(rules) > RULES_MAX:
                raise ValueError(f"it has over {RULES_MAX} rules")
        return rules

    def _alternatives(self) -> _Node:
        found = [self._sequence()]
        while self._sign() == "|":
            self._at += 1
            found.append(self._sequence())
        return found[0] if len(found) == 1 else _Node("(" + " | ".join(["{}"] * len(found)) + ")", tuple(found))

    def _sequence(self) -> _Node:
        found: list[_Node] = []
        while (node := self._item()) is not None:
            found.append(self._repeated(node))
        if len(found) == 1:
            return found[0]
        return _Node(" ".join(["{}"] * len(found)), tuple(found), sequence=True) if found else _Node('""')

    def _item(self) -> _Node | None:
        if self._at == len(self._tokens):
            return None
        kind, text, _ = self._tokens[self._at]
        if kind == "name":
            if self._sign(1) == "::=":      # the next rule
                return None
            self._at += 1
            return _Node("", rule=text)
        if kind in ("text", "set"):
            node = _Node(_escaped(_literal(self._unescaped(text[1:-1])) if kind == "text" else self._set(text[1:-1])))
            self._at += 1
            return node
        if text == ".":
            self._at += 1
            return _Node(_escaped(_ANY))
        if text != "(":
            if text in "|)":
                return None
            raise self._fault(f"{text} stands where a part of a rule is wanted")
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise ValueError(f"its brackets are nested over {DEPTH_MAX} deep")
        self._at += 1
        node = self._alternatives()
        if self._sign() != ")":
            raise self._fault("a bracket is not closed")
        self._at += 1
        self._depth -= 1
        return node if node.lark.startswith("(") else _Node("({})", (node,))

    def _repeated(self, node: _Node) -> _Node:
        count = 0
        while self._at < len(self._tokens):
            kind, text, _ = self._tokens[self._at]
            if kind == "times":
                text = self._times(text)
            elif text not in ("*", "+", "?"):
                break
            count += 1
            if count > SIGNS_MAX:
                raise self._fault(f"over {SIGNS_MAX} repetitions follow one another")
            self._at += 1
            node = _Node("({})" + _escaped(text), (node,))
        return node

    def _times(self, text: str) -> str:
        """{2}, {2,} or {2,3} as {2,2}, {2,} or {2,3}."""
        least, comma, most = (part.strip() for part in text[1:-1].partition(","))
        if not least and not most:
            raise self._fault(f"{text[:40]} says no number")
        # Python's int() refuses thousands of digits.
        low, high = (int(part.lstrip("0")[:7] or 0) for part in (least, most))
        unbounded = bool(comma and not most)
        if not comma:
            high = low
        if max(low, high) > TIMES_MAX or not unbounded and high < low:
            raise self._fault(f"{text[:40]} is no range up to {TIMES_MAX}")
        return "{" + str(low) + "," + ("" if unbounded else str(high)) + "}"

    def _set(self, text: str) -> str:
        """A set of characters as a regular expression."""
        negated = text.startswith("^")
        chars = self._unescaped(text[1:] if negated else text, of_set=True)
        written, at = "", 0
        while at < len(chars):
            low = high = chars[at]
            if at + 2 < len(chars) and chars[at + 1] == _RANGE:
                high = chars[at + 2]
                at += 2
            low, high = (("-" if char == _RANGE else char) for char in (low, high))
            if low > high:
                raise self._fault(f"{low}-{high} is no range of characters")
            written += f"\\x{{{ord(low):x}}}" + (f"-\\x{{{ord(high):x}}}" if high != low else "")
            at += 1
        if not written:
            raise self._fault("a set of characters is empty")
        return f"/[{'^' * negated}{written}]/"

    def _unescaped(self, text: str, of_set: bool = False) -> str:
        """Without escapes; in a set an unescaped hyphen becomes _RANGE."""
        def char(found: re.Match[str]) -> str:
            code = found[1] or found[2] or found[3]
            if code:
                value = int(code, 16)
                if value > 0x10FFFF or 0xD800 <= value < 0xE000:
                    raise self._fault(f"{found[0]} is no character")
                return chr(value)
            if found[4].isalnum() and found[4] not in _LETTERS:
                raise self._fault(f"{found[0]} is no escape")
            return _LETTERS.get(found[4], found[4])
        parts, at = [], 0
        for found in _ESCAPE.finditer(text):
            parts += [text[at:found.start()].replace("-", _RANGE) if of_set else text[at:found.start()], char(found)]
            at = found.end()
        return "".join([*parts, text[at:].replace("-", _RANGE) if of_set else text[at:]])

    def _sign(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at][1] if at < len(self._tokens) and self._tokens[at][0] == "sign" else ""

    def _fault(self, what: str) -> ValueError:
        place = self._tokens[self._at][2] if self._at < len(self._tokens) else len(self._grammar)
        return ValueError(f"line {self._grammar.count(chr(10), 0, place) + 1}: {what}")


_RANGE = "\ud800"           # no text from JSON can hold it


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(lark: str) -> str:
    """For str.format."""
    return lark.replace("{", "{{").replace("}", "}}")
