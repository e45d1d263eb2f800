"""Proof that a plan does what it promises, for a given number of ranks and with no process.

The plans of all ranks are executed at once on symbols instead of numbers. Rank r's chunk c begins as the symbol x_r[c];
adding makes an expression, copying passes it on. The laws of `plan.py` are checked on the way:

    pairing      the k-th Send from a to b and the k-th Recv at b from a: same step, same chunks, none left over
    ports        in one step nobody sends to, or receives from, more peers than the plan says
    rounds       what a step sends was there before the step began: steps are honest rounds, and a plan gives the same
                 result run round by round or as data arrives (the in-place hazard: a chunk overwritten in the round in
                 which it should still leave)
    no deadlock  data dependencies are acyclic: execution in the loosest order the laws allow comes to an end
    definedness  WORK is never read before it is written
    once         no addition counts a contribution twice
    promise      the end is what the plan's `kind` says
    bits         all ranks that end with a sum end with the same expression, up to a + b = b + a

Why one execution proves all: per chunk and buffer operations take effect in program order, and a receive waits for one
particular message. No operation can see which of two things came first, so every order that respects the
dependencies computes the same expressions (a Kahn network).

Why expressions prove bits: float addition is commutative but not associative. Two ranks that evaluate the same
expression tree up to swapping operands get the same bits (NaN payloads aside); two that evaluate different trees may
not.

Equal expressions get equal numbers (hash-consing), so comparing two is comparing integers; a bit mask per expression
says whose contributions it holds. The cost is one table look-up per chunk and operation.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.collectives.plan import Buffer, Kind, Local, Operation, Plan, PlanMaker, Recv, Send
from stretto.errors import StrettoError


class PlanError(StrettoError, AssertionError):
    """A plan breaks one of the laws of `stretto.collectives.plan`."""


def verify(maker: PlanMaker, size: int) -> None:
    """Prove the plan for `size` ranks, or raise `PlanError` saying which law fails and where."""
    verify_plans([maker(rank, size) for rank in range(size)])


def verify_plans(plans: Sequence[Plan]) -> None:
    """The same for plans already made, one per rank in rank order."""
    _check_headers(plans)
    for plan in plans:
        _check_operations(plan)
        _check_ports(plan)
    numbers = _check_pairing(plans)
    world = _World(plans, numbers)
    world.run()
    _check_promises(plans[0], world)


def _fail(plan: Plan, law: str, problem: str) -> PlanError:
    return PlanError(
        f"{plan.kind.value} plan {plan.algorithm!r} for {plan.size} ranks breaks the law of {law}: {problem}. "
        f"Nothing may run it; correct the function that makes the plan."
    )


# ---------------------------------------------------------------- what can be seen without executing


def _check_headers(plans: Sequence[Plan]) -> None:
    first = plans[0]
    same = (first.kind, first.algorithm, len(plans), first.num_chunks, first.root, first.ports)
    for rank, plan in enumerate(plans):
        if (plan.kind, plan.algorithm, plan.size, plan.num_chunks, plan.root, plan.ports) != same or plan.rank != rank:
            raise _fail(plan, "agreement", f"the plan given for rank {rank} is not of one kind with that of rank 0")
    needed = plans[0].size if first.kind in CUT_BY_RANK else None
    if needed is not None and first.num_chunks != needed:
        raise _fail(first, "agreement", f"it has {first.num_chunks} chunks, {first.kind.value} needs {needed}")


def _check_operations(plan: Plan) -> None:
    """Peers exist, ranges lie in the vector, the steps of Sends never decrease."""
    step = 0
    for operation in plan.operations:
        where = f"rank {plan.rank}, {operation}"
        if not 0 <= operation.lo <= operation.hi <= plan.num_chunks:
            raise _fail(plan, "ranges", f"{where} leaves chunks 0..{plan.num_chunks}")
        if operation.lo == operation.hi and plan.kind is not Kind.BARRIER:
            raise _fail(plan, "ranges", f"{where} is empty, which only a barrier may be")
        if not isinstance(operation, Local) and (operation.peer == plan.rank or not 0 <= operation.peer < plan.size):
            raise _fail(plan, "ranges", f"{where} has no such peer")
        if isinstance(operation, Send):
            if operation.step < step:
                raise _fail(plan, "program order", f"{where} goes back from step {step}")
            step = operation.step


def _check_ports(plan: Plan) -> None:
    peers: defaultdict[tuple[bool, int], set[int]] = defaultdict(set)
    for operation in plan.operations:
        if not isinstance(operation, Local):
            peers[isinstance(operation, Send), operation.step].add(operation.peer)
    for (sends, step), met in peers.items():
        if len(met) > plan.ports:
            verb = "sends to" if sends else "receives from"
            raise _fail(plan, "ports", f"rank {plan.rank} {verb} {sorted(met)} in step {step}, with ports={plan.ports}")


CUT_BY_RANK = (Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.ALL_TO_ALL)  # as many chunks as ranks
SUM = "the sum of all contributions"
Message = tuple[int, int, int]  # sender, receiver, number


def _check_pairing(plans: Sequence[Plan]) -> list[list[Message | None]]:
    """Number all messages; returns, beside each rank's operations, the message each sends or receives."""
    sent: dict[Message, Send] = {}
    received: dict[Message, Recv] = {}
    numbers: list[list[Message | None]] = []
    for plan in plans:
        count: defaultdict[tuple[int, int], int] = defaultdict(int)
        beside: list[Message | None] = []
        for operation in plan.operations:
            if isinstance(operation, Local):
                beside.append(None)
                continue
            outward = isinstance(operation, Send)
            pair = (plan.rank, operation.peer) if outward else (operation.peer, plan.rank)
            message = (*pair, count[pair])
            count[pair] += 1
            beside.append(message)
            if isinstance(operation, Send):
                sent[message] = operation
            else:
                received[message] = operation
        numbers.append(beside)
    _match(plans[0], sent, received)
    return numbers


def _match(plan: Plan, sent: dict[Message, Send], received: dict[Message, Recv]) -> None:
    for source, target, number in sorted(sent.keys() ^ received.keys()):
        raise _fail(plan, "pairing", f"message {number} from {source} to {target} is not both sent and received")
    for message, send in sent.items():
        recv = received[message]
        same_chunks = (
            send.hi - send.lo == recv.hi - recv.lo if plan.kind is Kind.ALL_TO_ALL else (send.lo, send.hi) == (recv.lo, recv.hi)
        )
        if not same_chunks or send.step != recv.step:
            raise _fail(plan, "pairing", f"rank {message[0]} sends {send}, which rank {message[1]} expects as {recv}")


# ---------------------------------------------------------------- expressions


class _Expressions:
    """Numbered expressions: equal (up to commutativity) if and only if equally numbered."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._numbers: dict[tuple[int, int], int] = {}
        self.masks: list[int] = []  # whose contributions, one bit per rank
        self.chunks: list[int] = []  # of which chunk

    def symbol(self, rank: int, chunk: int) -> int:
        return self._new((-1 - rank, chunk), 1 << rank, chunk)

    def add(self, a: int, b: int) -> int:
        key = (a, b) if a <= b else (b, a)
        known = self._numbers.get(key)
        if known is not None:
            return known
        if self.chunks[a] != self.chunks[b]:
            raise _fail(self._plan, "once", f"chunk {self.chunks[a]} is added to chunk {self.chunks[b]}")
        twice = self.masks[a] & self.masks[b]
        if twice:
            rank = twice.bit_length() - 1
            raise _fail(self._plan, "once", f"chunk {self.chunks[a]} of rank {rank} is added a second time")
        return self._new(key, self.masks[a] | self.masks[b], self.chunks[a])

    def _new(self, key: tuple[int, int], mask: int, chunk: int) -> int:
        number = self._numbers.setdefault(key, len(self.masks))
        if number == len(self.masks):
            self.masks.append(mask)
            self.chunks.append(chunk)
        return number


_UNDEFINED = -1


# ---------------------------------------------------------------- execution


@dataclass(slots=True)
class _Parcel:
    values: list[int]
    entered: int  # barrier: the ranks whose entry this message tells of


class _Rank:
    """One rank's buffers, and for each chunk the round in which its value became known."""

    def __init__(self, plan: Plan, expressions: _Expressions) -> None:
        chunks = range(plan.num_chunks)
        self.values = [[expressions.symbol(plan.rank, chunk) for chunk in chunks], [_UNDEFINED] * plan.num_chunks]
        self.known = [[-1] * plan.num_chunks, [-1] * plan.num_chunks]
        self.entered = 1 << plan.rank
        self.heard = -1  # the last round of an empty receive
        self.pending = deque(range(len(plan.operations)))


class _World:
    """All ranks' plans under execution."""

    def __init__(self, plans: Sequence[Plan], numbers: list[list[Message | None]]) -> None:
        self.plans = plans
        self.expressions = _Expressions(plans[0])
        self.ranks = [_Rank(plan, self.expressions) for plan in plans]
        self._numbers = numbers
        self._travelling: dict[Message, _Parcel] = {}

    def run(self) -> None:
        """Let every rank go as far as it can, until all are done or none can move.

        Ranks go in plain program order while that gets anyone further, which is quick; only when all are held up do
        operations overtake blocked ones.
        """
        while any([self._go_on(plan) for plan in self.plans]) or any([self._overtake(plan) for plan in self.plans]):
            pass
        for plan, rank in zip(self.plans, self.ranks, strict=True):
            if rank.pending:
                stuck = plan.operations[rank.pending[0]]
                raise _fail(plan, "no deadlock", f"rank {plan.rank} waits for ever at {stuck}")

    def _go_on(self, plan: Plan) -> bool:
        """Carry out operations in program order up to a message that is not there; whether there were any."""
        rank, operations, numbers = self.ranks[plan.rank], plan.operations, self._numbers[plan.rank]
        before = len(rank.pending)
        while rank.pending:
            index = rank.pending[0]
            if isinstance(operations[index], Recv) and numbers[index] not in self._travelling:
                break
            self._carry_out(plan, rank, operations[index], numbers[index])
            rank.pending.popleft()
        return len(rank.pending) < before

    def _overtake(self, plan: Plan) -> bool:
        """Carry out whatever shares no chunk with a blocked operation before it; whether there was anything."""
        rank, operations, numbers = self.ranks[plan.rank], plan.operations, self._numbers[plan.rank]
        blocked: set[tuple[int, int]] = set()
        left: deque[int] = deque()
        for index in rank.pending:
            operation = operations[index]
            waits = isinstance(operation, Recv) and numbers[index] not in self._travelling
            if waits or not blocked.isdisjoint(_touched(operation)):
                blocked.update(_touched(operation))
                left.append(index)
            else:
                self._carry_out(plan, rank, operation, numbers[index])
        moved = len(left) < len(rank.pending)
        rank.pending = left
        return moved

    def _carry_out(self, plan: Plan, rank: _Rank, operation: Operation, message: Message | None) -> None:
        if isinstance(operation, Local):
            self._local(plan, rank, operation)
        elif isinstance(operation, Send):
            assert message is not None
            self._travelling[message] = self._send(plan, rank, operation)
        else:
            assert message is not None
            self._receive(plan, rank, operation, self._travelling.pop(message))

    def _send(self, plan: Plan, rank: _Rank, send: Send) -> _Parcel:
        known = rank.known[send.buffer][send.lo : send.hi]
        latest = max(known) if known else rank.heard
        if latest >= send.step:
            raise _fail(plan, "rounds", f"rank {plan.rank}, {send} sends what arrives in step {latest} only")
        return _Parcel(self._read(plan, rank, send.buffer, send.lo, send.hi), rank.entered)

    def _receive(self, plan: Plan, rank: _Rank, recv: Recv, parcel: _Parcel) -> None:
        if recv.lo == recv.hi:
            rank.entered |= parcel.entered
            rank.heard = max(rank.heard, recv.step)
        self._write(plan, rank, recv.buffer, recv.lo, parcel.values, [recv.step] * len(parcel.values), recv.add)

    def _local(self, plan: Plan, rank: _Rank, local: Local) -> None:
        values = self._read(plan, rank, local.source, local.lo, local.hi)
        known = rank.known[local.source][local.lo : local.hi]
        self._write(plan, rank, local.target, local.lo, values, known, local.add)

    def _read(self, plan: Plan, rank: _Rank, buffer: Buffer, lo: int, hi: int) -> list[int]:
        values = rank.values[buffer][lo:hi]
        if _UNDEFINED in values:
            raise _fail(plan, "definedness", f"rank {plan.rank} reads chunks {lo}..{hi} of WORK before writing them")
        return values

    def _write(self, plan: Plan, rank: _Rank, buffer: Buffer, lo: int, values: list[int], known: list[int], add: bool) -> None:
        held, since = rank.values[buffer], rank.known[buffer]
        if add:
            before = self._read(plan, rank, buffer, lo, lo + len(values))
            values = [self.expressions.add(a, b) for a, b in zip(before, values, strict=True)]
            known = [max(a, b) for a, b in zip(since[lo : lo + len(values)], known, strict=True)]
        held[lo : lo + len(values)] = values
        since[lo : lo + len(values)] = known


def _touched(operation: Operation) -> list[tuple[int, int]]:
    """The chunks an operation reads or writes; empty operations share one place of their own."""
    if operation.lo == operation.hi:
        return [(-1, 0)]
    buffers = (operation.source, operation.target) if isinstance(operation, Local) else (operation.buffer,)
    return [(buffer, chunk) for buffer in buffers for chunk in range(operation.lo, operation.hi)]


# ---------------------------------------------------------------- what each kind promises


def _promise(plan: Plan, rank: int, chunk: int) -> str | tuple[int, int] | None:
    """What a rank's chunk is in the end: SUM, (source, chunk of the source) or, where nothing is promised, None."""
    match plan.kind:
        case Kind.ALL_REDUCE:
            return SUM
        case Kind.REDUCE:
            return SUM if rank == plan.root else None
        case Kind.REDUCE_SCATTER:
            return SUM if rank == chunk else None
        case Kind.BROADCAST:
            return plan.root, chunk
        case Kind.ALL_GATHER:
            return chunk, chunk
        case Kind.GATHER:
            return (chunk, chunk) if rank == plan.root else None
        case Kind.SCATTER:
            return (plan.root, rank) if rank == chunk else None
        case Kind.ALL_TO_ALL:
            return chunk, rank
        case Kind.BARRIER:
            return None


def _check_promises(plan: Plan, world: _World) -> None:
    for chunk in range(plan.num_chunks):
        sums: dict[int, int] = {}  # expression -> a rank that ends with it
        for rank in range(plan.size):
            match _promise(plan, rank, chunk):
                case (int(source), int(source_chunk)):
                    _check_symbol(plan, world, rank, chunk, source, source_chunk)
                case str():
                    sums.setdefault(_check_sum(plan, world, rank, chunk), rank)
        if len(sums) > 1:
            one, other = list(sums.values())[:2]
            raise _fail(plan, "bits", f"ranks {one} and {other} add chunk {chunk} in different orders")
    if plan.kind is Kind.BARRIER:
        for rank, state in enumerate(world.ranks):
            missing = [r for r in range(plan.size) if not state.entered >> r & 1]
            if missing:
                raise _fail(plan, "promise", f"rank {rank} may leave before ranks {missing} have entered")


def _check_sum(plan: Plan, world: _World, rank: int, chunk: int) -> int:
    """The rank's chunk is the sum of all contributions; returns its expression."""
    number = world.ranks[rank].values[Buffer.DATA][chunk]
    missing = ((1 << plan.size) - 1) & ~world.expressions.masks[number]
    if missing or world.expressions.chunks[number] != chunk:
        lacking = [r for r in range(plan.size) if missing >> r & 1]
        raise _fail(plan, "promise", f"rank {rank} ends with a chunk {chunk} that lacks the ranks {lacking}")
    return number


def _check_symbol(plan: Plan, world: _World, rank: int, chunk: int, source: int, source_chunk: int) -> None:
    """The rank's chunk is x_source[source_chunk], untouched."""
    if world.ranks[rank].values[Buffer.DATA][chunk] != world.expressions.symbol(source, source_chunk):
        raise _fail(plan, "promise", f"rank {rank} ends with a chunk {chunk} that is not chunk {source_chunk} of rank {source}")
