"""The soak's clients: questions about drawn pictures with known answers, bad input, clients that leave early.

Every request has exactly one outcome, which is judged here.  `faults.py` injects the faults.
"""

import asyncio
import base64
import io
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tools.demo import dialogue, world as world

CLIENTS = 8
ANSWER_S = 200.0        # seconds, then it counts as lost: a hung worker is replaced long before
THINK_S = 0.05          # between two requests of a client, at most
PICTURES = 48           # asked repeatedly, half of the times as new files that are in no cache
ABORT_S = 0.8           # seconds within which a client leaves
FITTING = {"worker_lost", "no_worker", "image_rejected", "prompt_rejected"}     # errors due during a fault

RIGHT, REFUSED, LEFT, FITS, BROKEN = "right", "refused", "left", "error", "BROKEN"      # BROKEN: a broken connection
WRONG, UNDUE, UNANSWERED = "WRONG", "UNDUE ERROR", "UNANSWERED"


@dataclass(frozen=True)
class Question:
    """Image files, a question about them, and the right answer."""

    files: tuple[bytes, ...]
    text: str
    answer: str

    def body(self, rng: random.Random, fresh: bool = False) -> dict[str, Any]:
        """A request; `fresh`: the same pictures as new files."""
        more = rng.randbytes(8) if fresh else b""           # after the end of a PNG, which decoders ignore
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": _url(one + more)}}
                                       for one in self.files]
        return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}],
                "temperature": 0, "max_tokens": 64}


def questions(seed: int) -> list[Question]:
    """Questions that the demo model answers best, in many image sizes; asked after the images."""
    rng = random.Random(f"soak {seed}")
    found = [Question((), "Hello", dialogue.GREETING), Question((), "Tell me a joke.", dialogue.OTHER_ANSWER)]
    for index in range(PICTURES):
        count = 1 if index % 4 else rng.randint(2, 4)
        size = rng.choice(world.LARGE_SIZES[:4]) if index % 8 == 1 else None
        scenes = [world.draw_scene(rng, 1, size if count == 1 else None) for _ in range(count)]
        thing, files = scenes[0].things[0], tuple(map(_file, scenes))
        if count > 1:
            told = ", ".join(f"{i}: {scene.things[0].name}" for i, scene in enumerate(scenes, 1))
            found.append(Question(files, "List the images in order.", told))
        elif index % 2:
            found.append(Question(files, f"What colour is the {thing.shape}?", thing.colour))
        else:
            found.append(Question(files, "What shape is this?", thing.shape))
    return found


def _url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _file(scene: world.Scene) -> bytes:
    buffer = io.BytesIO()
    scene.image.save(buffer, "PNG")
    return buffer.getvalue()


@dataclass(eq=False)
class Flight:
    """A request in flight."""

    began: float
    outcome: str = ""
    told: str = ""          # of what is not right


@dataclass
class Load:
    """`CLIENTS` clients that ask until stopped or paused."""

    url: str
    seed: int
    known: list[Question] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)        # codes of due errors
    complaints: list[str] = field(default_factory=list)         # violations
    flights: set[Flight] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)          # seconds of each right answer
    troubled: float = float("-inf")         # time until which errors are due to a fault

    def __post_init__(self) -> None:
        self._go = asyncio.Event()

    async def learn(self, session: aiohttp.ClientSession) -> int:
        """Ask each question once, and drop those that the model answers wrongly.  Returns the number left."""
        asked, rng = questions(self.seed), random.Random(self.seed)
        for question in asked:
            async with session.post(self.url, json=question.body(rng)) as answer:
                if _whole(await answer.text(), False) == question.answer:
                    self.known.append(question)
        return len(asked) - len(self.known)

    def resume(self) -> None:
        self._go.set()

    def stop(self) -> None:
        """Send no new request."""
        self._go.clear()

    async def pause(self) -> None:
        """Wait until no request is in flight."""
        self.stop()
        while self.flights:
            await asyncio.sleep(0.02)

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"soak {self.seed} client {number}")
        while True:
            await self._go.wait()
            await self._one(session, rng)
            await asyncio.sleep(rng.random() * THINK_S)

    async def _one(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        dice, stream = rng.random(), rng.random() < 0.5
        question = rng.choice(self.known)
        body = question.body(rng, rng.random() < 0.5) | {"stream": stream}
        flight = Flight(time.monotonic())
        self.flights.add(flight)
        try:
            if dice < 0.15:
                await self._bad(session, rng, body, flight)
            elif dice < 0.35:
                await self._leave(session, rng, body, flight)
            else:
                await self._ask(session, body, question.answer, flight)
        except TimeoutError:
            flight.outcome, flight.told = UNANSWERED, f"no answer to {question.text!r} in {ANSWER_S:.0f} s"
        except aiohttp.ClientError as error:
            flight.outcome, flight.told = BROKEN, f"{type(error).__name__}: {error}"
        except (json.JSONDecodeError, KeyError, IndexError) as error:
            flight.outcome, flight.told = WRONG, f"{type(error).__name__}: {error}"
        finally:
            self.flights.discard(flight)
        self.outcomes[flight.outcome] += 1
        if flight.outcome == RIGHT:
            self.seconds.append(time.monotonic() - flight.began)
        if flight.outcome in (BROKEN, WRONG, UNDUE, UNANSWERED):
            self.complaints.append(f"after {time.monotonic() - flight.began:.1f} s: {flight.told}")

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any], truth: str, flight: Flight) -> None:
        async with asyncio.timeout(ANSWER_S), session.post(self.url, json=body) as answer:
            text = await answer.text()
        code = _error_code(text, body["stream"] and answer.status == 200)
        if code is not None:
            self._error(flight, answer.status, code, text)
        elif answer.status != 200 or _whole(text, body["stream"]) != truth:
            flight.outcome, flight.told = WRONG, f"{truth!r} was due: status {answer.status}, {text[-300:]!r}"
        else:
            flight.outcome = RIGHT

    def _error(self, flight: Flight, status: int, code: str, text: str) -> None:
        """An error is due during a fault and shortly after."""
        if code in FITTING and flight.began <= self.troubled:
            flight.outcome = FITS
            self.codes[code] += 1
        else:
            flight.outcome, flight.told = UNDUE, f"status {status} without a fault: {text[-300:]!r}"

    async def _bad(self, session: aiohttp.ClientSession, rng: random.Random, body: dict[str, Any],
                   flight: Flight) -> None:
        """The answer must name the client's fault, unless the server cannot serve at all."""
        broken = _url(b"\x89PNG\r\n\x1a\n" + rng.randbytes(40))
        worse = rng.choice([{"top_p": -1}, {"model": "other"}, {"max_tokens": 0}, {"messages": []}, {"messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": broken}}]}]}])
        async with asyncio.timeout(ANSWER_S), session.post(self.url, json=body | worse) as answer:
            text = await answer.text()
        if answer.status in (400, 404) and _error_code(text, False):
            flight.outcome = REFUSED
        else:
            self._error(flight, answer.status, _error_code(text, False) or "", text)

    async def _leave(self, session: aiohttp.ClientSession, rng: random.Random, body: dict[str, Any],
                     flight: Flight) -> None:
        """Leave at any stage, from before the body is read to the middle of a long answer."""
        body |= {"max_tokens": 200, "ignore_eos": True}
        flight.outcome = LEFT
        try:
            async with asyncio.timeout(rng.random() * ABORT_S), session.post(self.url, json=body) as answer:
                await answer.read()
        except TimeoutError:
            pass


def _error_code(text: str, stream: bool) -> str | None:
    """The code of an error answer or frame; None: there is none."""
    if not stream:
        error = json.loads(text).get("error")
    else:
        error = next((event["error"] for event in _events(text) if "error" in event), None)
    return None if error is None else str(error["code"])


def _whole(text: str, stream: bool) -> str | None:
    """The answer if it is complete: it ended by itself, and a stream sent its end."""
    if not stream:
        choice = json.loads(text)["choices"][0]
        return str(choice["message"]["content"]) if choice["finish_reason"] == "stop" else None
    choices = [choice for event in _events(text) for choice in event["choices"]]
    if not text.endswith("data: [DONE]\n\n") or [c["finish_reason"] for c in choices if c["finish_reason"]] != ["stop"]:
        return None
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
