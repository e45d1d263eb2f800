"""Values on their way down as differences: both sides have the same copy, in bits, and it goes to the values."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aggregate.parameter_server.stepping_worker import PATIENCE_S, mlp, sgd, train, values_of
from aggregate.parameter_server.test_request_order import LAYOUT, OneServer
from aggregate.parameter_server.test_training import kill_server
from stretto.aggregate.hierarchy.value import Hierarchy
from stretto.aggregate.parameter_server import ParameterServer
from stretto.aggregate.parameter_server.answers import OwnCopies, SentCopies, WrittenAnswer, answer_codecs
from stretto.aggregate.parameter_server.client import PulledPayload
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import NO_COPY, CopyName, DifferenceTo, PullValues, RequestRefused, ValuesPulled
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.checkpoint import load, save
from stretto.compress.bfloat16 import BFloat16
from stretto.compress.codec import Codec
from stretto.compress.dgc import DGC
from stretto.compress.dynamic8 import Dynamic8
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.int8 import Int8
from stretto.compress.none import NoCompression
from stretto.compress.one_bit import OneBit
from stretto.compress.qsgd import QSGD
from stretto.compress.random_k import RandomK
from stretto.compress.sign import Sign
from stretto.compress.tern_grad import TernGrad
from stretto.compress.top_k import TopK
from stretto.distributing import distribute, engine_of
from stretto.errors import ConfigurationError, FrameError, StrettoError
from stretto.job import Job
from stretto.parsing import parse
from stretto.protocol.machine import SendMessage
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

NUMEL = 60
CONTRACTIONS: list[Codec] = [
    Float16(), BFloat16(), Int8(block=8), Dynamic8(block=8), OneBit(), Sign(block=8), TopK(0.2), RandomK(0.2), QSGD(8, bucket=8),
]  # fmt: skip


class OneRange:
    """A server and a worker of one range, without anything in between."""

    def __init__(self, codec: Codec) -> None:
        parameters = [ServedParameter("w", NUMEL, "", (6, 10))]
        self.layout = RangeLayout(parameters)
        how = answer_codecs(self.layout.ranges, parameters, repr(codec))
        made = how(0)
        assert made is not None
        numbers = count()
        self.sent, self.own = SentCopies(made, lambda: CopyName(8, 0, next(numbers))), OwnCopies(how)
        self.memory = torch.zeros(NUMEL)
        self.draws = count()

    def answer(self, values: Tensor, whole: bool = False) -> tuple[WrittenAnswer, int]:
        draw = next(self.draws)
        return self.sent.answer(0, self.own.wanted(0, draw, whole=whole), values.numpy().tobytes()), draw

    def read(self, answer: WrittenAnswer, draw: int) -> None:
        header = ValuesPulled(0, 0, 0, 0, 1.0, since=answer.since, copy=answer.copy)
        future = Future[PulledPayload]()
        read = self.own.into(self.layout.ranges[0], future, self.memory, draw)
        future.set_result(PulledPayload(8, header, bytes(answer.payload)))
        read.result(0)

    def pull(self, values: Tensor, whole: bool = False) -> WrittenAnswer:
        answer, draw = self.answer(values, whole)
        self.read(answer, draw)
        return answer

    @property
    def known(self) -> Tensor:
        return self.sent._copies[0][1]


def some_values(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


# -- both sides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CONTRACTIONS, ids=repr)
def test_both_sides_have_the_same_bits_and_the_copy_goes_to_values_that_stand_still(codec: Codec) -> None:
    one, values = OneRange(codec), some_values(0)
    assert one.pull(values).since is None and torch.equal(one.memory, values)
    for seed in range(1, 30):
        values = values + 0.1 * some_values(seed)
        answer = one.pull(values)
        assert answer.since is not None and len(memoryview(answer.payload)) < 4 * NUMEL
        assert torch.equal(one.memory, one.known)
    behind = float((values - one.memory).norm())
    for _ in range(200):
        one.pull(values)
    assert torch.equal(one.memory, one.known)
    assert float((values - one.memory).norm()) <= max(1e-3 * behind, 1e-6 * float(values.norm()))


def test_values_come_whole_where_the_worker_does_not_have_what_the_server_knows() -> None:
    one = OneRange(Int8(block=8))
    values = [some_values(seed) for seed in range(9)]
    one.pull(values[0])
    one.answer(values[1])  # is lost
    assert one.pull(values[2]).since is None and torch.equal(one.memory, values[2])
    assert one.pull(values[3]).since is not None
    assert one.pull(values[4], whole=True).since is None and torch.equal(one.memory, values[4])
    one.sent.forget(0)
    assert one.pull(values[5]).since is None
    one.sent = OneRange(Int8(block=8)).sent  # another server, which knows nobody's copy
    one.sent._name = lambda: CopyName(9, 0, 0)
    assert one.pull(values[6]).since is None and torch.equal(one.memory, values[6])


def test_what_is_not_finite_is_sent_as_it_is_and_differences_go_on_afterwards() -> None:
    one, values = OneRange(Sign(block=8)), some_values(0)
    one.pull(values)
    infinite = values.clone()
    infinite[3] = float("inf")
    assert one.pull(infinite).since is None and torch.equal(one.memory, infinite)
    assert one.pull(values).since is None and torch.equal(one.memory, values)  # the difference to what is infinite is none
    assert one.pull(values).since is not None


def test_what_no_server_writes_is_refused_and_the_copy_stays_as_it_was() -> None:
    one, values = OneRange(Int8(block=8)), some_values(0)
    one.pull(values)
    before, name = one.memory.clone(), one.own.wanted(0, 0, whole=False)
    for wrong in (WrittenAnswer(b"123", None, CopyName(8, 0, 7)), WrittenAnswer(bytes(4 * NUMEL), None, None)):
        with pytest.raises(FrameError):
            one.read(wrong, 1)
    with pytest.raises(StrettoError, match="rank 8"):
        one.read(WrittenAnswer(b"123", name.copy, CopyName(8, 0, 7)), 1)
    assert torch.equal(one.memory, before) and one.own.wanted(0, 0, whole=False) == name


# -- training ---------------------------------------------------------------------------------------------------------


def strategy(codec: Codec, sync: Any = StaleSynchronous(0), replicas: int = 0, **more: Any) -> Strategy:  # noqa: B008
    return Strategy(aggregate=ParameterServer(2, replicas, answers=codec), sync=sync, **more)


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([each.detach().flatten() for each in tensors])


@pytest.mark.parametrize(
    "codec", [Int8(block=8), RandomK(0.3), *(pytest.param(c, marks=pytest.mark.slow) for c in CONTRACTIONS)], ids=repr
)
def test_workers_have_the_same_bits_and_the_servers_values_when_they_save(codec: Codec, tmp_path: Path) -> None:
    def program(job: Job) -> tuple[Tensor, Tensor, Tensor]:
        model = mlp(job.rank)
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(codec), job=job)
        seen = flat(train(job, model, optimizer, range(6))[-1])
        training: Any = engine_of(model).training
        kept = training._export(training._ranges)
        save(tmp_path / "checkpoint", model, optimizer, job=job)
        exact = torch.cat([kept[name].vectors["values"].flatten() for name, _ in model.named_parameters()])
        return seen, flat(values_of(model)), exact

    results = run_jobs(3, program)
    for seen, saved, exact in results:
        assert torch.equal(seen, results[0][0]) and torch.equal(saved, exact)
    assert not torch.equal(results[0][0], results[0][2])


@pytest.mark.parametrize(
    "sync", [StaleSynchronous(2), Asynchronous(), SoftSync(1), pytest.param(BackupWorkers(1), marks=pytest.mark.slow)], ids=repr
)
@pytest.mark.parametrize("compress", [NoCompression(), ErrorFeedback(Sign(block=8)), Float16()], ids=repr)
def test_what_travels_down_is_what_the_codec_writes_whatever_goes_up(
    sync: Any, compress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two whole models for each worker, to begin with and to save; and a byte and a scale for each block in between."""
    lock, sent, send = threading.Lock(), Counter[bool](), ServerMachine._send

    def _send(self: ServerMachine, to: int, header: Any, payload: Any = b"") -> None:
        with lock:
            if isinstance(header, ValuesPulled):
                sent[header.since is None] += memoryview(payload).nbytes
        send(self, to, header, payload)

    monkeypatch.setattr(ServerMachine, "_send", _send)

    def program(job: Job) -> None:
        model = mlp(job.rank)
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(Int8(), sync, compress=compress), job=job)
        train(job, model, optimizer, range(5))

    run_jobs(2, program)
    assert sent[True] == 2 * 4 * 37
    assert 0 < sent[False] <= 2 * 5 * (37 + 4 * 4)


def test_a_server_that_dies_costs_whole_values_once_and_no_step() -> None:
    killing, whole = threading.Event(), list[int]()

    def program(job: Job) -> None:
        model = mlp()
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(Int8(block=8), replicas=1), job=job)
        train(job, model, optimizer, range(3))
        training: Any = engine_of(model).training
        before = dict(training._copies._names)
        if job.rank == 0:
            kill_server(job, before[0].server - job.world_size, of=2)
            killing.set()
        assert killing.wait(PATIENCE_S)
        train(job, model, optimizer, range(3, 8))
        names = training._copies._names
        whole.append(sum(names[index].server != before[index].server for index in before))
        training.before_save()
        assert all(bool(torch.isfinite(each).all()) for each in values_of(model))

    run_jobs(2, program)
    assert killing.is_set() and all(number > 0 for number in whole)


def test_law_9_what_was_saved_resumes_with_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def program(job: Job, resumes: bool) -> Tensor:
        model = mlp(job.rank + 10 * resumes)
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(Int8(block=8)), job=job)
        if resumes:
            assert not load(path, model, optimizer, job=job).lost
        else:
            train(job, model, optimizer, range(3))
            save(path, model, optimizer, job=job)
        train(job, model, optimizer, range(3, 6))
        return flat(values_of(model))

    without, resumed = run_jobs(3, program, False), run_jobs(3, program, True)
    assert all(torch.equal(one, other) for one, other in zip(without, resumed, strict=True))


def test_one_worker_alone_trains_as_without_servers() -> None:
    def program(job: Job) -> Tensor:
        model = mlp()
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(OneBit()), job=job)
        return flat(train(job, model, optimizer, range(4))[-1])

    plain = mlp()
    optimizer = sgd(plain.parameters())
    (found,) = run_jobs(1, program)

    class Alone:
        rank = 0

    assert torch.equal(found, flat(train(Alone(), plain, optimizer, range(4))[-1]))  # type: ignore[arg-type]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "why"),
    [
        (QSGD(2), "may grow without bound"),
        (TernGrad(), "more than it is given"),
        (Sign(vote=True), "no magnitude"),
        (RandomK(0.1, scaled=True), "too large"),
        (ErrorFeedback(Sign()), "no codec by itself"),
        (NoCompression(), "no codec by itself"),
        (DGC(0.1), "no codec by itself"),
        (3, "no codec by itself"),
    ],
    ids=repr,
)
def test_what_is_no_contraction_is_refused_with_what_to_write_instead(codec: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){why}.*answers=Int8\(\)"):
        ParameterServer(answers=codec)


def test_answers_are_refused_where_servers_send_no_values_to_a_worker_of_their_own() -> None:
    servers = ParameterServer(answers=Int8())
    with pytest.raises(ConfigurationError, match="write compress="):
        Strategy(aggregate=servers)
    with pytest.raises(ConfigurationError, match="Leave one of the two out"):
        Strategy(aggregate=servers, sync=Asynchronous(delay_compensation=DelayCompensation(0.04)))
    with pytest.raises(ConfigurationError, match="Leave answers= out"):
        Hierarchy(outer=servers)


def test_a_strategy_with_answers_is_read_from_its_text() -> None:
    asked = strategy(TopK(0.1), Asynchronous())
    assert parse(repr(asked)) == asked
    with pytest.raises(ConfigurationError, match="answers"):
        answer_codecs([], [], "QSGD(bits=2)")


def test_a_round_that_there_cannot_be_is_refused() -> None:
    server = OneServer(Asynchronous()).machine
    for draw in (-1, 1 << 60):
        pull = PullValues(LAYOUT.digest, 0, 1, 0, 0, -1, None, DifferenceTo(NO_COPY, draw))
        (answer,) = server.on_message(0.0, 0, pull, memoryview(b""))
        assert isinstance(answer, SendMessage) and isinstance(answer.header, RequestRefused)
        assert f"of round {draw}" in answer.header.reason
