"""Servers are told what to serve: which rule, which optimizers; and they end a service when nobody needs it."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from stretto.aggregate.parameter_server.client import ClientMachine, Fill, Pull, Push
from stretto.aggregate.parameter_server.layout import ServedParameter
from stretto.aggregate.parameter_server.process import serve
from stretto.aggregate.parameter_server.server_record import RecordedServer
from stretto.aggregate.parameter_server.service import (
    CONTROL_CHANNEL,
    AskServices,
    BeginService,
    EndService,
    FindServices,
    LeaveServers,
    ServedModel,
    ServerIsReady,
    ServiceBegun,
    ServiceClient,
    ServiceHost,
    ServicesAre,
    WorkerLeaves,
)
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.aggregate.parameter_server.sync_spec import KNOWN, SyncSpec
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.execute import Communicator
from stretto.errors import ConfigurationError
from stretto.protocol.machine import Reply, SendMessage
from stretto.strategy import ANSWERS
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous
from stretto.testing.threads import threads_world
from stretto.timeouts import Timeouts

SYNCS: list[Any] = [
    Synchronous(),
    StaleSynchronous(3),
    Asynchronous(),
    Asynchronous(True, DelayCompensation(0.04)),
    Asynchronous(False, DelayCompensation(2.0, decay=0.95)),
    SoftSync(2),
    BackupWorkers(1),
]
SGD = OptimizerSpec("SGD", {"lr": 0.5})


class Host:
    """A server that is told things by the test."""

    def __init__(self, workers: int = 2) -> None:
        self.machines: dict[int, RecordedServer] = {}
        self.left_alone = False
        self.host = ServiceHost(9, range(workers), self._start, self._stop, self._alone)

    def _start(self, machine: RecordedServer, channel: int, model: ServedModel) -> None:
        self.machines[channel] = machine
        machine.on_start(0.0)

    def _stop(self, channel: int) -> None:
        del self.machines[channel]

    def _alone(self) -> None:
        self.left_alone = True

    def begin(self, model: Any, channel: int = 2) -> str:
        body = model if isinstance(model, bytes) else msgspec.msgpack.encode(model)
        (answer,) = self.host.on_message(0.0, 0, BeginService(channel), memoryview(body))
        header: ServiceBegun = answer.header  # type: ignore[union-attr]
        return header.problem

    def tell(self, worker: int, header: Any) -> None:
        self.host.on_message(0.0, worker, header, memoryview(b""))


def model_of(sync: Any, **optimizers: OptimizerSpec) -> ServedModel:
    return ServedModel([ServedParameter("w", 2, "g")], [9], [0, 1], sync=SyncSpec.of(sync), optimizers=optimizers)


@pytest.mark.parametrize("sync", SYNCS, ids=repr)
def test_an_answer_to_sync_comes_out_of_bytes_as_it_was(sync: Any) -> None:
    body = msgspec.msgpack.encode(SyncSpec.of(sync))
    assert msgspec.msgpack.decode(body, type=SyncSpec).build() == sync


def test_all_answers_to_sync_are_known_to_servers() -> None:
    of_servers = {kind.__name__ for kind in ANSWERS["sync"]} - {"LocalSGD"}
    assert of_servers == set(KNOWN) == {type(sync).__name__ for sync in SYNCS}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (SyncSpec("Eventually"), "servers know Synchronous, StaleSynchronous"),
        (SyncSpec("StaleSynchronous", -1), "a whole number of at least 0"),
        (SyncSpec("Asynchronous", compensation=(-1.0, None)), "finite and not negative"),
    ],
    ids=["name", "number", "compensation"],
)
def test_what_is_no_answer_is_refused_and_the_server_goes_on(spec: SyncSpec, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        spec.build()
    host = Host()
    model = msgspec.structs.replace(model_of(Asynchronous(), g=SGD), sync=spec)
    assert reason.partition(",")[0] in host.begin(model) and not host.machines
    assert host.begin(model_of(Asynchronous(), g=SGD)) == "" and list(host.machines) == [2]


def test_no_code_is_asked_for_an_optimizer_that_is_not_on_the_list() -> None:
    model = msgspec.to_builtins(model_of(Asynchronous(), g=SGD))
    model["optimizers"]["g"]["name"] = "os.system"
    host = Host()
    assert "torch's element-wise optimizers and no others" in host.begin(msgspec.msgpack.encode(model)) and not host.machines


def test_servers_that_step_need_an_optimizer_for_each_group() -> None:
    host = Host()
    assert "no optimizer was named for the groups ['g']" in host.begin(model_of(SoftSync(1), other=SGD))
    assert host.begin(model_of(Synchronous())) == ""


def test_options_that_no_optimizer_of_the_model_takes_are_refused() -> None:
    model = model_of(Asynchronous(), g=SGD, h=OptimizerSpec("Adam", {"lr": 0.1}))
    assert model.fault_in({"lr": 0.1, "momentum": 0.9}) is None and model.fault_in({"betas": (0.9, 0.99)}) is None
    assert "'speed' is not one of SGD" in str(model.fault_in({"speed": 1.0}))
    assert model_of(Synchronous()).fault_in({"anything": 1.0}) is None


def test_a_service_ends_when_all_workers_have_ended_it_or_have_left() -> None:
    host = Host(workers=3)
    model = msgspec.structs.replace(model_of(Synchronous()), workers=[0, 1, 2])
    assert host.begin(model) == host.begin(model, 3) == ""
    host.tell(0, EndService(2))
    host.tell(0, EndService(2))
    host.tell(1, EndService(2))
    assert list(host.machines) == [2, 3]
    host.host.on_view(0.0, [], [2], 0)
    assert list(host.machines) == [3]
    host.tell(0, EndService(3))
    host.tell(1, WorkerLeaves())
    assert not host.machines and not host.left_alone
    host.tell(0, EndService(77))
    host.tell(0, WorkerLeaves())
    assert host.left_alone


def test_the_values_that_are_served_are_stepped_by_the_optimizer_that_was_named() -> None:
    host, model = Host(), model_of(Asynchronous(), g=SGD)
    host.begin(model)
    server, client = host.machines[2], ClientMachine(0, model.layout(), servers=[9])
    found = bytearray(8)
    requests: list[Any] = [
        Fill(0, np.array([1, 2], np.float32).tobytes()),
        Push(0, 0, np.array([2, 4], np.float32).tobytes(), {"lr": 0.25}, 0),
        Pull(0, 1, found),
    ]
    for ticket, request in enumerate(requests):
        for sent in client.on_request(0.0, ticket, request):
            for answer in server.on_message(0.0, 0, sent.header, memoryview(bytes(sent.payload))):  # type: ignore[union-attr]
                if answer.to == 0:  # type: ignore[union-attr]
                    client.on_message(0.0, 9, answer.header, memoryview(bytes(answer.payload)))  # type: ignore[union-attr]
    assert np.frombuffer(found, np.float32).tolist() == [0.5, 1.0]


class Latecomer(Host):
    """A server that has died and comes back in generation 5, when server 8 is in its third life."""

    def __init__(self) -> None:
        super().__init__()
        self.host = ServiceHost(9, range(2), self._start, self._stop, self._alone, life=5, lives=lambda: {8: 3, 9: 5}, others=[8])


def told(host: ServiceHost, source: int, header: Any, payload: bytes = b"") -> list[tuple[Any, Any, bytes]]:
    actions = host.on_message(0.0, source, header, memoryview(payload))
    return [(action.to, action.header, bytes(action.payload)) for action in actions if isinstance(action, SendMessage)]


def test_a_server_that_comes_later_asks_what_is_served_and_joins_those_that_serve_it() -> None:
    first, later = Host(), Latecomer()
    model = ServedModel([ServedParameter("w", 4)], [8, 9], [0, 1], 1, 1 << 20, SyncSpec.of(StaleSynchronous(1)), {"": SGD})
    first.host.on_message(0.0, 0, BeginService(2), memoryview(msgspec.msgpack.encode(model)))
    begins = [(action.to, action.header) for action in later.host.on_start(0.0)]  # type: ignore[union-attr]
    assert begins == [(8, AskServices())]
    ((to, answer, payload),) = told(first.host, 9, AskServices())
    ready = [(0, ServerIsReady(), b""), (1, ServerIsReady(), b"")]
    assert to == 9 and told(later.host, 8, answer, payload) == ready, "it knows all that is served"

    record = later.machines[2]
    machine = record.machine
    assert machine is not None
    assert machine.lives.current(8) == 3 and machine.lives.current(9) == 5 and machine.chains.life == 5
    assert machine.served() == {}, "it has nothing until others hand it over"
    assert told(later.host, 0, BeginService(2), msgspec.msgpack.encode(model))[0][1].problem == ""
    assert later.machines[2] is record


def test_a_server_that_was_not_ready_when_a_model_began_is_told_of_it() -> None:
    """It may have asked what is served just before that."""
    first, later = Host(), Latecomer()
    first.host.on_view(0.0, [1, 7], [], 6)
    model = ServedModel([ServedParameter("w", 4)], [9], [0, 1], 0, 1 << 20, SyncSpec.of(StaleSynchronous(1)), {"": SGD})
    body = msgspec.msgpack.encode(model)
    (begun, (to, answer, payload)) = told(first.host, 0, BeginService(2), body)
    assert begun[:2] == (0, ServiceBegun(2, "")) and to == 7, "worker 1 has come back and is no server"
    assert told(later.host, 7, answer, payload) == [] and not later.machines, "one that it does not know of"
    later.host.on_view(0.0, [7], [], 6)
    assert told(later.host, 7, answer, payload) == [] and list(later.machines) == [2]
    assert len(list(later.host.on_view(0.0, [], [8], 6))) == 2, "whom it has asked has died: it is ready"

    with_it = msgspec.structs.replace(model, servers=[7, 9])
    assert [to for to, _, _ in told(first.host, 0, BeginService(3), msgspec.msgpack.encode(with_it))] == [0]
    first.host.on_view(0.0, [], [7], 6)
    assert [to for to, _, _ in told(first.host, 0, BeginService(4), body)] == [0]


def test_a_worker_takes_a_server_that_comes_later_for_ready_when_it_says_so() -> None:
    client = ServiceClient([8])
    client.on_view(0.0, [9], [], 1)
    assert client.ready == {8}
    client.on_message(0.0, 9, ServerIsReady(), memoryview(b""))
    assert client.ready == {8, 9}
    client.on_view(0.0, [], [8], 1)
    assert client.ready == {9}


def test_a_worker_has_left_when_all_servers_that_live_have_been_told() -> None:
    client = ServiceClient([7, 8, 9])
    client.on_view(0.0, [], [7], 1)
    said = list(client.on_request(0.0, 5, LeaveServers([7, 8, 9])))
    assert said == [SendMessage(8, WorkerLeaves(), token=8), SendMessage(9, WorkerLeaves(), token=9)]
    assert list(client.on_sent(0.0, 8)) == []
    assert list(client.on_view(0.0, [], [9], 1)) == [Reply(5)], "who has died needs no word"
    assert list(client.on_request(0.0, 6, LeaveServers([7, 9]))) == [Reply(6)]


def test_a_server_that_starts_when_its_workers_leave_already_ends_too() -> None:
    """With a model of which servers get nothing nobody waits for them, and the last word may be said before they listen."""
    worker, wire = threads_world(2, check=True)
    communication = CommunicationThread(Communicator(worker, Timeouts()))
    control = communication.loop.start(ServiceClient([1]), CONTROL_CHANNEL)
    leaving = control.request(LeaveServers([1]))
    assert communication.loop.call(lambda: leaving.done()).result(30.0) is False
    server = threading.Thread(target=serve, args=(wire, [0], Timeouts()))
    server.start()
    leaving.result(30.0)
    communication.stop(30.0)
    worker.close()
    server.join(30.0)
    assert not server.is_alive()


@pytest.mark.parametrize(
    ("lengths", "payload"), [([5], b"1234"), ([-1, 5], b"1234"), ([4], b"1234"), ([], b"1234"), ([2, 2], b"1234")]
)
def test_an_account_of_services_that_cannot_be_read_starts_nothing(lengths: list[int], payload: bytes) -> None:
    later = Latecomer()
    assert told(later.host, 0, ServicesAre([2], lengths), payload) == [], "a worker has nothing to say about it"
    assert [header for _, header, _ in told(later.host, 8, ServicesAre([2], lengths), payload)] == [ServerIsReady()] * 2
    assert not later.machines


def test_a_worker_that_comes_back_counts_among_those_that_need_the_model() -> None:
    host = Host()
    model = ServedModel([ServedParameter("w", 4)], [9], [0, 1], 0, 1 << 20, SyncSpec.of(StaleSynchronous(1)), {"": SGD})
    host.host.on_message(0.0, 0, BeginService(2), memoryview(msgspec.msgpack.encode(model)))
    host.host.on_view(0.0, [], [1], 0)
    host.host.on_view(0.0, [1], [], 3)
    host.host.on_message(0.0, 0, EndService(2), memoryview(b""))
    assert 2 in host.machines
    host.host.on_view(0.0, [], [0], 3)
    assert not host.left_alone
    host.host.on_message(0.0, 1, EndService(2), memoryview(b""))
    assert not host.machines


def test_a_model_is_served_until_all_workers_need_it_no_longer_also_those_that_push_nothing() -> None:
    """Of a group only the first worker pushes, and each may ask for what the servers have."""
    host = Host()
    assert host.begin(msgspec.structs.replace(model_of(Asynchronous(), g=SGD), workers=[0])) == ""
    host.tell(0, EndService(2))
    assert list(host.machines) == [2]
    host.tell(1, EndService(2))
    assert not host.machines


def test_a_worker_finds_out_what_is_served() -> None:
    client, model = ServiceClient(), ServedModel([ServedParameter("w", 4)], [8, 9], [0, 1])
    asked = client.on_request(0.0, 1, FindServices([8, 9]))
    assert [action.to for action in asked if isinstance(action, SendMessage)] == [8, 9]
    body = msgspec.msgpack.encode(model)
    assert client.on_message(0.0, 8, ServicesAre([4], [len(body)]), memoryview(body)) == [Reply(1, {4: model})]
    assert client.on_message(0.0, 9, ServicesAre([4], [len(body)]), memoryview(body)) == []
