"""Bytes of each token, for the daemon's detokenizer and the workers' grammars, which must agree."""

from __future__ import annotations

from tokenizers import Tokenizer


def _byte_letters() -> dict[str, int]:
    """The letters of byte-level BPE: a printable byte is its own letter, others have one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in letters.values()]
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_letters()
_LETTERS = {byte: letter for letter, byte in _BYTES.items()}


class Vocabulary:
    """The tokens of a byte-level tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special = frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items()
                                 if added.special)

    def is_special(self, token: int) -> bool:
        return token in self.special

    def token(self, data: bytes) -> int | None:
        """The token that stands for these bytes, if there is one."""
        found: int | None = self._tokenizer.token_to_id("".join(map(_LETTERS.__getitem__, data)))
        return found

    def bytes(self, token: int) -> bytes:
        """Bytes of a token; empty for an id without one, as embedding tables may be longer than the vocabulary."""
        letters = self._tokenizer.id_to_token(token)
        if letters is None:
            return b""
        try:
            return bytes([_BYTES[letter] for letter in letters])
        except KeyError:    # an added token with letters outside the byte alphabet is plain text
            return letters.encode()
