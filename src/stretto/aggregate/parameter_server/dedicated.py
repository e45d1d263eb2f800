"""A server that was started apart from the workers: what `stretto serve` runs, by hand or by `stretto run` and `stretto lab`.

    waiting ──all have met──▶ serving ──the last worker has left──▶ ended              exit code 0
       │                         └ ──all workers have died, or it has failed──▶ ended              1
       │ ──somebody has not come by the deadline──▶ an error that names it             2
       │ ──SIGTERM──▶ ended at once          (serving: no answer to it; servers follow their workers)
       └ ──Ctrl-C, also while serving──▶ ended at once, and workers lose it            130

One that dies is started again by a `keeper`, if it was started with one (`--restarts`): it joins those that go on, and is handed
its part of what they serve. With `forever` the next job is waited for, with the same number of workers and the same secret, for
as long as it takes.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
import time
from typing import Final

import torch

from stretto.aggregate.parameter_server.keeper import NOT_JOINED
from stretto.aggregate.parameter_server.process import begin_again, serve
from stretto.aggregate.parameter_server.server_trace import ServerTrace
from stretto.errors import ConfigurationError, JobError
from stretto.lasting_network import join_network
from stretto.launching.coordinator import why_unreachable
from stretto.launching.ledger_file import write_ledger
from stretto.launching.server_meeting import JoiningServer
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire

LOOK_EVERY_S: Final = 0.5  # for the next job
LOOK_S: Final = 2.0
GONE_S: Final = 10.0  # of a job where nobody listens

log = logging.getLogger("stretto.parameter_server")


def run(server: JoiningServer, timeouts: Timeouts, *, forever: bool, quiet: bool) -> int:
    """Serve one job, or one after the other; the exit code. For the main thread."""
    torch.set_num_threads(1)  # there are as many servers as it takes
    name = f"stretto serve: server {server.number} {'added to' if server.added else 'of'} {server.num_servers}"

    def say(text: str) -> None:
        if not quiet:
            print(f"{name} {text}", file=sys.stderr, flush=True)

    if server.life or server.added:
        begin_again()
    if server.life:
        timeouts = dataclasses.replace(timeouts, meet_s=timeouts.connect_s)  # the others are there, or gone
        if (why := _await_others(server.rendezvous)) is not None:
            log.warning("%s has not joined again: at %s nobody lets servers in any more (%s)", name, server.rendezvous, why)
            return NOT_JOINED
    while True:
        say(f"waits for {server.num_workers} workers at {server.rendezvous}")
        if forever:
            _await_job(server.rendezvous)
        try:
            wire = _meet(server, timeouts)
        except (JobError, ConfigurationError) as error:  # the latter: that job has other numbers of workers or servers
            if server.life:
                log.warning("%s has not joined again: %s", name, error)
                return NOT_JOINED
            if not forever:
                raise
            log.warning("%s could not join a job, and waits for the next one: %s", name, error)
            time.sleep(LOOK_S)
            continue
        say("serves")
        well = _serve(wire, server, timeouts)
        say("has ended: all workers have left" if well else "has ended: it has lost all workers at once, or has failed")
        if not forever:
            return 0 if well else 1


def _await_others(rendezvous: str) -> str | None:
    """For a later life: why nobody can be reached there, where somebody listens as long as the job goes on."""
    deadline = time.monotonic() + GONE_S
    while (why := why_unreachable(rendezvous, LOOK_S)) is not None and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return why


def _await_job(rendezvous: str) -> None:
    """Until somebody listens there, for as long as it takes: that is what was asked for."""
    while why_unreachable(rendezvous, LOOK_S) is not None:
        time.sleep(LOOK_EVERY_S)


def _meet(server: JoiningServer, timeouts: Timeouts) -> Wire:
    together = f"{server.num_workers} workers and {server.num_servers} servers"
    who = f"server {server.number}, which is rank {server.rank} {'beyond' if server.added else 'of'} the job's {together}"
    try:
        return join_network(server.launch, timeouts)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{who}: {error}\nHere workers and servers count together: compare --workers and --servers with the job's."
        ) from error
    except JobError as error:
        needed = f"STRETTO_SERVERS={server.num_servers}@{server.rendezvous}"
        raise JobError(f"{who}: {error}\nThe workers need {needed}, the same secret, and to call stretto.init().") from error


def _trace_of(server: JoiningServer) -> ServerTrace | None:
    if server.trace is None:
        return None
    return ServerTrace(folder=server.trace, server=server.number, num_workers=server.num_workers)


def _serve(wire: Wire, server: JoiningServer, timeouts: Timeouts) -> bool:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return serve(wire, range(server.num_workers), timeouts, _trace_of(server), server.launch)
    finally:
        signal.signal(signal.SIGTERM, before)
        if server.ledger is not None:
            write_ledger(server.ledger, wire.bytes_sent)
