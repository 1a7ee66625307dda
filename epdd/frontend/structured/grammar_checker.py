"""Compiles requested grammars in a separate process, to find those that are wrong, too large or too slow.

llguidance bounds the size of a grammar, but not the time: a schema of 2 kB can take hours.  A thread cannot be killed;
a process can, and if it runs out of memory or stack, the daemon lives on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

import orjson

from epdd.errors import CapacityError

log = logging.getLogger(__name__)

KEPT = 32               # results: agents send the same tools in each turn
_PROGRAM = "import epdd.grammar; epdd.grammar.serve()"


class GrammarChecker:
    """Runs one process, which the first grammar starts and `close` ends."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._known: dict[tuple[str, ...], tuple[int, str]] = {}      # least recently used first

    async def fault(self, grammars: Sequence[str]) -> tuple[int, str]:
        """Index of the first grammar that cannot be compiled, and why; (-1, "") if all can.  All together may take
        `epdd.grammar.COMPILE_S` of CPU time.

        Raises CapacityError if they cannot be checked now.
        """
        asked = tuple(grammars)
        if asked not in self._known:
            async with self._turn:
                if asked not in self._known:        # another request may have checked the same meanwhile
                    self._known[asked] = await self._compiled(asked)
        found = self._known[asked] = self._known.pop(asked)
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return found

    async def _compiled(self, grammars: tuple[str, ...]) -> tuple[int, str]:
        process, done = await self._running(), False
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(orjson.dumps(grammars) + b"\n")
            answer = await process.stdout.readline()
            done = bool(answer)
        except OSError:
            answer = b""
        finally:
            if not done:        # it ended, or this request was cancelled: its answer must not go to the next one
                self._end()
        if answer:
            place, fault = orjson.loads(answer)
            return int(place), str(fault)
        code = await process.wait()
        if code == -signal.SIGPROF:
            return len(grammars) - 1, "it takes too long to compile"
        if code == -signal.SIGKILL:     # killed from outside
            raise CapacityError("grammars cannot be checked now; try again later")
        log.info("a grammar was refused: compiling it ended its process code=%s", code)
        return len(grammars) - 1, "it is too large"

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            try:
                # In its own session: a Ctrl-C is for the daemon.  Without stderr, where llguidance may quote a request.
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-c", _PROGRAM, stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
                    start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
            except OSError as error:
                raise CapacityError(f"grammars cannot be checked now ({error.strerror}); try again later") from None
        return self._process

    def _end(self) -> Process | None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
        return process

    async def close(self) -> None:
        if process := self._end():
            await process.wait()
