"""Renamed settings.  An old name works for one release, with a warning in the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epdd.errors import ConfigError

RENAMED = {
    "server.requests_max": "server.max_requests",
    "server.drain_s": "server.shutdown_timeout_s",
    "server.body_bytes_max": "server.max_body_bytes",
    "server.connections_max": "server.max_connections",
    "model.context_max": "model.max_model_len",
    "pd.token_budget": "pd.max_batched_tokens",
    "pd.batch_max": "pd.max_sequences",
    "fleet.well_s": "fleet.min_uptime_s",
    "fleet.backoff_max_s": "fleet.max_backoff_s",
    "fleet.failures_max": "fleet.max_failures",
    **{f"media.{key}_max": f"media.max_{key}" for key in ("redirects", "file_bytes", "pixels", "images",
                                                          "inflight_bytes", "fetches")},
    "log.requests_bytes_max": "log.max_requests_bytes",
}


class Names:
    """Translates old names of settings, and remembers which names were used and where."""

    def __init__(self) -> None:
        self._used: dict[str, str] = {}         # name, old or new -> source that used it
        self.warnings: list[str] = []

    def current(self, section: str, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """`values` by their current names.  Raises ConfigError if a setting is given by both names, in any sources."""
        found = {}
        for key, value in values.items():
            name = f"{section}.{key}"
            new = RENAMED.get(name, name)
            if new != name and name not in self._used:
                self.warnings.append(f"{name} is now called {new}: rename it ({source}); the next release refuses "
                                     "the old name")
            self._used.setdefault(name, source)
            found[new.partition(".")[2]] = value
        for old, new in RENAMED.items():
            if old in self._used and new in self._used:
                raise ConfigError(f"{old} ({self._used[old]}) is the old name of {new} ({self._used[new]}): "
                                  f"keep only {new}")
        return found
