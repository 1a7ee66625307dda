"""Session-wide fixtures: checkpoints of the three families."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.tables"]

# No time limits on examples: a busy machine is no bug.  CI runs the same examples each time, so that results depend on
# the change alone; elsewhere every run has new ones.
settings.register_profile("epdd", deadline=None, suppress_health_check=[HealthCheck.too_slow],
                          derandomize="CI" in os.environ)
settings.load_profile("epdd")

# Background jobs of a shell ignore Ctrl-C, and the programs that tests send it to would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers' remembered measurements of this machine are for the tests only.
_cache = tempfile.TemporaryDirectory(prefix="epdd-cache-")
os.environ["CACHE_DIRECTORY"] = _cache.name


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`checkpoint(family, **options)`: the folder of a random checkpoint, built once a session."""
    from tests.models import checkpoints

    built: dict[str, Path] = {}

    def get(family: str = "qwen3_vl", **options: object) -> str:
        key = f"{family} {sorted(options.items())}"
        if key not in built:
            folder = tmp_path_factory.mktemp("checkpoint") / family
            built[key] = checkpoints.build(folder, family, **options)  # type: ignore[arg-type]
        return str(built[key])

    return get


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # If several processes share the files, the longest come first: else all wait for the last of them.
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("takes")), default=0))
