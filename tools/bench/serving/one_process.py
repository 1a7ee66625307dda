"""epdd as a colocated server: encoder and prefill-decode in one process, in one loop, on all CPUs.

    python -m tools.bench.serving.one_process --model FOLDER --set encoder.workers=1 --set pd.workers=1

The baseline of tools/bench/serving/serve.py.  The daemon is the real one and sees two workers, which it puts on the
same CPUs.
The encoder's process passes its socket to the prefill-decode worker's and waits.  That one runs both roles in turn: an
image (or a few small ones together), then a step of the language model.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import time
from dataclasses import replace
from functools import partial

import msgspec

import epdd.daemon
from epdd import log as logs, placement, wire
from epdd.fleet.process import ForkServer
from epdd.worker.process import affinity

JOIN_S = 120.0              # one worker may be forked long before the other
JOIN_EVERY_S = 0.05


def plan(*where, decide=placement.plan):
    """Placement's plan, but with all workers on all of their CPUs, with a thread for each core."""
    specs = decide(*where)
    cpus = tuple(sorted({cpu for spec in specs for cpu in spec.cpus}))
    return [replace(spec, cpus=cpus, threads=sum(each.threads for each in specs)) for spec in specs]


def main(spec, sock, arena):
    """Run by the fork server for each worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.setup(spec.log_level)
    binding = affinity.bind(spec)
    # Both are children of one fork server; an abstract address ends with its last user.
    address = f"\0epdd-one-process-{os.getppid()}"
    if spec.role == "encoder":
        join(address, spec, sock.detach(), arena.detach())
    else:
        with accept(address) as other:
            data, (encoder_fd, arena_fd), *_ = socket.recv_fds(other, 1 << 16, 2)
            serve([(pickle.loads(data), encoder_fd), (spec, sock.detach())], arena_fd, binding)


def join(address, spec, *fds):
    """Pass socket and arena on, and live as long as the process that has them."""
    end = time.monotonic() + JOIN_S
    with socket.socket(socket.AF_UNIX) as other:
        while other.connect_ex(address):
            if time.monotonic() > end:
                sys.exit("there is no prefill-decode worker to join")
            time.sleep(JOIN_EVERY_S)
        socket.send_fds(other, [pickle.dumps(spec)], fds)
        for fd in fds:
            os.close(fd)
        other.recv(1)


def accept(address):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(JOIN_S)
        listener.bind(address)
        listener.listen(1)
        return listener.accept()[0]


def serve(workers, arena_fd, binding):
    """Run these workers, (spec, socket) each, until the daemon hangs up."""
    import torch

    from epdd.arena import Mapping
    from epdd.worker import bootstrap
    from epdd.worker.process import loop
    from epdd.worker.kernels import mkl

    mkl.warm_up_vml()
    torch.set_num_threads(binding.threads)
    torch.set_num_interop_threads(1)
    mapping = Mapping(arena_fd, workers[0][0].arena_bytes)
    mapping.reserve(0, workers[0][0].arena_bytes)
    members, readable = [], select.poll()
    for spec, fd in workers:
        readable.register(fd, select.POLLIN)
        connection = loop.DaemonConnection(fd)
        role = bootstrap.role_of(spec)(spec, mapping, connection.send)
        members.append((connection, role))
        connection.send(msgspec.structs.replace(role.warm_up(lambda done: None), binding=binding))
        connection.flush()
    take_turns(members, readable, workers[0][0].heartbeat_s)


def take_turns(members, readable, heartbeat_s):
    """A step of each in turn, as epdd.worker.process.loop does it for one."""
    next_heartbeat = time.monotonic()
    while True:
        beats = time.monotonic() >= next_heartbeat
        if beats:
            next_heartbeat = time.monotonic() + heartbeat_s
        for connection, role in members:
            try:
                for message, raw in connection.receive():
                    if isinstance(message, wire.Cancel):
                        role.cancel(message.id)
                    else:
                        role.submit(message, raw)
                if role.busy:
                    role.step()
                if beats:
                    connection.send(role.heartbeat())
                connection.flush()
            except (EOFError, ConnectionError):
                return
        if not any(role.busy for _, role in members):
            readable.poll(1000 * max(0.0, next_heartbeat - time.monotonic()))


if __name__ == "__main__":
    placement.plan = plan
    # Named by its module, not as __main__, so that the fork server's children can import it.
    epdd.daemon.ForkServer = partial(ForkServer, target="tools.bench.serving.one_process")
    sys.exit(epdd.daemon.main())
