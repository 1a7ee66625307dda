"""`epdctl status` as plain text of at most 100 columns; colour is added only for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from epdd.hardware.topology import ranges

Json = dict[str, Any]

COLUMNS = 100
CPUS_COLUMNS = 12           # longer lists of CPUs are cut; the beginning shows where they are
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "degraded": "yellow", "gone": "red",
          "failed": "red"}


class Paint:
    """Puts terminal colours around text, if `colour`."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, style: str, text: str) -> str:
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if self._colour and style in _CODES else text


def status(snapshot: Json, colour: bool = False) -> str:
    """The whole daemon on one screen."""
    paint = Paint(colour)
    lines = [headline(snapshot, paint), "", *_table(snapshot["workers"], paint), ""]
    lines += [f"{paint('bold', f'{name:8}')}  {line}" for name, line in facts(snapshot)]
    problems = notes(snapshot)
    if problems:
        lines.append("")
    for problem in problems:
        first, *rest = textwrap.wrap(problem, COLUMNS - 2)
        lines += [paint("yellow", "! ") + first, *(f"  {line}" for line in rest)]
    return "\n".join(lines)


def headline(snapshot: Json, paint: Paint) -> str:
    model, listen = snapshot["model"], snapshot["listen"]
    state = str(snapshot["state"])
    host = f"[{listen['host']}]" if ":" in listen["host"] else listen["host"]
    return (f"{paint('bold', 'epdd ' + snapshot['version'])}  {paint(STYLES.get(state, 'red'), state)}  "
            f"{paint('bold', shorten(model['name'], 30))} ({model['type']})  "
            f"http://{host}:{listen['port']}  up {duration(snapshot['uptime_s'])}")


def notes(snapshot: Json) -> list[str]:
    """What an operator should know: why the daemon is not ready, warnings, slow and restarted workers."""
    told = {f"{worker['name']} {worker['state']}" for worker in snapshot["workers"]}     # the table shows it
    found = [reason for reason in snapshot["why"] if reason not in told]
    if entries := snapshot.get("poison", {}).get("entries"):
        found.append(f"content over which two workers died is refused: {quantity(entries)} images or prompts")
    for worker in snapshot["workers"]:
        if worker["warning"]:
            found.append(f"{worker['name']}: {worker['warning']}")
        if worker["slow"]:
            found.append(f"{worker['name']} is {_slowness(worker)} slower than at its start")
        if worker["restarts"]:
            why = f", last because: {worker['last_error']}" if worker["last_error"] else ""
            found.append(f"{worker['name']} restarted {count(worker['restarts'], 'time')}{why}")
    return found


def facts(snapshot: Json) -> list[tuple[str, str]]:
    """(name, values) for pools, arena, cache and requests."""
    router, arena, cache, requests = (snapshot[name] for name in ("router", "arena", "cache", "requests"))
    oldest = f"; the oldest for {seconds(router['oldest_s'])}" if router["queue_jobs"] else ""
    return [
        *([("emulated", emulated_text(snapshot["emulated"]))] if snapshot.get("emulated") else []),
        ("router", f"policy {router['policy']}, in flight counted by {router['unit']}, "
                   f"slack {number(router['slack'])}, R {ratio(router)}"),
        ("pools", f"I_cpu {quantity(router['i_cpu'])}  B_cpu {number(router['budget_cpu'])}  "
                  f"I_gpu {quantity(router['i_gpu'])}  "
                  f"N_cpu {quantity(router['n_cpu'])}  N_gpu {quantity(router['n_gpu'])}"),
        ("queue", f"{count(router['queue_jobs'], 'image')} waiting, {count(router['queue_cost'], router['unit'])}"
                  f"{oldest}"),
        *[("encoding", line) for line in encoding(snapshot["workers"])],
        ("arena", f"{size(arena['used_bytes'])} of {size(arena['bytes'])} used: {size(arena['pinned_bytes'])} in use, "
                  f"{size(arena['cached_bytes'])} cached; {count(arena['leases'], 'lease')}, "
                  f"{quantity(arena['waiting'])} waiting"),
        *[("handover", line) for line in handover(snapshot)],
        ("memory", _memory(snapshot)),
        ("cache", f"{count(cache['entries'], 'image')}, {size(cache['bytes'])} of {size(cache['limit_bytes'])}"),
        ("lookups", f"{quantity(cache['hits'])} hits{_share(cache['hits'], cache['misses'])}, "
                    f"{quantity(cache['misses'])} misses, {quantity(cache['joined'])} joined, "
                    f"{quantity(cache['evictions'])} evicted"),
        ("requests", f"{quantity(requests['running'])} running, {quantity(requests['completed'])} completed, "
                     f"{quantity(requests['failed'])} failed, {quantity(requests['rejected'])} rejected, "
                     f"{quantity(requests['aborted'])} aborted"),
        ("latency", f"{_percentiles(requests['latency_s'])};  first token {_percentiles(requests['ttft_s'])}"),
        ("rate", f"{number(requests['tokens_per_s'])} tokens/s, {number(requests['images_per_s'])} images/s"),
    ]


def handover(snapshot: Json) -> list[str]:
    """How embeddings get from encoders on GPUs to prefill-decode workers on GPUs: a line for each encoder."""
    lines = []
    for pool in snapshot["transport"]["pools"]:
        lines.append(f"{pool['encoder']}: {size(pool['used_bytes'])} of {size(pool['bytes'])} used of its GPU's "
                     f"memory, {size(pool['cached_bytes'])} cached")
    ways: dict[tuple[str, str], list[str]] = {}
    for pair in snapshot["transport"]["pairs"]:
        if pair["why"] != "on CPUs":
            way = "by its GPU's memory" if pair["way"] == "gpu" else f"by the host's: {pair['why']}"
            ways.setdefault((pair["encoder"], way), []).append(pair["pd"])
    return lines + [f"{encoder} to {', '.join(pds)} {way}" for (encoder, way), pds in ways.items()]


def encoding(workers: Sequence[Json]) -> list[str]:
    """Backend that computes embeddings, and the times of all backends that were measured; equal outcomes once."""
    seen: dict[tuple[str, ...], str] = {}
    for worker in workers:
        if worker.get("backend") is None:
            continue
        trials = sorted((trial for trial in worker["trials"] if trial["seconds"]), key=lambda trial: trial["seconds"])
        times = ", ".join(f"{trial['backend']} {1000 * trial['seconds']:.3g} ms{' (refused)' if trial['note'] else ''}"
                          for trial in trials)
        line = f"{worker['backend']} in {worker['name']}" + (f"; one block: {times}" if times else "")
        seen.setdefault((worker["backend"], *(trial["backend"] + trial["note"] for trial in trials)), line)
    return list(seen.values())


def _memory(snapshot: Json) -> str:
    """Huge pages of the arena, and the sum of all KV caches."""
    huge = snapshot["arena"]["huge_bytes"]
    used, cached, tokens = (sum(worker[key] or 0 for worker in snapshot["workers"])
                            for key in ("kv_used", "kv_cached", "kv_tokens"))
    return (f"arena: {size(huge) if huge else 'nothing'} in huge pages; KV: {quantity(used)} of {quantity(tokens)} "
            f"tokens used, {quantity(cached)} kept for prompts to come")


def emulated_text(emulated: Json) -> str:
    scale = emulated["scale"]
    speed = "" if scale == 1 else f", {scale:g} times as fast as it says"
    answers = "true answers" if emulated["answers"] == "demo" else "no model: answers mean nothing"
    return f"devices by profile {emulated['profile']}{speed}; {answers}"


def worker_cells(worker: Json) -> tuple[str, ...]:
    """One worker's row under HEADER."""
    work = quantity(worker["in_flight"])
    if worker["in_flight_cost"]:
        work += f" ({quantity(worker['in_flight_cost'])})"
    # The memory policy that the kernel reports counts; without one, memory comes from the node of the CPUs.
    node = "-" if worker["numa_node"] is None else str(worker["numa_node"])
    if (policy := worker.get("mem_policy")) and policy != "default":
        node = policy
    return (worker["name"], worker["device"], node, shorten(ranges(worker["cpus"] or ()) or "-", CPUS_COLUMNS),
            state_text(worker), work, _rate(worker), quantity(worker["done"]), size(worker["rss_bytes"]),
            _percent(level(worker)))


# The last column: an encoder's share of the work of about the last minute, or a PD worker's used part of KV cache.
LEVEL = "SHARE/KV"
HEADER = ("WORKER", "DEVICE", "NUMA", "CPUS", "STATE", "IN FLIGHT", "RATE", "DONE", "MEMORY", LEVEL)
RIGHT = frozenset({"NUMA", "RATE", "DONE", "MEMORY", LEVEL})


def state_text(worker: Json) -> str:
    state = str(worker["state"])
    if state == "STARTING" and worker.get("stage"):
        return f"{worker['stage']} {100 * (worker['progress'] or 0):.0f}%"
    return f"{_slowness(worker)} slower" if state == "READY" and worker["slow"] else state


def state_style(worker: Json) -> str:
    if worker["state"] == "READY" and worker["slow"]:
        return "yellow"
    return STYLES.get(str(worker["state"]).lower(), "red")


def _table(workers: Sequence[Json], paint: Paint) -> list[str]:
    rows = [HEADER, *map(worker_cells, workers)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    place = HEADER.index("CPUS")
    if (over := sum(widths) + 2 * len(widths) - 2 - COLUMNS) > 0:
        widths[place] = max(len("CPUS"), widths[place] - over)
        rows = [(*row[:place], shorten(row[place], widths[place]), *row[place + 1:]) for row in rows]
    lines = []
    for worker, row in zip([None, *workers], rows):
        cells = [cell.rjust(width) if name in RIGHT else cell.ljust(width)
                 for name, cell, width in zip(HEADER, row, widths)]
        if worker is not None:
            place = HEADER.index("STATE")
            cells[place] = paint(state_style(worker), cells[place])
        line = "  ".join(cells).rstrip()
        lines.append(paint("dim", line) if worker is None else line)
    return lines


def _rate(worker: Json) -> str:
    unit = "img/s" if worker["role"] == "encoder" else "tok/s"
    return "-" if worker["rate_per_s"] is None else f"{number(worker['rate_per_s'])} {unit}"


def level(worker: Json) -> float | None:
    """Value of the last column, 0 to 1."""
    if worker["role"] == "encoder":
        return None if worker["share"] is None else float(worker["share"])
    return (worker["kv_used"] or 0) / worker["kv_tokens"] if worker["kv_tokens"] else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _slowness(worker: Json) -> str:
    return f"{worker['slowness']:.1f}x"


def ratio(router: Json) -> str:
    """The current R; if it was set, also the measured one: "6.21 measured", "8 set, 6.21 measured", "-"."""
    measured = f"{number(router['ratio_measured'])} measured"
    if router["ratio_set"] is not None:
        return f"{number(router['ratio_set'])} set" + (f", {measured}" if router["ratio_measured"] is not None else "")
    return "-" if router["ratio"] is None else measured


def _share(hits: int | None, misses: int | None) -> str:
    total = (hits or 0) + (misses or 0)
    return f" ({100 * (hits or 0) / total:.0f}%)" if total else ""


def _percentiles(values: Json | None) -> str:
    if not values or not values.get("count"):
        return "-"
    return ", ".join(f"{name} {seconds(values[name])}" for name in ("p50", "p90", "p99"))


def seconds(value: float | None) -> str:
    """"85 ms", "1.24 s", "75 s"."""
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def duration(value: float | None) -> str:
    """"42 s", "3 min", "5 h 12 min", "8 d 3 h"."""
    if value is None:
        return "-"
    minutes = int(value) // 60
    if minutes == 0:
        return f"{int(value)} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def quantity(value: float | None) -> str:
    """Counts: "817", "12.4k", "3.1M"."""
    if value is None:
        return "-"
    for suffix, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 10 * scale or (value >= scale and suffix != "k"):
            return f"{value / scale:.1f}".removesuffix(".0") + suffix
    return f"{value:.0f}"


def number(value: float | None) -> str:
    """Three digits: "0.412", "6.2", "417"."""
    if value is None:
        return "-"
    if value >= 100 or value == 0:
        return quantity(value)
    return f"{value:.3g}"


def size(value: float | None) -> str:
    """Bytes: "512 MiB", "2.4 GiB"."""
    if value is None:
        return "-"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{value:.0f} B"


def count(value: float | None, noun: str) -> str:
    """"1 patch", "12.4k patches"."""
    ending = "" if value == 1 else "es" if noun.endswith("ch") else "s"
    return f"{quantity(value)} {noun}{ending}"


def shorten(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[:columns - 2] + ".."
