"""Everything stretto raises, as one tree.

    StrettoError
    ├── ConfigurationError (ValueError)     what was asked cannot work; raised before anything is sent
    ├── JobError                            the job could not be formed
    │   ├── RendezvousError                 nobody (or a stranger) answers at the rendezvous
    │   ├── UnreachableError                a worker publishes an address others cannot reach
    │   ├── SecretError                     missing, malformed or wrong job secret
    │   └── WorkerFailed (.rank)            a function run by stretto.launch raised, or its process died
    ├── CheckpointError                     a checkpoint could not be written, or is damaged, or is of another model
    ├── NonFiniteGradient (.found)          NaN or infinity in a gradient (with check_finite=True)
    ├── BackwardFailed (.ranks)             backward ended in an exception on other workers, so there is no combined gradient
    ├── StageFailed (.rank, .stage)         a stage of a pipeline ended in an exception on another worker
    ├── MalformedPayload                    bytes that no encoder of that codec writes (from a peer: FrameError, with its rank)
    └── WireError (RuntimeError)            something went wrong between running workers
        ├── PeerLost (.rank)                that worker died, was stopped, left, or its link is cut
        ├── WireTimeout (.rank, .tag)       that worker is alive but did not arrive before the deadline
        ├── FrameError (.rank)              that worker sent something that is not a valid frame
        └── RankMismatch                    ranks asked for different collectives

Every message has three parts: what was asked, why it cannot work, what to do instead.
"""

from __future__ import annotations


class StrettoError(Exception):
    """Base of everything this library raises on purpose."""


class ConfigurationError(StrettoError, ValueError):
    """A value that cannot work, found before any communication."""


class JobError(StrettoError):
    """The job could not be formed."""


class RendezvousError(JobError):
    """The coordinator cannot be reached, or did not answer in time."""


class UnreachableError(JobError):
    """A worker's published address does not answer."""


class SecretError(JobError):
    """The job secret is missing, malformed or wrong."""


class WorkerFailed(JobError):
    """A worker of `stretto.launch` failed: the first one to do so, with its traceback as text."""

    def __init__(self, rank: int, reason: str, traceback: str = "") -> None:
        super().__init__(f"rank {rank} failed first: {reason}" + (f"\n\n{traceback.rstrip()}" if traceback else ""))
        self.rank = rank
        self.reason = reason
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[WorkerFailed], tuple[int, str, str]]:
        return WorkerFailed, (self.rank, self.reason, self.traceback)


class CheckpointError(StrettoError):
    """A checkpoint that could not be written or read, on any rank; all ranks raise it. Nothing was overwritten or loaded."""


class NonFiniteGradient(StrettoError):
    """NaN or infinity in a combined gradient. `found`: for each rank that produced one, the first parameter it was in.

    `own`: what is not finite, where no `GradScaler` would skip the step: "a gradient" or "a weight" of a worker with a model of
    its own, or an average that comes late."""

    def __init__(self, found: dict[int, str], own: str = "") -> None:
        where = ", ".join(f"rank {rank} in {name!r}" for rank, name in sorted(found.items()))
        instead = "Lower the learning rate or the loss scale, or leave check_finite off to let GradScaler skip such steps."
        if own:
            instead = "Lower the learning rate or clip gradients, and go on from a saved state (stretto.load)."
        where = where or ("not by this worker's" if own else "no worker alone; the sum overflowed")
        super().__init__(f"{own or 'a gradient'} is not finite: {where}.\n{instead}")
        self.found, self._own = found, own

    def __reduce__(self) -> tuple[type[NonFiniteGradient], tuple[dict[int, str], str]]:
        return NonFiniteGradient, (self.found, self._own)


class BackwardFailed(StrettoError):
    """Another worker's backward ended in an exception. All workers have lost the gradients of this round, and none may step."""

    def __init__(self, ranks: list[int]) -> None:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        super().__init__(
            f"backward ended in an exception on {who}, so its gradients are missing and none were combined.\n"
            f"See what {who} raised. To go on without this batch, catch the error on every worker and take the next one: all "
            f"replicas are still equal."
        )
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[BackwardFailed], tuple[list[int]]]:
        return BackwardFailed, (self.ranks,)


class StageFailed(StrettoError):
    """A stage of a pipeline ended in an exception on another worker. The pipeline has ended on all workers."""

    def __init__(self, rank: int, stage: int, what: str, reason: str) -> None:
        super().__init__(
            f"rank {rank}, stage {stage} of the pipeline, failed in {what}: {reason}\n"
            f"Other stages may have stepped already, so nobody goes on: see what rank {rank} raised, and begin again from the "
            f"last checkpoint."
        )
        self.rank = rank
        self.stage = stage
        self.what = what
        self.reason = reason

    def __reduce__(self) -> tuple[type[StageFailed], tuple[int, int, str, str]]:
        return StageFailed, (self.rank, self.stage, self.what, self.reason)


class MalformedPayload(StrettoError):
    """Bytes that no encoder of that codec writes: a wrong length, a reserved code, a scale that is not finite, ..."""


class WireError(StrettoError, RuntimeError):
    """A failure between running workers. A RuntimeError too, as those of torch.distributed are, for programs that catch these."""


class PeerLost(WireError):
    """A peer is gone: it died, was stopped, said goodbye or its link is cut."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason}")
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type[PeerLost], tuple[int, str]]:
        return PeerLost, (self.rank, self.reason)


class WireTimeout(WireError):
    """A peer is alive (its heartbeat answers) but what was waited for did not come in time. `doing`: what it does instead."""

    def __init__(self, rank: int, tag: str, waited_s: float, doing: str = "") -> None:
        unknown = (
            f"Its process still answers heartbeats, so it is busy, blocked or in another part of the program.\n"
            f"Find out what rank {rank} is doing (py-spy dump), or allow more time: "
            f"stretto.init(timeouts=Timeouts(arrive_s=...))."
        )
        super().__init__(f"rank {rank} did not take part in {tag} within {waited_s:g} s. {doing or unknown}")
        self.rank = rank
        self.tag = tag
        self.waited_s = waited_s
        self.doing = doing

    def __reduce__(self) -> tuple[type[WireTimeout], tuple[int, str, float, str]]:
        return WireTimeout, (self.rank, self.tag, self.waited_s, self.doing)


class FrameError(WireError):
    """A peer sent bytes that are not what the protocol or the plan says must come."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(f"rank {rank} sent a bad frame: {problem}")
        self.rank = rank
        self.problem = problem

    def __reduce__(self) -> tuple[type[FrameError], tuple[int, str]]:
        return FrameError, (self.rank, self.problem)


class RankMismatch(WireError):
    """Ranks called different collectives, or the same one with different sizes, dtypes or options."""
