"""The network on which workers reach each other one to one, and go on when some of them die, finish or come back.

    network = peer_network_of(job)                                   opened by the first model that needs it, on all workers
    running = network.begin(machine, owner, about="D-PSGD of Net")   a machine on a channel of its own, the same on all peers
    network.wait_for(running.request(...), "for its neighbours")     with a deadline

It is a job of the same ranks beside the job's own wire, where a lost worker fails all collectives: with keys of its own and a
communication thread of its own. A worker that has died comes back to it (`lasting_network.py`). In tests, where workers are
threads, it is a world of further wires (`Job.more_wires`).

What a machine is told (`protocol/machine.py`): `left`, when a peer was killed (at once: its connection closes), was silent for
too long, has ended this model or left the job (`until_quit.py`): nobody waits for it any more; `joined`, with the generation,
when a rank is here in a later life. Messages come in order. What is sent to a peer that has not begun the model yet waits with
its sender, `unsent_bytes` at most.

Cost:      P - 1 connections, and one to the coordinator; on the wire 3 bytes a message more than the machine sends.
Reference: the servers' network (`parameter_server/network.py`), of which this is the part without servers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

from stretto.aggregate.peers.control import BeginModel, EndModel, FindModels, LeavePeers, PeerControl
from stretto.aggregate.peers.until_quit import PeerQuits, QuitPeers, UntilQuit
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.execute import Communicator
from stretto.collectives.newcomers import admit, admit_newcomers, lives_of
from stretto.errors import ConfigurationError, JobError, PeerLost, StrettoError, WireError
from stretto.job import Job, make_wire
from stretto.lasting_network import join_network, place_again, place_in
from stretto.launching import secret as secrets
from stretto.launching.detect import Launch
from stretto.launching.peers import Peer
from stretto.protocol.loop import CREDIT_BYTES, UNSENT_BYTES, Running
from stretto.protocol.machine import Machine
from stretto.wire.base import Wire

NAME: Final = "peers"
CONTROL_CHANNEL: Final = 1
FIRST_CHANNEL: Final = 2  # of a model
ABOUT_CHARS: Final = 2000

log = logging.getLogger("stretto.peers")


class PeerNetwork:
    """A worker's connections to all others. Made by `peer_network_of`, ended by the job."""

    def __init__(self, job: Job, communication: CommunicationThread, launch: Launch | None = None) -> None:
        """`launch`: this worker's place in the network, where workers that die come back."""
        wire = communication.communicator.wire
        self._job, self._wire, self._communication = job, wire, communication
        self._roster = None if launch is None else admit_newcomers(launch, communication)
        self._channel = FIRST_CHANNEL
        self._begun: dict[int, Running] = {}  # by channel: what this worker has not ended
        self._departed: set[int] = set()  # who has said that it leaves the job
        self._control = communication.loop.start(PeerControl(job.rank, job.world_size, self._on_leaves), CONTROL_CHANNEL)
        wire.on_lost(self._on_lost)
        wire.on_view(self._on_view)

    # -- who is here --------------------------------------------------------------------------------------------------

    @property
    def life(self) -> int:
        """In which generation this worker has joined: 0, or it has come back."""
        return self._wire.joined_in(self._wire.rank)

    @property
    def living(self) -> list[int]:
        """The other workers, but for those that have died or left, as far as this one has heard."""
        return [rank for rank in self._wire.peers if rank not in self._wire.lost]

    def _on_lost(self, lost: PeerLost) -> None:
        if not self._job.closed and not self._wire.said_goodbye(lost.rank):
            log.warning("rank %d goes on without rank %d: %s", self._job.rank, lost.rank, lost)

    def _on_view(self, joined: list[int], left: list[int], generation: int) -> None:
        for rank in joined:
            self._departed.discard(rank)
            log.warning("rank %d has come back, and is connected to rank %d", rank, self._job.rank)

    def _on_leaves(self, rank: int) -> None:
        self._departed.add(rank)
        for running in list(self._begun.values()):
            running.request(PeerQuits(rank))

    def admit(self, peers: Sequence[Peer]) -> None:
        """Let these in, who have come back. For tests: in a job of processes they are heard of from the coordinator."""
        self._communication.loop.call(lambda: admit(self._communication, peers))

    # -- machines -----------------------------------------------------------------------------------------------------

    def begin(
        self,
        machine: Machine,
        owner: object,
        *,
        about: str,
        unsent_bytes: int = UNSENT_BYTES,
        credit_bytes: int = CREDIT_BYTES,
    ) -> Running:
        """Run this worker's machine of a protocol among all. It ends with its `owner`, or by `end`.

        All workers that are here from the beginning begin the same ones in the same order. One that has come back finds where the
        others run what `about` says: the same text for the same thing on all workers.
        """
        about = about[:ABOUT_CHARS]
        channel = self._channel if not self.life else self._channel_of(about)
        self._channel = channel + 1
        shell = UntilQuit(machine, self._job.rank, self._job.world_size, lambda: lives_of(self._wire))
        running = self._communication.loop.start(shell, channel, unsent_bytes=unsent_bytes, credit_bytes=credit_bytes)
        self._begun[channel] = running
        for rank in sorted(self._departed):
            running.request(PeerQuits(rank))
        self._control.request(BeginModel(channel, about))
        weakref.finalize(owner, self.end, running).atexit = False
        return running

    def _channel_of(self, about: str) -> int:
        found = self.wait_for(self._control.request(FindModels()), "to say what they train")
        for channel, what in found.items():
            if channel >= self._channel and what == about:
                return int(channel)
        others = f"They run: {'; '.join(found.values())}." if found else "They have finished, or died, or have not begun."
        raise ConfigurationError(
            f"rank {self._job.rank} has come back, and the other workers run no {about}. {others}\n"
            f"Distribute the same models with the same strategies in the same order as the others do."
        )

    def end(self, running: Running) -> None:
        """This worker takes part no more, and nobody is to wait for it. Sends, and waits for nobody."""
        if self._begun.pop(running.channel, None) is not None:
            self._control.request(EndModel(running.channel))
            running.request(QuitPeers())

    def give_up(self, running: Running, error: StrettoError) -> None:
        """Whatever this worker waits for from that machine fails with `error`; to the others it has quit."""
        self.end(running)
        loop = self._communication.loop
        loop.call(lambda: loop.end(running, error))

    def wait_for(self, answer: Future[Any], what: str, patience_s: float | None = None) -> Any:
        """The reply. `what` the other workers were asked, for the message when the time is over: by default `arrive_s`."""
        patience_s = self._job.timeouts.arrive_s if patience_s is None else patience_s
        try:
            return answer.result(patience_s)
        except TimeoutError:
            raise StrettoError(
                f"rank {self._job.rank} has asked the other workers {what}, and it has not come about within {patience_s:g} s. "
                f"Those that it can reach are {self.living}."
            ) from None

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        return self._wire.bytes_sent

    def stop(self) -> None:
        """Leave. In order: the others are told, and count without this worker."""
        if self._roster is not None:
            self._roster.stop()
        if self._job.leaves_in_order:
            for running in list(self._begun.values()):
                self.end(running)
            with contextlib.suppress(StrettoError, TimeoutError):  # without it they notice that the connection is gone
                self._control.request(LeavePeers()).result(self._job.timeouts.leave_s)
        self._communication.stop(self._job.timeouts.leave_s)
        if self._job.leaves_in_order:
            self._wire.close()
        else:
            self._wire.abandon()


def peer_network_of(job: Job) -> PeerNetwork:
    """The job's, opened by the first model that needs it. All workers call it together."""
    if job.peer_network is None:
        wire, launch = _open(job)
        job.peer_network = PeerNetwork(job, CommunicationThread(Communicator(wire, job.timeouts)), launch)
        job.threads.add(job.peer_network)
    assert isinstance(job.peer_network, PeerNetwork)
    return job.peer_network


def _open(job: Job) -> tuple[Wire, Launch | None]:
    if job.more_wires is not None:
        return job.more_wires(NAME, job.world_size)[job.rank], None
    if job.world_size == 1:
        return _of_one(job), None
    if not job.life:
        launch = place_in(job, NAME, job.world_size, "workers")
        return join_network(launch, dataclasses.replace(job.timeouts, meet_s=job.timeouts.connect_s)), launch
    again = place_again(job, NAME, job.world_size)
    if again is None:
        raise ConfigurationError(
            f"rank {job.rank} has come back, and the workers of this job have not met one to one: no model was distributed with "
            f"gossip or groups when it died.\nDistribute models with the same strategies as the others do."
        )
    try:
        return join_network(again, job.timeouts), again
    except (JobError, WireError) as error:
        raise JobError(f"rank {job.rank} has come back, and reaches none of the others: {error}") from error


def _of_one(job: Job) -> Wire:
    """Nobody to reach: a wire without peers."""
    wire = make_wire(dataclasses.replace(job.launch, secret=secrets.generate(), encrypt=False), job.timeouts, "tcp")
    wire.connect([Peer(0, 0, job.peers[0].host, wire.address, job.pid)], b"")
    return wire
