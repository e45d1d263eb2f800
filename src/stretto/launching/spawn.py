"""`stretto.launch(fn, n, *args)`: a job inside a program, for notebooks and tests.

`fn(*args)` runs in n fresh processes, each with the environment of a worker; the results come back as a list by rank.

How the processes are made (`start_method`):
- "spawn": a new interpreter imports the function by name. The default: it is safe whatever this process has done
  before.
- "fork": a copy of this process. The default only for a function typed into an interactive session (a notebook, the
  prompt), which no other interpreter could import. Fork copies no threads, and a pool whose threads are missing waits
  for ever: so a forked worker computes with one torch thread, and forking is refused once CUDA is initialised. The same
  goes for autograd's own threads: torch starts them with the first backward where it sees a GPU, and elsewhere when
  checkpoints are nested very deeply. A fork made later can compute but not run a backward; torch raises there, and we
  add what to do. The function runs in an empty context (`contextvars`), so a job that this process is in, or has left,
  is none of the worker's.

Arguments and results are pickled, which is safe here and nowhere else: they travel between this process and its own
children over a pipe that no one else can open, never over a network or through a file. Tensors travel by value.

Nobody is left behind: each worker leads a session and a process group of its own. Whichever way the call ends, the
group is killed; if this whole process is killed, the kernel's parent-death signal ends the worker and a guard
(`spawn_guard.py`) its children.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

from stretto.errors import BackwardFailed, ConfigurationError, FrameError, JobError, PeerLost, WireTimeout, WorkerFailed
from stretto.launching import coordinator_process, hosts, launch_plan, secret
from stretto.launching.detect import switch
from stretto.launching.launch_report import how_it_ended
from stretto.launching.supervisor import end_with_parent

R = TypeVar("R")
StartMethod = Literal["spawn", "fork"]

GUARD = Path(__file__).with_name("spawn_guard.py")
READY_S = 30.0
ACCUSED_S = 1.0  # how long a worker lost to `PeerLost` waits for the peer it accuses to confess: see launch_report
END_S = 2.0
LAST_WORD_S = 1.0
GO = b"go"
NO_BACKWARD_IN_A_FORK = (
    "\nThe process that called launch has run a backward, for which torch has started threads there. The workers are copies of "
    "that process without its threads, because the function was typed into it, and cannot run a backward of their own.\n"
    "Put the function into a module and import it (in a notebook: a cell that begins with %%writefile work.py, then "
    "from work import ...), or restart the kernel and call launch before its first backward."
)

_environment_lock = threading.Lock()  # two launches from two threads must not see each other's variables


def _make_environment_lock_anew() -> None:
    """A worker is forked while its launch holds the lock, and nobody in the worker would ever release that copy."""
    global _environment_lock
    _environment_lock = threading.Lock()


os.register_at_fork(after_in_child=_make_environment_lock_anew)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How one worker ended: `ok` with its result, or the reason why not, with the traceback if it could still speak."""

    ok: bool
    result: Any = None
    reason: str = ""
    traceback: str = ""
    accuses_a_peer: bool = False


@dataclass(frozen=True, slots=True)
class _Worker:
    rank: int
    pid: int
    process: BaseProcess
    pipe: Connection


def launch(
    fn: Callable[..., R], n: int, *args: Any, timeout_s: float = 600.0, start_method: StartMethod | None = None
) -> list[R]:
    """Run `fn(*args)` in `n` workers and return their results by rank.

    The first worker to fail ends all others and is raised here as `WorkerFailed`, with its rank and its traceback as
    text. Workers that are not done after `timeout_s` seconds are killed, and `JobError` names them.
    """
    _check(fn, n, timeout_s)
    method = start_method or _fitting_method(fn)
    if method == "fork":
        _refuse_fork_after_cuda(fn)
    work: Any = _packed(fn, args) if method == "spawn" else (fn, args)
    deadline = time.monotonic() + timeout_s
    job_secret = secret.generate()
    encrypted = switch(os.environ, "STRETTO_ENCRYPT", default=False)
    with _coordinator(n, job_secret, encrypted) as rendezvous, _guard() as guard:
        workers: list[_Worker] = []
        try:
            for variables in _variables(n, rendezvous, job_secret, encrypted):
                workers.append(_start(method, variables, work, guard))
                os.write(guard, b"%d\n" % workers[-1].pid)
                with contextlib.suppress(BrokenPipeError):  # it has died already: `_gather` says how
                    workers[-1].pipe.send_bytes(GO)  # not before: what it starts is found by the guard only
            results = _gather(workers, deadline, timeout_s)
            _let_go(workers)
            return results
        finally:
            _end(workers)


def _check(fn: Callable[..., Any], n: int, timeout_s: float) -> None:
    if not callable(fn):
        raise ConfigurationError(
            f"launch({fn!r}, {n}): the first argument is what each worker runs, and this cannot be called.\n"
            f"Write launch(function, n, *arguments), without calling the function."
        )
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigurationError(f"launch(fn, {n!r}): the number of workers is a whole number from 1 on, such as 2.")
    if not 0 < timeout_s < math.inf:
        raise ConfigurationError(
            f"launch(timeout_s={timeout_s!r}): a timeout is a positive number of seconds; nothing in stretto waits for ever.\n"
            f"Write for instance launch(..., timeout_s=3600)."
        )


def _fitting_method(fn: Callable[..., Any]) -> StartMethod:
    """Fork exactly where spawn cannot work: `fn` is in `__main__`, and no file stands behind it."""
    if getattr(fn, "__module__", None) != "__main__":
        return "spawn"
    main_file = getattr(sys.modules["__main__"], "__file__", "")
    source = getattr(getattr(fn, "__code__", None), "co_filename", main_file)
    return "spawn" if source and os.path.isfile(source) else "fork"


def _packed(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps((fn, tuple(args)))
    except Exception as problem:
        raise ConfigurationError(
            f"launch({_name(fn)}, ...): a new interpreter cannot be given this function and its arguments: {problem}.\n"
            f"Define the function at the top level of a module and pass plain values, or write "
            f'launch(..., start_method="fork") if neither CUDA nor threads are in use yet.'
        ) from problem


def _refuse_fork_after_cuda(fn: Callable[..., Any]) -> None:
    torch = sys.modules.get("torch")  # not imported: then CUDA is not initialised either
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigurationError(
            f"launch({_name(fn)}, ...) has to fork, because the function is defined in an interactive session or fork "
            f"was asked for; but CUDA is initialised in this process, and no forked process can use it then.\n"
            f"Put the function into a module and import it, or restart and launch before touching CUDA."
        )


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", fn))


def _variables(n: int, rendezvous: tuple[str, int], job_secret: bytes, encrypted: bool) -> list[dict[str, str]]:
    master_port = launch_plan.free_port()
    defaults = launch_plan.torch_defaults(n, launch_plan.gloo_interface(None, os.environ))
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    return [
        unset
        | {"STRETTO_SERVERS": ""}  # another job's, which this process may be in
        | launch_plan.job_variables(
            rank=rank,
            world_size=n,
            local_rank=rank,
            local_world_size=n,
            rendezvous=rendezvous,
            master_port=master_port,
            secret=job_secret,
            encrypt=encrypted,
        )
        for rank in range(n)
    ]


@contextlib.contextmanager
def _coordinator(n: int, job_secret: bytes, encrypted: bool) -> Iterator[tuple[str, int]]:
    """A coordinator on the loopback address, for as long as the block lasts."""
    process, address = coordinator_process.start(
        hosts.join_address(launch_plan.LOOPBACK, 0),
        n,
        job_secret,
        os.environ,
        encrypted=encrypted,
        deadline=time.monotonic() + READY_S,
        new_session=True,  # Ctrl-C is ours to hear
    )
    try:
        yield hosts.split_address(address)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _guard() -> Iterator[int]:
    """Write the groups to be killed at our death to this descriptor, one a line."""
    guard_stdin, guard = os.pipe()
    try:
        command = [sys.executable, "-I", "-S", str(GUARD)]
        process = subprocess.Popen(command, stdin=guard_stdin, stdout=subprocess.DEVNULL, start_new_session=True)
    finally:
        os.close(guard_stdin)
    try:
        yield guard
    finally:
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard; nothing is left for it to do
            os.write(guard, b"done\n")
        os.close(guard)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:  # the machine stands still; the guard has nothing left to do
            process.kill()
            process.wait()


def _start(method: StartMethod, variables: dict[str, str], work: Any, guard: int) -> _Worker:
    context = multiprocessing.get_context(method)
    pipe, child_pipe = context.Pipe()
    not_yours = [guard] if method == "fork" else []  # spawned children inherit no descriptor they are not given
    process = context.Process(  # type: ignore[attr-defined]  # typeshed: BaseContext has it, only not in the union
        target=_worker_main, args=(variables, work, child_pipe, not_yours, os.getpid()), daemon=False
    )
    with _environment(variables), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on fork among threads: see the module's text
        process.start()
    child_pipe.close()
    assert process.pid is not None  # it has been started
    return _Worker(int(variables["RANK"]), process.pid, process, pipe)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Ours for a moment: what a spawned interpreter imports first (torch) reads it before we could set it there."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _gather(workers: Sequence[_Worker], deadline: float, timeout_s: float) -> list[Any]:
    arrivals: queue.Queue[tuple[int, bytes | None]] = queue.Queue()
    for worker in workers:  # only now: no thread of ours is there to be lost in a fork
        threading.Thread(target=_receive, args=(worker, arrivals), daemon=True).start()
    results: dict[int, Any] = {}
    failures: list[WorkerFailed] = []
    accused_until: float | None = None
    while len(results) < len(workers):
        limit = deadline if accused_until is None else min(deadline, accused_until)
        arrival = _next(workers, arrivals, {*results, *(failure.rank for failure in failures)}, limit)
        if arrival is None:
            raise failures[0] if failures else _too_late(workers, results, timeout_s)
        rank, outcome = arrival
        if outcome.ok:
            results[rank] = outcome.result
            continue
        failures.append(WorkerFailed(rank, outcome.reason, outcome.traceback))
        if not outcome.accuses_a_peer:
            raise failures[-1]
        accused_until = accused_until or time.monotonic() + ACCUSED_S
    return [results[rank] for rank in range(len(workers))]


def _receive(worker: _Worker, arrivals: queue.Queue[tuple[int, bytes | None]]) -> None:
    try:
        arrivals.put((worker.rank, worker.pipe.recv_bytes()))
    except (EOFError, OSError):
        arrivals.put((worker.rank, None))


def _next(
    workers: Sequence[_Worker], arrivals: queue.Queue[tuple[int, bytes | None]], heard: set[int], limit: float
) -> tuple[int, _Outcome] | None:
    """The next worker to end, or None at the time limit. A dead one whose child holds the pipe open is noticed too."""
    ended_before: set[int] = set()
    while True:
        wait_s = min(0.1, limit - time.monotonic())
        try:
            # One that has just ended may have sent its result: give the thread that reads it the time to hand it over.
            rank, message = arrivals.get(timeout=LAST_WORD_S if ended_before else max(0.0, wait_s))
        except queue.Empty:
            silent = [w for w in workers if w.rank not in heard and w.process.exitcode is not None]
            known = [worker for worker in silent if worker.rank in ended_before]
            if known:
                return known[0].rank, _died(known[0])
            ended_before = {worker.rank for worker in silent}
            if time.monotonic() >= limit and not silent:  # a worker that has ended just now is asked once more
                return None
            continue
        if rank not in heard:
            return rank, pickle.loads(message) if message is not None else _died(workers[rank])


def _died(worker: _Worker) -> _Outcome:
    worker.process.join(END_S)
    code = worker.process.exitcode
    ended = how_it_ended(code) if code is not None else "closed its pipe"
    return _Outcome(False, reason=f"its process {ended} without a result")


def _too_late(workers: Sequence[_Worker], results: dict[int, Any], timeout_s: float) -> JobError:
    missing = ", ".join(str(worker.rank) for worker in workers if worker.rank not in results)
    return JobError(
        f"launch: not done after timeout_s={timeout_s:g} seconds: rank {missing}. These workers were killed.\n"
        f"They are slow or wait for each other; look with py-spy dump while it runs, or give launch a longer timeout_s."
    )


def _let_go(workers: Sequence[_Worker]) -> None:
    """Workers that have delivered may say goodbye (exit handlers) in peace, within bounds."""
    deadline = time.monotonic() + END_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))


def _end(workers: Sequence[_Worker]) -> None:
    """Whatever still runs, and every child it has, is killed; everything is released."""
    for worker in workers:
        worker.process.kill()  # it may not lead a group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
    for worker in workers:
        worker.process.join(END_S)
        worker.pipe.close()


def _worker_main(variables: dict[str, str], work: Any, pipe: Connection, not_ours: Sequence[int], parent: int) -> None:
    """In the worker: run the function, send how it ended."""
    for descriptor in not_ours:
        os.close(descriptor)  # else the guard would not meet end-of-file while we live
    os.setsid()
    end_with_parent(parent)
    try:
        pipe.recv_bytes()
    except EOFError:
        os._exit(1)  # the parent has died, or given up, before the guard knew of this worker
    os.environ.update(variables)
    if "torch" in sys.modules and not isinstance(work, bytes):  # forked
        sys.modules["torch"].set_num_threads(1)
    pipe.send_bytes(_message(_outcome(work)))


def _outcome(work: Any) -> _Outcome:
    try:
        fn, args = pickle.loads(work) if isinstance(work, bytes) else work
        return _Outcome(True, result=contextvars.Context().run(fn, *args))
    except SystemExit as exit_:
        if not exit_.code:
            return _Outcome(True)
        return _Outcome(False, reason=f"it called sys.exit({exit_.code!r})", traceback=traceback.format_exc())
    except BaseException as problem:
        sys.last_value = problem  # as the interpreter does before it exits: what leaves at exit then leaves without a goodbye
        accuses = isinstance(problem, (PeerLost, WireTimeout, FrameError, BackwardFailed))
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        if isinstance(problem, RuntimeError) and "fork-based multiprocessing" in str(problem):
            reason += NO_BACKWARD_IN_A_FORK
        return _Outcome(False, reason=reason, traceback=traceback.format_exc(), accuses_a_peer=accuses)


def _message(outcome: _Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as problem:
        reason = f"its result, a {type(outcome.result).__name__}, cannot be sent back: {problem}"
        return pickle.dumps(_Outcome(False, reason=reason, traceback=traceback.format_exc()))
