"""`epdctl policy` and `epdctl explain`: how images are routed, and where the images of a request went."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from epdd.ctl import client, render
from epdd.ctl.render import COLUMNS, Json

UNTIL = "A change lasts until the next one, or until the daemon reloads (SIGHUP) and applies the settings file again."
LISTED = 20                 # requests, without -n
ID_COLUMNS = 20             # width of a client's own request id in the list


def add_verbs(verbs: Any) -> None:
    verb = verbs.add_parser("policy", help="show how images are routed to encoders, or change it without a restart",
                            description=f"Show how images are routed to encoders, or change it at once. {UNTIL}")
    verb.add_argument("policy", nargs="?", metavar="POLICY", help="name of a policy; `epdctl policy` lists them")
    verb.add_argument("--unit", help="unit in which work in flight is counted: request, image or patch")
    verb.add_argument("--ratio", type=_ratio, metavar="R", help="how many times faster a GPU encodes than "
                      "the CPUs of one NUMA node; auto: as measured")
    verb.add_argument("--slack", type=_slack, metavar="S", help="order of the encode queue; 0: first come, "
                      "first served; higher: small requests pass large ones")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=_policy)

    verb = verbs.add_parser("explain", help="show where the images of a request went, and why",
                            description="Show where the images of a running or recent request went, why, and how long "
                                        "each step took. Without REQUEST_ID, list the last requests.")
    verb.add_argument("request", nargs="?", metavar="REQUEST_ID", help="id of the answer, or its x-request-id header")
    verb.add_argument("-n", type=_amount, default=LISTED, metavar="COUNT", dest="amount",
                      help=f"number of requests in the list (default: {LISTED})")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=_explain)


def _ratio(text: str) -> str | float:
    if text == "auto":
        return text
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number above 0")
    return value


def _slack(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def _amount(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _policy(args: argparse.Namespace) -> int:
    asked = {name: value for name in ("policy", "unit", "ratio", "slack") if (value := getattr(args, name)) is not None}
    answer = client.ask(client.socket_of(args.socket), "policy", **asked)
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        print(policy(answer))
        if asked:
            print("\n" + textwrap.fill(UNTIL, COLUMNS))
    return 0


def _explain(args: argparse.Namespace) -> int:
    path = client.socket_of(args.socket)
    if args.request is None:
        answer = client.ask(path, "explain")[:args.amount]
        text = listing(answer)
    else:
        answer = client.ask(path, "explain", request=args.request)
        text = explanation(answer)
    print(json.dumps(answer, indent=2) if args.json else text)
    return 0


def policy(router: Json) -> str:
    """The current settings of the router, then one line for each policy."""
    width = max(map(len, router["policies"]))
    lines = [f"{name:8}  {value}" for name, value in (
        ("policy", router["policy"]), ("unit", router["unit"]), ("slack", render.number(router["slack"])),
        ("R", render.ratio(router)))]
    lines.append("")
    lines += [f"{'*' if name == router['policy'] else ' '} {name:{width}}  {text}"
              for name, text in router["policies"].items()]
    return "\n".join(lines)


def listing(requests: Sequence[Json]) -> str:
    """The last requests, one on each line."""
    if not requests:
        return "no request yet"
    with_client = any(each["client_id"] for each in requests)
    rows = [("REQUEST", "AGE", "IMAGES", "OUTCOME", "TOOK", "PD", *(["X-REQUEST-ID"] if with_client else []))]
    rows += [(each["id"], render.duration(each["age_s"]), str(each["images_count"]), each["code"] or each["outcome"],
              render.seconds(each["seconds"]), each["pd"] or "-",
              *([render.shorten(each["client_id"], ID_COLUMNS)] if with_client else [])) for each in requests]
    return "\n".join(_columns(rows, right=(1, 2, 4)))


def explanation(request: Json) -> str:
    """One request: its images, then its times."""
    lines = [request["id"] + (f"  x-request-id {request['client_id']}" if request["client_id"] else ""),
             f"{request['outcome']}, arrived {render.duration(request['age_s'])} ago; "
             f"{render.count(len(request['images']), 'image')}, {render.count(request['tokens'], 'token')} of prompt"]
    if request["error"]:
        lines += textwrap.wrap(f"{request['code']}: {request['error']}", COLUMNS)
    if request["images"]:
        lines += ["", *_images(request)]
    return "\n".join([*lines, "", *_times(request)])


def _images(request: Json) -> list[str]:
    """A table of images; the last column, the reasons, takes the rest of the width.

    ENDED counts from the arrival of the request.  TOOK is the encoding alone, without waiting inside the worker.
    """
    rows = [("IMAGE", "PATCHES", "SOURCE", "ENCODER", "WAITED", "PREDICTED", "TOOK", "ENDED", "WHY")]
    for index, image in enumerate(request["images"]):
        first = (str(index), render.quantity(image["patches"]), image["source"])
        for each in image["hand_overs"]:
            took = render.seconds(each["seconds"]) if each["outcome"] == "encoded" else each["outcome"]
            why = each["reason"] + (f"; {each['error']}" if each["error"] else "")
            rows.append((*first, each["worker"], render.seconds(each["waited_s"]),
                         render.seconds(each["predicted_s"]), took, render.seconds(each["ended_at_s"]), why))
            first = ("", "", "")
        if not image["hand_overs"]:
            rows.append((*first, "-", "-", "-", "-", "-", _without_encoder(image, request)))
        elif image["error"] and image["error"] != image["hand_overs"][-1]["error"]:
            rows.append(("",) * 8 + (image["error"],))
    cells = list(_columns([row[:-1] for row in rows], right=(0, 1, 4, 5, 7)))
    start = max(map(len, cells)) + 2
    lines = []
    for cell, row in zip(cells, rows):
        why = textwrap.wrap(row[-1], COLUMNS - start) or [""]
        lines += [f"{cell:{start}}{why[0]}".rstrip(), *(" " * start + line for line in why[1:])]
    return lines


def _without_encoder(image: Json, request: Json) -> str:
    if image["error"]:
        return str(image["error"])
    if image["source"] == "cache":
        return "its embedding was there"
    return "waits in the queue" if request["ended_at_s"] is None else "left the queue unencoded"


def _times(request: Json) -> list[str]:
    """The steps of a request, each with its seconds after the arrival."""
    steps = [(0.0, "arrived"), (request["began_at_s"], "images fetched, prompt made"),
             (request["embedded_at_s"], "embeddings ready")]
    for each in request["placements"]:
        steps.append((each["placed_at_s"], f"given to {each['worker']}"
                      + (f", in vain: {each['error']}" if each["error"] else "")))
        steps.append((each["prefilled_at_s"], f"prefilled by {each['worker']}"))
    outcome = "done" if request["outcome"] == "completed" else request["outcome"]
    steps.append((request["ended_at_s"], outcome))
    lines = []
    for at, text in steps:
        if at is not None:
            first, *rest = textwrap.wrap(text, COLUMNS - 10)
            lines += [f"{render.seconds(at):>8}  {first}", *(" " * 10 + line for line in rest)]
    return lines


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(cell.rjust(width) if i in right else cell.ljust(width)
                        for i, (cell, width) in enumerate(zip(row, widths))).rstrip()
