"""Command lines.  An error is one sentence and suggests the option that was probably meant."""

from __future__ import annotations

import argparse
import difflib
import typing
from collections.abc import Iterable, Sequence

from epdd.errors import ConfigError

# Options of vLLM and SGLang that people try first, and what to use here.
ELSEWHERE = {
    "--api-key": "set EPDD_SERVER_API_KEYS, or --set server.api_keys_file=FILE",
    "--data-parallel-size": "each GPU gets a worker automatically; --set pd.workers=gpu:N sets their number",
    "--dtype": "--set model.dtype=NAME",
    "--gpu-memory-utilization": "--set pd.kv_bytes=N limits the KV cache",
    "--limit-mm-per-prompt": "--set media.max_images=N",
    "--max-model-len": "--set model.max_model_len=N",
    "--max-num-batched-tokens": "--set pd.max_batched_tokens=N",
    "--max-num-seqs": "--set pd.max_sequences=N",
    "--model-path": "--model MODEL",
    "--served-model-name": "--set model.name=NAME",
    "--tensor-parallel-size": "not supported: each GPU holds the whole model and gets its own worker",
    "--tp": "not supported: each GPU holds the whole model and gets its own worker",
}


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` if one of `known` is spelled like `word`, else empty."""
    found = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing the usage and exiting, as argparse does."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Sequence[str] | None = None,       # type: ignore[override]
                   namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            option = word.partition("=")[0]
            if option in ELSEWHERE:
                self.error(f"no option {option} here: {ELSEWHERE[option]}")
            if word.startswith("-"):
                self.error(f"unknown option {option}{near(option, self._option_string_actions)}")
        if unknown:
            self.error(f"one argument too many: {unknown[0]}")
        return found
