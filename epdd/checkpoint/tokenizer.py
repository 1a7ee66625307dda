"""A checkpoint's tokenizer, set up to make prompts."""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from epdd.errors import ModelError
from epdd.families import ModelInfo
from epdd.families.files import refuse_pointer


def load(family: ModelInfo) -> Tokenizer:
    """The tokenizer of tokenizer.json, set up to make prompts.

    Raises ModelError if the file is missing or damaged, is of another kind, or lacks tokens that config.json names.
    """
    # The daemon shares its cores with encoders, so a prompt must not use a thread on each core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = Path(family.folder) / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path}: no such file; download it, or let transformers write it "
                         "(AutoTokenizer.from_pretrained(...).save_pretrained(...))")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        refuse_pointer(path)
        raise ModelError(f"{path}: cannot be read ({error}); download it again") from None
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        raise ModelError(f"{path}: only byte-level tokenizers are served; take the one of the original checkpoint")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = family.control_ids
    missing = [token for token in ids if tokenizer.id_to_token(token) is None]
    if missing:
        raise ModelError(f"{path}: lacks the image tokens {missing} that config.json names; take the tokenizer.json "
                         "that belongs to this config.json")
    last = max(*tokenizer.get_added_tokens_decoder(), tokenizer.get_vocab_size(with_added_tokens=False) - 1)
    if last >= family.vocab:
        raise ModelError(f"{path}: has tokens up to id {last}, but config.json's vocab_size is {family.vocab}; take "
                         "the tokenizer.json that belongs to this config.json")
    # Plain text must not become these tokens, even if the file does not mark them as special.
    tokenizer.add_special_tokens([AddedToken(tokenizer.id_to_token(token), special=True, normalized=False)
                                  for token in ids])
    tokenizer.encode_special_tokens = True      # specials in plain text stay characters
    return tokenizer
