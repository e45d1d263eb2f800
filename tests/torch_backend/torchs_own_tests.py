"""Runs the tests that torch ships for its backends (`torch.testing._internal.distributed.distributed_test`) against one backend.

    python torchs_own_tests.py BACKEND AS WORLD_SIZE RESULTS [NAME ...]

They are imported as those of the backend AS, so that each test that it runs is run, whatever the backend: "gloo", or "mpi" for
what torch lets no other backend for CPUs try. Then they are pointed at BACKEND. Workers are forks of this process, which has
torch, instead of interpreters of their own. RESULTS gets a line of JSON for each test.

`passed_by_gloo.txt` is made again, for another version of torch, by this, where there is no GPU:

    python torchs_own_tests.py gloo gloo 4 results
    grep '"passed"' results | cut -d'"' -f4 > passed_by_gloo.txt
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
import time
import types
import unittest
from typing import Any

TEST_TIMEOUT_S = "60"


class TreatedAsGloo(str):
    """The name of a backend, which is equal to "gloo": tests ask for that name where they mean what a CPU backend can do."""

    def __eq__(self, other: object) -> bool:
        return other in ("gloo", str(self))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def load(backend: str, imported_as: str, world_size: int) -> type[unittest.TestCase]:
    """The class of the tests, for workers that are forks."""
    os.environ |= {"BACKEND": imported_as, "WORLD_SIZE": str(world_size), "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": TEST_TIMEOUT_S}
    os.environ.setdefault("TEMP_DIR", "/tmp")
    stand_in = types.ModuleType("expecttest")  # which torch's helpers import, and these tests do not use
    stand_in.__dict__["TestCase"] = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    import torch
    import torch._dynamo  # which the first optimizer imports, and takes as long as the rest of torch
    from torch.testing._internal.distributed import distributed_test

    import stretto  # noqa: F401  # registers the backend
    import stretto.torch_backend.joining  # noqa: F401  # forks have it

    distributed_test.BACKEND = TreatedAsGloo(backend)
    torch.set_num_threads(1)
    tests: Any = distributed_test

    class TorchsOwn(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            """torch's waits 10 s for workers to meet in its folder, which on a busy machine they do not always."""
            super()._barrier(*args, **{"timeout": float(TEST_TIMEOUT_S), **kwargs})

    return TorchsOwn


def main() -> None:
    backend, imported_as, world_size, results, *names = sys.argv[1:]
    cases = load(backend, imported_as, int(world_size))
    for name in names or unittest.TestLoader().getTestCaseNames(cases):
        begin = time.monotonic()
        result = unittest.TextTestRunner(stream=io.StringIO(), verbosity=0).run(cases(name))
        problems = [text for _, text in [*result.failures, *result.errors]]
        outcome = "failed" if problems else "skipped" if result.skipped else "passed"
        why = (problems or [text for _, text in result.skipped] or [""])[0]
        with open(results, "a") as file:
            line = {"test": name, "outcome": outcome, "seconds": round(time.monotonic() - begin, 1), "why": why[-3000:]}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
