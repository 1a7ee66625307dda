"""docs/reference/metrics.md: the metrics of a daemon that has every kind of worker and event."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from prometheus_client.parser import text_string_to_metric_families

from tools.reference.text import note, table

from epdd.frontend.http.connections import Connections
from epdd.ops import exposition
from epdd.ops.metrics import RequestStats
from epdd.ops.request_log import RequestLog
from epdd.settings.service import ServerSettings

HEAD = """\
# Metrics

`GET /metrics` has these in Prometheus' text format. If the server has API keys, the scraper needs one.
[Monitoring](../howto/monitoring.md) shows what to watch. Times and rates of an emulated fleet are this machine's, not
scaled back.
"""


def metric_list() -> str:
    text = exposition.Exposition(_stats(), Connections(ServerSettings()), _status).text().decode()
    rows = []
    for family in sorted(text_string_to_metric_families(text), key=lambda family: family.name):
        if family.name.endswith("_created"):        # the time at which a histogram began
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        rows.append((f"`{name}`", family.type, ", ".join(f"`{label}`" for label in sorted(labels)),
                     family.documentation))
    return "\n".join([note("/metrics"), HEAD, table(("metric", "type", "labels", ""), rows)])


def _stats() -> RequestStats:
    stats = RequestStats(request_log=Mock(spec=RequestLog, written=0, dropped=0))
    stats.statuses[200] = stats.errors["no_worker"] = 1
    stats.gauges = {"bodies": lambda: 0.0}
    return stats


def _status() -> dict[str, Any]:
    """A status with every number that a metric reads."""
    status: dict[str, Any] = {}
    for _, _, section, key in (*exposition.GAUGES, *exposition.COUNTERS):
        (status.setdefault(section, {}) if section else status)[key] = 0
    status["router"] |= {"policy": "earliest", "unit": "patch"}
    status["emulated"] = {"profile": "laptop", "answers": "demo", "scale": 1.0}
    status["workers"] = [{"name": f"{role}/0", "role": role, "state": "READY", "share": 0, "slowness": 1,
                          "kv_cached": 0} for role in ("encoder", "pd")]
    return status
