"""Tensors by name on the servers: `stretto.declare`, `push`, `pull`. In threads; real processes in `test_dedicated.py`."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.aggregate.parameter_server import ParameterServer, store
from stretto.aggregate.parameter_server.store import ServedTensor
from stretto.errors import ConfigurationError, PeerLost, StrettoError
from stretto.job import Job
from stretto.testing import run_jobs
from stretto.timeouts import Timeouts

SAFE = ParameterServer(shards=2, replicas=1)
MANY = 700_000  # elements: three ranges


@pytest.mark.parametrize("size", [1, 3, 7, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_what_all_have_pushed_is_there_once(size: int) -> None:
    def program(job: Job) -> tuple[float, Tensor]:
        stretto.declare("begun", torch.full((), 100.0 * (job.rank + 1)))
        stretto.declare("seen", torch.zeros(2, 3, dtype=torch.float16))
        for _ in range(job.rank + 1):  # some more than others
            stretto.push("begun", 1)
            stretto.push("seen", torch.tensor([[1, 2, 4], [8, 16, 32]], dtype=torch.float16))
        job.barrier()
        return stretto.pull("begun").item(), stretto.pull("seen")

    pushes = size * (size + 1) // 2
    for total, seen in run_jobs(size, program):
        assert total == 100 + pushes, "rank 0's value is what all begin with"
        assert seen.dtype is torch.float16 and seen.tolist() == [[pushes * 2**k for k in row] for row in ((0, 1, 2), (3, 4, 5))]


def test_a_worker_reads_its_own_pushes_and_nobody_else_has_to_answer() -> None:
    def program(job: Job) -> list[float]:
        stretto.declare("seen", torch.zeros(()))
        found = []
        if job.rank == 1:  # the others do nothing at all meanwhile
            for step in range(5):
                stretto.push("seen", torch.tensor(float(step)))
                found.append(stretto.pull("seen").item())
        job.barrier()
        return found

    assert run_jobs(3, program)[1] == [0, 1, 3, 6, 10]


def test_assign_puts_a_value_in_the_place_of_the_old_one() -> None:
    def program(job: Job) -> tuple[float, float]:
        stretto.declare("stop", torch.ones(()))
        if job.rank == 2:
            stretto.push("stop", 7, op="assign")
            stretto.push("stop", 2)
        job.barrier()
        read = stretto.pull("stop").item()
        job.barrier()
        stretto.push("stop", job.rank, op="assign")
        job.barrier()
        return read, stretto.pull("stop").item()

    found = run_jobs(3, program)
    assert {read for read, _ in found} == {9.0}
    assert len({last for _, last in found}) == 1 and found[0][1] in (0, 1, 2), "one of them was the last"


def test_a_large_tensor_is_cut_and_keeps_its_elements_apart() -> None:
    def program(job: Job) -> Tensor:
        stretto.declare("embedding", torch.arange(float(MANY)).reshape(-1, 7), servers=ParameterServer(shards=2))
        update = torch.zeros(MANY // 7, 7)
        update[job.rank :: job.world_size] = 1.0 + job.rank
        stretto.push("embedding", update)
        job.barrier()
        return stretto.pull("embedding")

    for found in run_jobs(3, program):
        rows = (found - torch.arange(float(MANY)).reshape(-1, 7))[:, 0]
        assert torch.equal(rows, 1.0 + torch.arange(MANY // 7) % 3)


def test_pushes_are_counted_once_when_a_server_dies_meanwhile() -> None:
    def program(job: Job) -> Tensor:
        stretto.declare("seen", torch.zeros(MANY), servers=SAFE)
        network = job.server_networks[2]
        for step in range(6):
            if step == 3 and job.rank == 0:
                assert job.more_wires is not None
                job.more_wires("servers 2", 2 + 2)[2 + 0].kill("the test")  # type: ignore[attr-defined]
            stretto.push("seen", torch.ones(MANY))
        job.barrier()
        assert 2 in network._wire.lost
        return stretto.pull("seen")

    assert all(torch.equal(found, torch.full((MANY,), 12.0)) for found in run_jobs(2, program))


def test_a_key_whose_servers_have_all_died_is_named() -> None:
    def program(job: Job) -> str:
        stretto.declare("seen", torch.zeros(4))
        job.barrier()
        if job.rank == 0:
            assert job.more_wires is not None
            job.more_wires("servers 1", 2 + 1)[2].kill("the test")  # type: ignore[attr-defined]
        with pytest.raises(PeerLost, match="seen") as caught:
            for _ in range(1000):
                stretto.push("seen", torch.ones(4))
        return str(caught.value)

    assert len(run_jobs(2, program)) == 2


def test_keys_use_the_servers_that_a_model_has() -> None:
    def program(job: Job) -> tuple[list[int], float]:
        model = nn.Linear(4, 1)
        strategy = stretto.Strategy(aggregate=ParameterServer(shards=2))
        stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        stretto.declare("seen", torch.zeros(()))
        model(torch.ones(1, 4)).sum().backward()
        stretto.push("seen", 1.0)
        job.barrier()
        return sorted(job.server_networks), stretto.pull("seen").item()

    assert run_jobs(3, program) == [([2], 3.0)] * 3


class Mute:
    """In the place of the client: nothing is ever answered."""

    def request(self, asked: Any) -> Future[Any]:
        return Future()


def test_an_answer_that_does_not_come_is_an_error_at_the_deadline_and_so_is_the_next_request() -> None:
    def program(job: Job) -> list[str]:
        stretto.declare("seen", torch.zeros(()))
        stored = job.declared["seen"]
        assert isinstance(stored, ServedTensor)
        service, stored._service = stored._service, Mute()  # type: ignore[assignment]
        said = []
        for act in (lambda: stretto.push("seen", 1.0), lambda: stretto.pull("seen")):
            with pytest.raises(StrettoError) as caught:
                act()
            said.append(str(caught.value))
        stored._service = service
        job.barrier()
        return said

    first, second = run_jobs(2, program, timeouts=Timeouts(arrive_s=0.5))[0]
    assert "push('seen') on rank 0: the servers have not answered within 0.5 s. It may still be applied" in first
    assert "An earlier request for it has not been answered either" in second


def test_after_an_interrupted_request_its_answer_is_not_taken_for_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(job: Job) -> str:
        stretto.declare("seen", torch.zeros(()))
        stored = job.declared["seen"]
        assert isinstance(stored, ServedTensor)
        service, stored._service = stored._service, Mute()  # type: ignore[assignment]
        job.barrier()
        if job.rank == 0:
            with monkeypatch.context() as patched:
                patched.setattr(store, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    stretto.push("seen", 1.0)
        job.barrier()  # the module is patched for all ranks, which are threads
        with pytest.raises(StrettoError) as caught:
            stretto.pull("seen")
        stored._service = service
        job.barrier()
        return str(caught.value)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    said = run_jobs(2, program, timeouts=Timeouts(arrive_s=0.5))[0]
    assert "An earlier request for it has not been answered either" in said


def test_a_key_that_was_not_declared_is_refused_with_what_to_call() -> None:
    def program(job: Job) -> str:
        stretto.declare("other", torch.zeros(1))
        with pytest.raises(ConfigurationError) as caught:
            stretto.pull("seen")
        return str(caught.value)

    said = run_jobs(2, program)[1]
    assert "pull('seen') on rank 1: no such key was declared; these were: 'other'" in said
    assert "stretto.declare('seen', tensor) before, on all workers together" in said


@pytest.mark.parametrize(
    ("pushed", "op", "said"),
    [
        (torch.zeros(3), "add", r"a float32\[3\], and the key was declared with float32\[2\]"),
        (torch.zeros(2, dtype=torch.float64), "add", r"a float64\[2\]"),
        (1.0, "add", r"a float32\[\]"),
        ("much", "add", "str is neither a tensor nor a number"),
        (torch.zeros(2), "max", "op='max' is not known"),
        (torch.zeros(2).to_sparse(), "add", "sparse_coo"),
    ],
)
def test_a_push_of_another_kind_is_refused_and_changes_nothing(pushed: Any, op: Any, said: str) -> None:
    def program(job: Job) -> list[float]:
        stretto.declare("seen", torch.ones(2))
        with pytest.raises(ConfigurationError, match=said):
            stretto.push("seen", pushed, op)
        found: list[float] = stretto.pull("seen").tolist()
        return found

    assert run_jobs(2, program) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize(
    ("key", "tensor", "servers", "said"),
    [
        ("", torch.zeros(1), None, "a key is a text"),
        ("x" * 201, torch.zeros(1), None, "a key is a text"),
        ("seen", torch.zeros(1, dtype=torch.int64), None, "with int64: servers keep float32"),
        ("seen", torch.zeros(0), None, "with 0 elements"),
        ("seen", torch.zeros(1).expand(1 << 29), None, "Declare several keys"),
        ("seen", torch.zeros(2).to_sparse(), None, "to_dense"),
        ("seen", [1.0], None, "give a tensor"),
        ("seen", torch.zeros(1), 2, "servers=2.: write for instance servers=ParameterServer"),
        ("seen", torch.zeros(1), ParameterServer(snapshots="x"), "snapshots are of models"),
        ("seen", torch.zeros(1), ParameterServer(placement="dedicated"), "has no servers on hosts of their own"),
    ],
)
def test_what_cannot_be_declared_is_refused_on_all_workers(key: Any, tensor: Any, servers: Any, said: str) -> None:
    def program(job: Job) -> bool:
        with pytest.raises(ConfigurationError, match=said):
            stretto.declare(key, tensor, servers=servers)
        return "seen" not in job.declared

    assert all(run_jobs(2, program))


@pytest.mark.parametrize("wrong", [{"tensor": [1.0]}, {"servers": 2}])
def test_what_only_one_worker_declares_wrongly_is_refused_on_all(wrong: dict[str, Any]) -> None:
    def program(job: Job) -> str:
        right: dict[str, Any] = {"tensor": torch.zeros(1), "servers": ParameterServer(shards=1)}
        with pytest.raises(ConfigurationError) as caught:
            stretto.declare("seen", **(right | wrong if job.rank == 1 else right))
        return str(caught.value)

    first, second = run_jobs(2, program, timeouts=Timeouts(arrive_s=5.0))
    assert first == f"rank 1: {second}" and ("write for instance" in second or "give a tensor" in second)


def test_workers_that_declare_different_things_are_all_told() -> None:
    def program(job: Job) -> list[str]:
        said = []
        for rows in (2 + job.rank, 2):
            try:
                stretto.declare("seen", torch.zeros(rows))
            except ConfigurationError as error:
                said.append(str(error))
        with pytest.raises(ConfigurationError, match="declared before"):
            stretto.declare("seen", torch.zeros(2))
        return said

    for said in run_jobs(2, program):
        assert len(said) == 1 and "rank 1 calls declare('seen', float32[3]), and rank 0 declare('seen', float32[2])" in said[0]
