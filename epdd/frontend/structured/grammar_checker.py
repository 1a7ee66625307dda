"""Whether answers can follow what a request asks for, told by a process of its own.

llguidance bounds the size of what it compiles, but not the time: a schema of 2 kB can take hours.  A thread cannot be
ended; a process can, and if it runs out of memory or stack nobody else ends with it.
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

KEPT = 32               # answers: agents send the same tools turn after turn
_PROGRAM = "import epdd.grammar; epdd.grammar.serve()"


class GrammarChecker:
    """Asks one process, which is started by the first question and ends with this one."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._known: dict[tuple[str, ...], tuple[int, str]] = {}      # the oldest first

    async def fault(self, grammars: Sequence[str]) -> tuple[int, str]:
        """The place of the first that no answer can follow, and why; (-1, "") if there is none.  All together have
        `epdd.grammar.COMPILE_S` of CPU time.

        Raises CapacityError if it cannot be told now.
        """
        asked = tuple(grammars)
        if asked not in self._known:
            async with self._turn:
                if asked not in self._known:        # somebody else may have asked the same
                    self._known[asked] = await self._told(asked)
        found = self._known[asked] = self._known.pop(asked)
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return found

    async def _told(self, grammars: tuple[str, ...]) -> tuple[int, str]:
        process, done = await self._running(), False
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(orjson.dumps(grammars) + b"\n")
            answer = await process.stdout.readline()
            done = bool(answer)
        except OSError:
            answer = b""
        finally:
            if not done:        # it has ended; or whoever asks has left, and its answer is not the next one's
                self._end()
        if answer:
            place, fault = orjson.loads(answer)
            return int(place), str(fault)
        code = await process.wait()
        if code == -signal.SIGPROF:
            return len(grammars) - 1, "it takes too long to compile"
        if code == -signal.SIGKILL:     # not by itself
            raise CapacityError("grammars cannot be checked now; try again later")
        log.info("a grammar was refused: compiling it ended its process code=%s", code)
        return len(grammars) - 1, "it is too large"

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            try:
                # In a session of its own: a Ctrl-C is for the daemon.  What the library says on stderr may quote a
                # request.
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
