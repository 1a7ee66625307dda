"""What each token stands for, in bytes: the daemon's text and a worker's grammars must not disagree about it."""

from __future__ import annotations

from tokenizers import Tokenizer


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte: itself where printable, else from U+0100 on."""
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
        """Empty for an id without a token: embedding tables are often longer than the vocabulary."""
        letters = self._tokenizer.id_to_token(token)
        if letters is None:
            return b""
        try:
            return bytes([_BYTES[letter] for letter in letters])
        except KeyError:    # an added token outside the byte alphabet stands for itself
            return letters.encode()
