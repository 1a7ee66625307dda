"""Start and stop of the daemon, from top to bottom: one process, one event loop, no torch.

The file is long because it is one sequence, and each part is used once.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web
from msgspec import structs

from epdd import __version__, arena, checkpoint, emulation, families, hub, log, placement, systemd, unix_socket
from epdd.checkpoint import Look
from epdd.dispatch.admission import Admission
from epdd.dispatch.encoder_cache.cache import EncoderCache
from epdd.dispatch.encoding import Encoding
from epdd.dispatch.history import History
from epdd.dispatch.pipeline import Pipeline
from epdd.emulation import Emulation
from epdd.errors import AddressTaken, ConfigError, StartupError
from epdd.checkpoint import identity
from epdd.fleet.placement_watcher import PlacementWatcher
from epdd.fleet.process import ForkServer, preload_modules
from epdd.fleet.supervisor import Supervisor
from epdd.fleet.worker import State, Worker
from epdd.frontend import app
from epdd.frontend.context import Context
from epdd.frontend.http import descriptors
from epdd.frontend.http.auth import Keys
from epdd.frontend.http.connections import Connections
from epdd.frontend.http.server import Runner, both_families
from epdd.hardware.probe import probe
from epdd.ops import terminal
from epdd.ops.admin import AdminServer
from epdd.ops.metrics import RequestStats
from epdd.ops.request_log import RequestLog
from epdd.ops.status import Status
from epdd.settings import config
from epdd.settings.config import Config
from epdd.settings.service import LogSettings
from epdd.settings.workers import POLICIES, RouterSettings
from epdd.wire import WorkerSpec

logger = logging.getLogger(__name__)

STATUS_S = 5.0              # period of systemd's status text if nothing changes
CLOSE_S = 2.0               # at stop: time to send answers after all workers have ended (aiohttp's default is 60 s)


def main(argv: list[str] | None = None) -> int:
    """Run the daemon.  Exit code: 0 clean stop; 75 temporary failure; 78 a retry without a change cannot help."""
    _open_standard_files()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)       # until the loop runs, since its default action ends the process
    code = _run(sys.argv[1:] if argv is None else argv)
    if not log.output().close():
        os._exit(code)      # the reader of the log has stopped, and Python would wait for it at exit
    return code


def _open_standard_files() -> None:
    """Open /dev/null for standard files that the parent process has closed.  Otherwise the next file to be opened, here
    or in a worker, would get that number, and libraries would print into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)    # gets the lowest free number, which is this one
    closed = [name for name in ("stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, open(os.devnull, "w"))
        setattr(sys, f"__{name}__", getattr(sys, name))
    if "stderr" in closed and "stdout" not in closed:
        print("epdd: stderr is closed, so log lines are dropped; start it with 2>FILE to keep them", flush=True)


def _run(arguments: list[str]) -> int:
    try:
        settings, args = config.load(arguments)
        if args.version:
            print(f"epdd {__version__}")
            return 0
        log.setup(settings.log.level)
        for warning in args.warnings:
            logger.warning("settings %s", warning)
        _return_freed_memory()
        descriptors.raise_limit()
        settings = hub.located(settings, settings.model.download)
        os.environ["HF_HUB_OFFLINE"] = "1"      # libraries in workers download nothing
        found = checkpoint.look(settings.model.path or str(families.DEMO))
        for warning in found.warnings:
            logger.warning("model %s", warning)
        family = replace(found.family, weights=identity.digest(found.folder))
        emulated = emulation.load(settings.emulation, found.prompts.tokenizer)
        if emulated is not None:
            logger.warning("the fleet is emulated profile=%s answers=%s scale=%g", emulated.profile.name,
                           emulated.profile.answers, emulated.scale)
            family = emulated.family(family)
        found = replace(found, family=family)
        topology = probe()
        for warning in topology.warnings:
            logger.warning("topology %s", warning)
        size = placement.arena_bytes(settings, topology, family)

        def plan() -> list[WorkerSpec]:
            # CPUs of the main thread, as a thread of the executor may have others.  GPUs as at the start: if the driver
            # fails for a moment, workers must not move to CPUs.
            now = probe(affinity=os.sched_getaffinity(os.getpid()), gpus_known=topology.gpus)
            return placement.plan(now, settings, family, size, emulated)

        specs = placement.plan(topology, settings, family, size, emulated)
        if args.plan:
            print(placement.explain(specs, topology))
            return 0
        reserved = placement.fits_reserved_pages(specs, topology)
        return uvloop.run(Daemon(settings, found, specs, size, arguments, plan, emulated, reserved).run())
    except StartupError as error:
        print(f"epdd: {error.message}", file=sys.stderr)
        return error.exit_code


def _return_freed_memory() -> None:
    """Make the C library return freed memory of image files to the system at once.

    By default its threshold rises with the largest block ever freed, so the daemon would stay as large as it was in its
    busiest minute.
    """
    _libc().mallopt(-3, 128 << 10)      # M_MMAP_THRESHOLD: larger blocks are mapped and unmapped one by one
    _libc().mallopt(-8, 2)              # M_ARENA_MAX: threads share heaps


def _libc() -> ctypes.CDLL:
    """glibc, which torch needs anyway."""
    return ctypes.CDLL("libc.so.6")


def _request_log(settings: LogSettings) -> RequestLog | None:
    if not settings.requests:
        return None
    return RequestLog(Path(settings.requests), settings.max_requests_bytes, settings.requests_kept)


class Daemon:
    """All parts of the daemon, made in the order in which they need each other."""

    def __init__(self, settings: Config, found: Look, specs: list[WorkerSpec], arena_bytes: int,
                 arguments: list[str], plan: Callable[[], list[WorkerSpec]], emulated: Emulation | None = None,
                 reserved_pages: bool = False) -> None:
        self._settings = settings
        self._arguments = arguments
        self._stop = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._cleanup = ExitStack()     # files to remove at stop
        self._shutdown_timeout_s = settings.server.shutdown_timeout_s     # 0 after the second signal to stop
        self._exit_code = 0
        self._announced = False
        family = found.family
        # Without a real model the fleet must not have the name of one.
        own = found.name if emulated is None or emulated.needs_torch else f"emulated-{emulated.profile.name}"
        name = settings.model.name or own
        label = None if emulated is None else emulated.label()
        cache = settings.arena.cache_bytes
        self._cache = EncoderCache(arena_bytes, arena_bytes if cache < 0 else cache)
        self._supervisor = Supervisor(specs, arena.create(arena_bytes, reserved_pages), settings.fleet,
                                      ForkServer(preload_modules(family.model_type, emulated)), self._changed)
        self._placement_watcher = PlacementWatcher(self._supervisor, plan)
        self._admission = Admission(settings.server.max_requests, self._supervisor, self._cache, family)
        self._history = History()
        self._encoding = Encoding(self._supervisor, self._cache, settings, family)
        self._pipeline = Pipeline(self._supervisor, self._cache, self._encoding, self._admission, self._history)
        self._keys = Keys(settings.server)
        stats = self._stats = RequestStats(request_log=_request_log(settings.log))
        self._status = Status(settings, family, name, self._supervisor, self._placement_watcher, self._cache,
                              self._encoding, self._admission, stats, label)
        self._context = Context(
            config=settings, family=family, prompts=found.prompts, model_name=name, created=int(time.time()),
            pipeline=self._pipeline, admission=self._admission, max_model_len=self._admission.max_model_len,
            states=self._status.states, status=self._status.snapshot,
            keys=self._keys, connections=Connections(settings.server), stats=stats, emulated=label)
        self._terminal = terminal.Progress()

    async def run(self) -> int:
        """Serve until a signal to stop.  Raises StartupError."""
        self._handle_signals()
        application = app.build(self._context)
        runner = Runner(application, self._stats, self._context.connections, CLOSE_S)
        await runner.setup()
        gc.collect()
        gc.freeze()                 # the collector need not look through permanent objects, which takes 20 ms each time
        _libc().malloc_trim(0)      # reading a large vocabulary leaves as much freed memory behind
        admin: AdminServer | None = None
        try:
            # The API answers before the workers are up: /health says "starting", requests get 503.
            port = self._status.port = await self._listen(runner)
            admin = AdminServer(self._admin_socket, self._settings.admin, self._verbs())
            await admin.start()
            logger.info("epdd %s listens host=%s port=%s admin=%s pid=%s", __version__, self._settings.server.host,
                        port, admin.path, os.getpid())
            self._supervisor.start()
            self._terminal.show(self._supervisor.workers)
            self._background |= {asyncio.create_task(part) for part in
                                 (self._report(), self._feed_watchdog(), self._placement_watcher.watch())}
            await self._stop.wait()
            await self._drain()
        finally:
            for task in self._background:
                task.cancel()
            self._terminal.stop()
            await self._supervisor.stop()
            await runner.cleanup()
            self._cleanup.close()
            if self._stats.request_log is not None:
                self._stats.request_log.close()
            if admin is not None:
                await admin.stop()
        logger.info("epdd stopped")
        return self._exit_code

    @property
    def _admin_socket(self) -> Path:
        """Path of the admin socket; needs the port of the listener."""
        return config.admin_socket(self._settings, self._status.port)

    async def _listen(self, runner: web.AppRunner) -> int:
        server = self._settings.server
        try:
            if server.host == "::":     # asyncio would accept only IPv6, unlike most servers
                await web.SockSite(runner, both_families(server.port)).start()
            else:
                await web.TCPSite(runner, server.host, server.port).start()
        except OSError as error:
            kind = AddressTaken if error.errno == errno.EADDRINUSE else StartupError
            raise kind(f"cannot listen on {server.host}:{server.port}: {error.strerror or error}") from None
        port = int(runner.addresses[0][1])
        if server.unix_socket:
            listener = unix_socket.listen(Path(server.unix_socket), server.unix_socket_mode, server.unix_socket_group,
                                          "server.unix_socket")
            self._cleanup.callback(Path(server.unix_socket).unlink, missing_ok=True)
            await web.SockSite(runner, listener).start()
        return port

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reload_or_say)
        loop.add_signal_handler(signal.SIGUSR1, self._reopen)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._terminate)

    def _terminate(self) -> None:
        """First signal: refuse new requests and let running ones end.  Second signal: stop now."""
        if self._stop.is_set():
            logger.warning("epdd stops at once")
            self._shutdown_timeout_s = 0.0
        self._stop.set()

    async def _drain(self) -> None:
        """Let the requests in flight end, within server.shutdown_timeout_s."""
        if self._exit_code:
            return      # it never served; its state stays "failed"
        systemd.notify(STOPPING="1", STATUS=f"stopping, {self._admission.in_flight} requests still running")
        self._admission.draining = True
        began = time.monotonic()
        while self._admission.in_flight and time.monotonic() - began < self._shutdown_timeout_s:
            await asyncio.sleep(0.05)
        if self._admission.in_flight:
            logger.error("epdd stops with requests running count=%s", self._admission.in_flight)

    def _reopen(self) -> None:
        """SIGUSR1: open the request log again, after logrotate has moved the file."""
        if self._stats.request_log is not None:
            self._stats.request_log.reopen()

    def _reload_or_say(self) -> None:
        """SIGHUP: no client waits for an answer, so an error is only logged."""
        with suppress(ConfigError):
            self._reload()

    def _reload(self) -> str:
        """Apply settings that can change while running.  Raises ConfigError; then nothing has changed."""
        if self._announced:
            systemd.notify(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))
        try:
            fresh, args = config.load(self._arguments)
            self._keys.load(fresh.server)
        except ConfigError as error:
            logger.error("reload refused, the old settings stay: %s", error.message)
            raise
        finally:
            if self._announced:     # before that, READY=1 would end the start
                systemd.notify(READY="1")
        log.setup(fresh.log.level)
        for warning in args.warnings:
            logger.warning("settings %s", warning)
        self._reopen()
        self._route(fresh.router)
        # CPUs may have changed; settings of placement stay those of the start.
        look = asyncio.create_task(self._placement_watcher.check(plan_anew=True))
        self._background.add(look)
        look.add_done_callback(self._background.discard)
        logger.info("reloaded level=%s", fresh.log.level)
        return "reloaded"

    def _route(self, router: RouterSettings) -> None:
        """Use these settings of the router from now on."""
        before, now = (" ".join(f"{key}={value}" for key, value in structs.asdict(each).items())
                       for each in (self._encoding.settings, router))
        self._encoding.configure(router)
        logger.info("router %s%s", now, f", before: {before}" if before != now else "")

    def _policy(self, request: dict[str, Any]) -> dict[str, Any]:
        """Changes the settings of [router] in the request, until the next change or reload; returns all of them.

        Raises ConfigError.
        """
        asked = {key: request[key] for key in RouterSettings.__struct_fields__ if key in request}
        if asked.get("ratio") == "auto":
            asked["ratio"] = Config().router.ratio
        if asked:
            self._route(Config(router=self._encoding.settings).with_values("router", asked, "policy").router)
        return self._status.router() | {"policies": POLICIES}

    def _verbs(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Verbs of epdctl."""
        def steer(action: Callable[[str], None]) -> Callable[[dict[str, Any]], str]:
            def verb(request: dict[str, Any]) -> str:
                name = str(request.get("worker", ""))
                action(name)
                return self._supervisor.find(name).state.value
            return verb
        return {"status": lambda request: self._status.snapshot(), "drain": steer(self._supervisor.drain),
                "resume": steer(self._supervisor.resume), "restart": steer(self._supervisor.restart),
                "reload": lambda request: self._reload(), "policy": self._policy, "explain": self._explain}

    def _explain(self, request: dict[str, Any]) -> Any:
        """History of one request, or without "request" a list of the last ones.  Raises NotFound."""
        return self._history.explain(str(request["request"])) if "request" in request else self._history.last()

    def _changed(self, worker: Worker) -> None:
        """The state or progress of a worker has changed."""
        self._terminal.show(self._supervisor.workers)
        self._pipeline.fleet_changed()
        role = self._supervisor.role(worker.role)
        if all(other.state is State.FAILED and not other.was_ready for other in role) and not self._stop.is_set():
            logger.critical("epdd cannot start: no %s worker came up: %s", worker.role, worker.last_error)
            self._exit_code = StartupError.exit_code
            self._stop.set()
        self._tell_systemd()

    def _tell_systemd(self) -> None:
        state, why = self._status.state()
        if state in ("ready", "degraded") and not self._announced:
            self._announced = True
            systemd.notify(READY="1")
            logger.info("epdd ready")
            self._terminal.stop()
            server = self._settings.server
            terminal.greet(self._context.model_name, server.host, self._status.port, self._admin_socket,
                           keyed=bool(server.api_keys or server.api_keys_file))
        systemd.notify(STATUS=self._status.line(state, why))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(STATUS_S)
            self._tell_systemd()
            self._context.connections.look()

    async def _feed_watchdog(self) -> None:
        """Feed systemd's watchdog from the serving event loop, and only while no worker is stuck."""
        interval = systemd.watchdog_interval()
        while interval:
            if self._supervisor.stall_detector.progressing:
                systemd.notify(WATCHDOG="1")
            await asyncio.sleep(interval)
