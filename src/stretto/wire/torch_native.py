"""The torch backend's own all-reduce: a blocking call for the thread that drives the wire, which goes on moving everything else.

All ranks agree on a description first (`agreement.py`), so different sizes, dtypes or operations are a `RankMismatch` on every
rank; left to itself gloo would end the process. Then the backend runs, while the loop looks after heartbeats: a rank that is
lost meanwhile ends the call with `PeerLost` within the time the inner wire needs to notice, and the group with it.
When one fails midway, its tensor holds neither the input nor the result.

NCCL path: native only; run with world size 1 on an H200, never with two or more ranks, and its failures never.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final, NoReturn

import torch
import torch.distributed as dist

from stretto.errors import ConfigurationError, StrettoError, WireError
from stretto.wire.agreement import Agreement
from stretto.wire.base import Wire
from stretto.wire.torch_works import GroupWorks

GRACE_S: Final = 2.0  # for the inner wire to find who is lost, after the group has failed without a name
SPIN_S: Final = 2e-3
REDUCE_OPS: Final = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
GLOO_LACKS: Final = (torch.int16,)

GivenUp = Callable[[], StrettoError | None]


class NativeCollectives:
    """See the module's text. `sequence` numbers them alike on all ranks."""

    def __init__(self, wire: Wire, works: GroupWorks, topic: int) -> None:
        self._wire = wire
        self._works = works
        self._agreement = Agreement(wire, topic)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str,
        sequence: int,
        timeout_s: float,
        stream: torch.cuda.Stream | None = None,
        *,
        label: str = "",
        given_up: GivenUp = lambda: None,
    ) -> None:
        """All-reduce in place by the backend. op: "sum", "mean", "min", "max" or "product".

        CUDA: it runs in the order of `stream`, by default the device's default stream. Give the one that wrote the tensor.
        `label` is compared between ranks; `given_up` says why not all ranks will come, once somebody knows that.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        size = self._wire.world_size
        what = f"all_reduce({dtype}[{tensor.numel()}], op={op}, algorithm=native, world_size={size}){label}"
        objection = self._objection(tensor, op)
        if objection is not None:
            self._agreement.fail(sequence, objection)
            raise objection
        deadline = self._wire.now() + timeout_s
        self._agreement.reach(sequence, what, timeout_s, given_up)
        if not tensor.numel():
            return
        if tensor.device.type == "cuda":
            with torch.cuda.stream(stream or torch.cuda.default_stream(tensor.device)):
                self._carry_out(what, tensor.detach(), op, deadline)
        else:
            self._carry_out(what, tensor.detach(), op, deadline)

    def _objection(self, tensor: torch.Tensor, op: str) -> StrettoError | None:
        """Why the backend cannot do it, found before anything is sent."""
        if self._wire.lost:
            return next(iter(self._wire.lost.values()))
        dtype = tensor.dtype
        if op not in REDUCE_OPS:
            return ConfigurationError(f"op={op!r} is not known. Write one of {', '.join(map(repr, REDUCE_OPS))}.")
        if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            return ConfigurationError(f"op='mean' of {dtype} tensors is not a {dtype}. Use op='sum', or a floating-point type.")
        if self._works.backend == "nccl" and tensor.device.type != "cuda":
            return ConfigurationError(
                f"a tensor on {tensor.device} cannot go through NCCL, which moves CUDA memory only.\n"
                f"Move it with .cuda(), or use another algorithm than 'native', or the gloo backend."
            )
        if dtype.is_complex and op in ("min", "max", "product"):
            return ConfigurationError(f"op={op!r} of {dtype}: torch backends only sum or average complex numbers.")
        if self._works.backend == "gloo" and dtype in GLOO_LACKS:
            return ConfigurationError(f"gloo has no collective for {dtype}. Use an algorithm of stretto's, or another dtype.")
        if self._works.broken is not None:
            return WireError(
                f"the {self._works.backend} group is broken ({self._works.broken}), and the backend cannot repair one.\n"
                f"Use another algorithm than 'native': it goes through stretto's own wire now. Or restart the job."
            )
        return None

    def _carry_out(self, what: str, tensor: torch.Tensor, op: str, deadline: float) -> None:
        flat = tensor.contiguous()
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[op]  # type: ignore[assignment]
        # The backend's own limit comes after ours, so that it is we who say what happened.
        options.timeout = timedelta(seconds=max(0.0, deadline - self._wire.now()) + GRACE_S)
        try:
            work = self._works.group.allreduce([flat], options)
        except RuntimeError as error:
            self._blame(what, str(error))
        if self._works.backend == "gloo":
            self._await_gloo(what, work, flat, deadline)
        else:
            self._await_in_stream(what, work, deadline)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)

    def _await_gloo(self, what: str, work: dist.Work, flat: torch.Tensor, deadline: float) -> None:
        outcome: list[str | None] = []
        self._works.watch(work, outcome.append)
        while not outcome:
            try:
                self._check_native(what, deadline)
            except WireError:
                self._works.keep(work, flat)
                raise
            self._wire.progress(min(1.0, max(0.0, deadline - self._wire.now())))
        if outcome[0] is not None:
            self._blame(what, outcome[0])

    def _await_in_stream(self, what: str, work: dist.Work, deadline: float) -> None:
        """NCCL: `wait` makes the stream wait, not us; whether it has happened can be polled."""
        work.wait()
        spin_until = self._wire.now() + SPIN_S
        while not work.is_completed():
            self._check_native(what, deadline)
            self._wire.progress(0.0 if self._wire.now() < spin_until else 1e-3)

    def _check_native(self, what: str, deadline: float) -> None:
        gone = next((error for rank, error in self._wire.lost.items() if not self._wire.said_goodbye(rank)), None)
        if gone is not None:
            self._works.break_off(str(gone))
            raise gone
        if self._wire.now() >= deadline:
            problem = f"{what} did not end in time"
            self._works.break_off(problem)
            raise WireError(
                f"{problem}: every rank had begun it, and {self._works.backend} does not say which of them holds it up.\n"
                f"Allow more time (stretto.init(timeouts=...)), or use another algorithm than 'native', which names the rank."
            )

    def _blame(self, what: str, problem: str) -> NoReturn:
        """The backend has failed and names no rank: whoever the inner wire finds lost in the next moments is the cause."""
        self._works.break_off(problem)
        until = self._wire.now() + GRACE_S
        while not self._wire.lost and self._wire.now() < until:
            self._wire.progress(0.05)
        if self._wire.lost:
            raise next(iter(self._wire.lost.values()))
        raise WireError(f"{what} failed in {self._works.backend}, and no rank is lost: {problem}")
