"""Explores schedules of requests, cancels, deaths and drains in dispatch, and checks invariants in each.

    python -m tools.explore --schedules 100000     seeds, of random scenarios
    python -m tools.explore --small                every schedule of small scenarios
    python -m tools.explore --replay 164           one seed, step by step

Exit code 1 with the whole schedule if an invariant is broken: bytes are used after they were freed, a work ends twice
or never, a request gets another's picture or does not end, a gauge is not back at its start.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable

from tools.explore.loop import all_paths
from tools.explore.memory import Violation
from tools.explore.run import explored, run, run_seed
from tools.explore.scenario import Ask, Scenario

TOLD_S = 30.0

SMALL = {
    "one request, cancelled, a death": Scenario((Ask((0,)),), pages=1, cancels=1, deaths=1, small=True),
    "one image for two": Scenario((Ask((0,)), Ask((0,))), pages=1, cancels=1, small=True),
    "room for one of two": Scenario((Ask((0, 2)), Ask((2, 4))), pages=2, cancels=1, small=True),
    "a shared image": Scenario((Ask((0, 2)), Ask((2, 4))), pages=3, cancels=1, small=True),
    "a shared image, two encoders": Scenario((Ask((0, 2)), Ask((2, 4))), pages=3, encoders=2, cancels=1, small=True),
    "a hole too small": Scenario((Ask((0, 2)), Ask((2, 1))), pages=3, cancels=1, small=True),
    "an answer sent whole, a death": Scenario((Ask((0,), whole=True),), pages=1, deaths=1, lacks=1, small=True),
    "an answer sent whole, two deaths": Scenario((Ask((0,), whole=True),), pages=1, pds=2, cancels=1, deaths=2, lacks=1,
                                                 small=True),
    "a shared image, a death": Scenario((Ask((0, 2)), Ask((2, 4))), pages=3, cancels=1, deaths=1, small=True),
}


def at_random(first: int, count: int) -> Iterable[Callable[[], list[str]]]:
    """The schedules of these seeds."""
    return ((lambda seed=seed: run_seed(seed)) for seed in range(first, first + count))


def all_of(given: Scenario) -> Iterable[Callable[[], list[str]]]:
    """Every schedule of a small scenario."""
    return ((lambda path=path: run(given, path)) for path in all_paths())


def explore(name: str, schedules: Iterable[Callable[[], list[str]]]) -> None:
    """Run all and print their number.  Raises Violation."""
    began = told = time.perf_counter()
    count = steps = 0
    with explored():
        for schedule in schedules:
            steps += len(schedule())
            count += 1
            if time.perf_counter() - told > TOLD_S:
                told = time.perf_counter()
                print(f"  {count} so far", file=sys.stderr, flush=True)
    print(f"{name}: {count} schedules, {steps} steps, {time.perf_counter() - began:.0f} s: all hold", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000, help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--small", action="store_true", help="every schedule of small scenarios instead")
    parser.add_argument("--replay", type=int, help="tell one seed's schedule step by step")
    args = parser.parse_args()
    try:
        if args.replay is not None:
            with explored():
                print("\n".join(run_seed(args.replay)))
        elif args.small:
            for name, given in SMALL.items():
                explore(name, all_of(given))
        else:
            explore(f"seeds from {args.seed}", at_random(args.seed, args.schedules))
    except Violation as violation:
        print(f"{violation}\n{''.join(violation.__notes__)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
