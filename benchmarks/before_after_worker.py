"""One worker of `before_after.py`: python benchmarks/before_after_worker.py SOCKET, started once per rank with the library of one
of the two trees. It does what it is told, so many times, when it is told, and says how long that took.

    <- {"case": "step, gpt", "times": 20}        from the driver, to all workers of a job at once
    -> {"seconds": 0.0031}                       per time, on this rank, from a barrier on

Only public names that both trees have are used here.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable

import torch
from step_models import workloads

import stretto

WARM_UP = 3
Action = Callable[[], object]


BUCKETS = "Buckets(bytes=4194304, first_bytes=1048576)"  # as in `compress_step.py`


def a_compressed_step(codec: str) -> Action:
    return a_step("gpt", f"Strategy(compress={codec}, schedule={BUCKETS})")


def a_step(model: str, strategy: str | None = None) -> Action:
    workload = workloads()[model]
    torch.manual_seed(0)
    core = workload.model()
    optimizer = torch.optim.SGD(core.parameters(), lr=1e-3)
    stretto.distribute(core, optimizer, strategy)
    torch.manual_seed(1 + stretto.rank())
    batch = workload.batch()

    def step() -> None:
        torch.autograd.backward(workload.loss(core, batch))
        optimizer.step()
        optimizer.zero_grad()

    return step


def an_all_reduce(num_bytes: str) -> Action:
    tensor = torch.ones(int(num_bytes) // 4)
    return lambda: stretto.all_reduce(tensor)


def in_pairs(num_bytes: str) -> Action:
    """For `groups.py`: workers 0 and 1, 2 and 3, ... each among themselves."""
    tensor = torch.ones(int(num_bytes) // 4)
    pair = stretto.split(stretto.rank() // 2)
    assert pair is not None
    return lambda: stretto.all_reduce(tensor, algorithm="ring", group=pair)


MAKERS: dict[str, Callable[[str], Action]] = {
    "step": a_step,
    "compressed": a_compressed_step,
    "all-reduce": an_all_reduce,
    "pairs": in_pairs,
}


def main(path: str) -> None:
    torch.set_num_threads(1)
    stretto.init()
    actions: dict[str, Action] = {}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        file = connection.makefile("rw")

        def say(said: dict[str, object]) -> None:
            file.write(json.dumps(said) + "\n")
            file.flush()

        say({"library": stretto.__file__})
        for line in file:
            asked = json.loads(line)
            case = asked["case"]
            if case not in actions:
                kind, _, which = case.partition(", ")
                actions[case] = MAKERS[kind](which)
                for _ in range(WARM_UP):
                    actions[case]()
            action = actions[case]
            stretto.barrier()
            begin = time.perf_counter()
            for _ in range(asked["times"]):
                action()
            say({"seconds": (time.perf_counter() - begin) / asked["times"]})
    stretto.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
