"""Tensors by name on parameter servers, which any worker changes and reads whenever it likes.

    stretto.declare("seen", torch.zeros(1000))    all workers together, once
    stretto.push("seen", counts)                  one worker, when it has something: it is added
    stretto.pull("seen")                          one worker: what all have pushed

These are no collectives, `declare` excepted: workers may push and pull as often as they like, in any order, from any thread.
`aggregate/parameter_server/store.py` says how it is done and what is guaranteed.
"""

from __future__ import annotations

from torch import Tensor

from stretto.aggregate.parameter_server import store
from stretto.aggregate.parameter_server.store import PushOp
from stretto.aggregate.parameter_server.value import ParameterServer
from stretto.api import current_job


def declare(key: str, tensor: Tensor, *, servers: ParameterServer | None = None) -> None:
    """Have servers keep a tensor under this name, beginning with rank 0's values. All workers of the job call it together.

    float32, float16 or bfloat16, of at most 1 GiB as float32, which is what the servers keep. `servers`: which ones, and with
    `replicas` how many copies. Left out: those that were started apart, or those of a model, else one process beside rank 0.
    A key lives as long as the job. A job of one worker keeps it itself.
    """
    job = current_job()
    job.check_usable()
    store.declare(job, key, tensor, servers)


def push(key: str, tensor: Tensor | float, op: PushOp = "add") -> None:
    """Add to what the servers have under this name, or put it in its place: op="assign". This worker alone calls it.

    Returns when every server that keeps it has it: then it is in exactly once, whoever dies, as long as one of these lives. What
    has another shape or dtype than was declared is refused; a number will do for a tensor without dimensions.
    """
    job = current_job()
    stored = store.find(job, "push", key)
    stored.push(store.as_pushed(stored, tensor, op, job.rank), op)


def pull(key: str) -> Tensor:
    """What the servers have under this name: a tensor of its own, with the shape, dtype and device that this worker declared.

    This worker alone calls it. All that was acknowledged to any worker before is in it.
    """
    return store.find(current_job(), "pull", key).pull()
