"""Log lines for people and for journald: stderr, one line each, subject first."""

import logging
import os
import sys
from typing import TextIO

# journald reads a leading <N> as the syslog priority (sd-daemon(3)).
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class _Formatter(logging.Formatter):
    """Time and level for a terminal; only the priority prefix under journald, which adds the rest."""

    def __init__(self, journal: bool) -> None:
        super().__init__("%(message)s" if journal else "%(asctime)s %(levelname)-7s %(message)s")
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        # One record is one line: a newline in a message must not forge a second record.
        text = super().format(record)
        if record.exc_info is None:
            text = text.replace("\n", "\\n")
        return f"<{_PRIORITY.get(record.levelno, 6)}>{text}" if self._journal else text


class _Stderr(logging.StreamHandler[TextIO]):
    """Looks sys.stderr up at each record: a progress bar on a terminal stands in for it while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:     # type: ignore[override]
        return sys.stderr


def setup(level: str) -> None:
    """Send all of epdd's loggers to stderr at `level` (debug, info, warning, error)."""
    handler = _Stderr()
    handler.setFormatter(_Formatter(journal="JOURNAL_STREAM" in os.environ))
    # Malformed HTTP is the client's fault, and its tracebacks tell an operator nothing.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    root = logging.getLogger("epdd")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())
