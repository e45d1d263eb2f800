"""How workers are introduced to each other: a state machine (`protocol/machine.py`) without a socket, a clock or a thread.

What is said is in `introduction_messages.py`. The phases:

    FORMING --all joined, all addresses answer--> FORMED --all left--> finished
       \\--deadline, unreachable address, a worker leaves or has ended--> FAILED --all told, or LINGER_S later--> finished

Invariants: a Table goes out only when every rank has joined and every address has answered; all Tables are equal; once
FAILED, nobody ever gets a Table; a worker that asks for a taken rank is refused and changes nothing for the others.
Join is idempotent (`token` names the attempt), so a worker sends it again after every reconnection and no message has
to be reliable. A launcher that starts its workers again (`restart`) has ended those before; while the job forms, the new
ones take their places, and afterwards they wait for the coordinator of the next attempt.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from stretto.launching.hosts import host_name, is_loopback, split_address
from stretto.launching.introduction_messages import (
    CHECKER,
    Ask,
    Check,
    Checked,
    Ended,
    FromWorker,
    Join,
    Leave,
    Refusal,
    Refused,
    Table,
    Waiting,
    Why,
)  # fmt: skip
from stretto.launching.peers import Peer, ranks_text
from stretto.protocol.machine import Actions, Machine, Node, SendMessage, SetTimer

LINGER_S = 30.0  # how long a failed job tells latecomers why


class Phase(enum.Enum):
    FORMING = "forming"
    FORMED = "formed"
    FAILED = "failed"


@dataclass(slots=True)
class Member:
    sender: Node
    join: Join
    deadline: float
    answers: bool = False
    left: bool = False
    generation: int = 0  # of its life, where ranks come back (`lasting_membership.py`)

    def __str__(self) -> str:
        return f"pid {self.join.pid} on host {host_name(self.join.host)} ({self.join.address})"


class Membership(Machine):
    """The coordinator's knowledge of the job. No event raises because of what a worker sent. `encrypted` is what every worker
    must say of its own traffic, `nonce` is random and passed on to all."""

    header_type = FromWorker

    def __init__(self, world_size: int, host: str, *, encrypted: bool, nonce: bytes) -> None:
        self.world_size = world_size
        self._encrypted = encrypted
        self._nonce = nonce
        self.phase = Phase.FORMING
        self._host = host
        self._members: dict[int, Member] = {}
        self._ended: dict[int, Ended] = {}  # processes that ended without joining
        self._failure = Refused("job", "")
        self._lingered = False
        self._told: set[int] = set()  # ranks that know of the failure
        self._refused: dict[Why, tuple[int, str]] = {}  # how many, and the last one's address

    # Events

    def on_message(self, now: float, source: Node, header: FromWorker | Checked | Refusal, payload: memoryview) -> Actions:
        match header:
            case Join():
                return self._join(source, header, now)
            case Ask():
                return self._ask(source, header)
            case Leave():
                return self._leave(header)
            case Ended():
                return self._ended_elsewhere(header)
            case Checked():
                return self._checked(header)
            case Refusal():
                self._note(header)
        return ()

    def on_timer(self, now: float, name: str) -> Actions:
        if name == "linger":
            self._lingered = True
        elif self.phase is Phase.FORMING and self._members:
            return self._too_late() if self._deadline() <= now else [self._set_deadline(now)]
        return ()

    def _join(self, sender: Node, message: Join, now: float) -> Actions:
        problem = self._problem_with(message)
        if problem is not None:
            return [SendMessage(sender, problem)]
        member = self._members.get(message.rank)
        if member is not None and member.join.token == message.token:
            member.sender = sender
            return self._status(member)
        if self.phase is Phase.FORMING:
            self._forget_former_attempt(message)
            member = self._members.get(message.rank)
        elif self.phase is Phase.FORMED and member is not None and self._may_come_back(member, message):
            return self._come_back(sender, message)
        elif member is not None and message.restart > member.join.restart:
            # It belongs to the next attempt, whose coordinator will stand at this address once this one has ended.
            return [SendMessage(sender, Waiting([rank for rank in range(self.world_size) if rank != message.rank]))]
        if self.phase is Phase.FAILED:
            self._told.add(message.rank)
            return [SendMessage(sender, self._failure)]
        if member is not None:
            return [SendMessage(sender, rank_taken(message, member))]
        return self._admit(Member(sender, message, deadline=now + message.patience_s), now)

    def _may_come_back(self, member: Member, message: Join) -> bool:
        """Whether this is another life of a member of a job that has formed."""
        return False

    def _come_back(self, sender: Node, message: Join) -> Actions:
        raise AssertionError("here nobody comes back")

    def _ask(self, sender: Node, message: Ask) -> Actions:
        member = self._members.get(message.rank)
        if member is None or member.join.token != message.token:
            return ()  # a stranger to this coordinator (it was restarted, say): the worker's own deadline speaks
        member.sender = sender
        return self._status(member)

    def _leave(self, message: Leave) -> Actions:
        member = self._members.get(message.rank)
        if member is None or (member.join.host, member.join.pid) != (message.host, message.pid):
            return ()
        member.left = True
        if self.phase is Phase.FORMING:
            return self._fail(
                "job",
                f"Rank {message.rank} ({member}) gave up before all {self.world_size} workers had met, so the job "
                "cannot be formed.\n"
                f"Read the output of rank {message.rank} for the reason, then start the job again.",
            )
        return ()

    def _ended_elsewhere(self, message: Ended) -> Actions:
        """A launcher says that a worker's process has ended. That matters only to those who wait for it: a script in which no
        worker calls `stretto.init()` is fine, so the job fails when somebody has joined, or as soon as somebody does."""
        if self.phase is not Phase.FORMING or not 0 <= message.rank < self.world_size:
            return ()
        member = self._members.get(message.rank)
        if member is not None and (member.join.host, member.join.pid) == (message.host, message.pid):
            member.left = True
            return self._fail_without(message, "before all workers had met")
        if member is None and not self._has_later_attempt(message):
            self._ended[message.rank] = message
        return self._fail_if_somebody_waits()

    def _checked(self, checked: Checked) -> Actions:
        member = self._members.get(checked.check.rank)
        if member is None or member.join.token != checked.check.token or self.phase is not Phase.FORMING:
            return ()
        if checked.why_not is not None:
            return self._fail("unreachable", self._unreachable_text(member.join, checked.why_not))
        member.answers = True
        if len(self._members) < self.world_size or not all(member.answers for member in self._members.values()):
            return ()
        self.phase = Phase.FORMED
        return [SendMessage(member.sender, self._table()) for member in self._members.values()]

    def _note(self, refusal: Refusal) -> None:
        """Somebody was turned away at the door. Workers that wait hear of it when they ask."""
        count, _ = self._refused.get(refusal.why, (0, ""))
        self._refused[refusal.why] = (count + 1, refusal.address)

    def _deadline(self) -> float:
        return min(member.deadline for member in self._members.values())

    def _set_deadline(self, now: float) -> SetTimer:
        return SetTimer("deadline", self._deadline() - now)

    def _too_late(self) -> Actions:
        waited = min(member.join.meet_s for member in self._members.values())
        if not self.missing:
            slow = [rank for rank, member in self._members.items() if not member.answers]
            return self._fail(
                "unreachable",
                f"All {self.world_size} workers are here, but within {waited:g} s it could not be checked that the "
                f"address of {ranks_text(slow)} answers.\n"
                "Allow more time with --meet-timeout or STRETTO_MEET_TIMEOUT, or look for a firewall between the hosts.",
            )
        return self._fail(
            "job",
            f"{ranks_text(self.missing).capitalize()} of {self.world_size} did not join within {waited:g} s; "
            f"{ranks_text(sorted(self._members))} waited.\n{what_to_do(self.refusals)}",
        )

    # State

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self._members]

    @property
    def refusals(self) -> str:
        """How many were turned away at the door, why, and the last one's address; empty if nobody was."""
        return "; ".join(
            f"{count} connection attempt{'s were' if count > 1 else ' was'} refused because "
            f"{'they' if count > 1 else 'it'} {why.value} (last from {address})"
            for why, (count, address) in self._refused.items()
        )

    @property
    def failure(self) -> str | None:
        return self._failure.reason if self.phase is Phase.FAILED else None

    @property
    def finished(self) -> bool:
        """Nobody needs the coordinator any more."""
        if self.phase is Phase.FORMED:
            return all(member.left for member in self._members.values())
        if self.phase is Phase.FAILED:
            gone = {rank for rank, member in self._members.items() if member.left}
            return len(gone | self._told) == self.world_size or self._lingered
        return False

    @property
    def needs_parent(self) -> bool:
        """Whether nobody has any use for this without the process that has started the coordinator."""
        return True

    # Transitions

    def _admit(self, member: Member, now: float) -> Actions:
        message = member.join
        self._members[message.rank] = member
        stranded = self._stranded_on_loopback()
        if stranded is not None:
            why = (
                "a loopback address reaches nobody outside its own host, and the workers and the coordinator of this "
                "job are on different hosts"
            )
            return self._fail("unreachable", self._unreachable_text(stranded, why))
        if failed := self._fail_if_somebody_waits():
            return failed
        check = SendMessage(CHECKER, Check(message.rank, message.token, message.address))
        return [SendMessage(member.sender, self._waiting()), check, self._set_deadline(now)]

    def _forget_former_attempt(self, message: Join) -> None:
        """A launcher that starts a worker again has ended all of its workers before."""
        self._members = {rank: each for rank, each in self._members.items() if not _precedes(each.join, message)}
        self._ended = {rank: each for rank, each in self._ended.items() if not _precedes(each, message)}
        self._ended.pop(message.rank, None)

    def _has_later_attempt(self, message: Ended) -> bool:
        return any(_precedes(message, member.join) for member in self._members.values())

    def _fail_if_somebody_waits(self) -> Actions:
        if not self._ended or not self._members:
            return ()
        return self._fail_without(self._ended[min(self._ended)], "without having called stretto.init()")

    def _fail_without(self, message: Ended, when: str) -> Actions:
        waiting = ranks_text(rank for rank, member in self._members.items() if not member.left)
        return self._fail(
            "job",
            f"Rank {message.rank} of {self.world_size} (pid {message.pid} on host {host_name(message.host)}) {message.how} "
            f"{when}, so {waiting} would wait for it in vain.\n"
            f"Read the output of rank {message.rank}, and let every worker of the job call stretto.init(), or none.",
        )

    def _fail(self, kind: str, reason: str) -> Actions:
        self.phase = Phase.FAILED
        self._failure = Refused(kind, reason)
        waiting = [member for member in self._members.values() if not member.left]
        self._told.update(member.join.rank for member in waiting)
        return [*(SendMessage(member.sender, self._failure) for member in waiting), SetTimer("linger", LINGER_S)]

    def _status(self, member: Member) -> Actions:
        if self.phase is Phase.FORMED:
            return [SendMessage(member.sender, self._table())]
        if self.phase is Phase.FAILED:
            return [SendMessage(member.sender, self._failure)]
        return [SendMessage(member.sender, self._waiting())]

    def _waiting(self) -> Waiting:
        return Waiting(self.missing, self.refusals)

    def _table(self) -> Table:
        return Table(self._peers(), self._nonce)

    def _peers(self) -> list[Peer]:
        members = [self._members[rank] for rank in sorted(self._members)]
        return [
            Peer(join.rank, join.local_rank, join.host, join.address, join.pid, join.pid_namespace, generation)
            for join, generation in ((member.join, member.generation) for member in members)
        ]

    # Rules

    @property
    def _num_ranks(self) -> int:
        """How many ranks there may be."""
        return self.world_size

    def _problem_with(self, message: Join) -> Refused | None:
        who = f"rank {message.rank} (pid {message.pid} on host {host_name(message.host)})"
        if message.world_size != self.world_size:
            return Refused(
                "configuration",
                f"{who} was told the job has {message.world_size} workers, but this rendezvous was opened for "
                f"{self.world_size}.\n"
                "Start every worker with the same world size (--nodes times -n), or give each job a rendezvous port "
                "of its own.",
            )
        if not 0 <= message.rank < self._num_ranks:
            return Refused(
                "configuration",
                f"{who} asks for a rank that does not exist: a job of {self.world_size} has ranks 0 to "
                f"{self._num_ranks - 1}.\n"
                "Check --node and -n, or the variables your launcher sets.",
            )
        if message.encrypted != self._encrypted:
            self._note(Refusal(Why.ENCRYPTION, host_name(message.host)))
            return Refused(
                "configuration",
                f"{who} has encryption {_on(message.encrypted)}, but this job was started with encryption "
                f"{_on(self._encrypted)}.\n"
                "Set STRETTO_ENCRYPT to the same value for every worker.",
            )
        if not 0 < message.patience_s < 1e6:
            return Refused("configuration", f"{who} wants to wait {message.patience_s} s: give a positive time below 1e6 s.")
        return _problem_with_address(who, message.address)

    def _stranded_on_loopback(self) -> Join | None:
        """A worker that published 127.0.0.1 although somebody who needs it is on another host."""
        joins = [member.join for member in self._members.values()]
        if {join.host for join in joins} <= {self._host}:
            return None
        hosts = {join.host for join in joins}
        for join in joins:
            if is_loopback(split_address(join.address)[0]) and (len(hosts) > 1 or join.host != self._host):
                return join
        return None

    def _unreachable_text(self, join: Join, why: str) -> str:
        return (
            f"rank {join.rank} on host {host_name(join.host)} published {join.address} (interface {join.interface}), "
            f"which the coordinator on host {host_name(self._host)} cannot reach: {why}.\n"
            "Choose the interface on that host with STRETTO_INTERFACE=name-or-address, or open the port in its "
            "firewall."
        )


def _precedes(earlier: Join | Ended, later: Join) -> bool:
    """Whether `earlier` is of a former attempt of the launcher that has started `later`."""
    same_launcher = earlier.rank - earlier.local_rank == later.rank - later.local_rank
    return same_launcher and earlier.restart < later.restart


def _on(switch: bool) -> str:
    return "on" if switch else "off"


def _problem_with_address(who: str, address: str) -> Refused | None:
    try:
        _, port = split_address(address)
        why = "port 0 cannot be connected to" if port == 0 else None
    except ValueError as error:
        why = str(error)
    if why is None:
        return None
    return Refused("configuration", f"{who} published the address {address!r}: {why}. Publish IP:PORT of a bound port.")


def rank_taken(message: Join, member: Member) -> Refused:
    rank = message.rank
    state = "has already left the job" if member.left else "is in the job"
    return Refused(
        "job",
        f"rank {rank} is taken: {member} {state}, and this worker (pid {message.pid} on host "
        f"{host_name(message.host)}) asks for the same rank.\n"
        "Give each worker its own rank (check --node on each machine), and call stretto.init() once per process, not "
        "in subprocesses that inherit its environment.",
    )


def what_to_do(refusals: str) -> str:
    """About workers that did not come, given who was turned away."""
    if refusals:
        return (
            f"{refusals}.\n"
            "Give every machine of the job the same secret (--secret-file, STRETTO_SECRET or STRETTO_SECRET_FILE) and the same "
            "STRETTO_ENCRYPT, and each job a rendezvous port of its own."
        )
    return (
        "Read the output of the missing workers: they may have failed, be on a machine that was not started, or "
        "be unable to reach the rendezvous. Allow more time with --meet-timeout SECONDS or STRETTO_MEET_TIMEOUT."
    )
