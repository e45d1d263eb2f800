"""A strategy is a value: printable, comparable, hashable, and refuses what makes no sense."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from laws.strategies import EVERY_ALGORITHM, STRATEGIES
from stretto import recipes
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.all_reduce.admission import warn_of_host_memory
from stretto.aggregate.gossip import Gossip, RandomMatching, Ring
from stretto.aggregate.group_average import GroupAverage
from stretto.aggregate.hierarchy import Elastic, Hierarchy
from stretto.aggregate.parameter_server import ParameterServer
from stretto.aggregate.shared_memory import SharedMemory
from stretto.collectives import catalogue
from stretto.collectives.plan import Kind
from stretto.compress.e3m0 import E3M0
from stretto.compress.int8 import Int8
from stretto.compress.none import NoCompression
from stretto.distributing import distribute, engine_of
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.parsing import parse
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.schedule.priority import Priority
from stretto.schedule.tictac import Tac
from stretto.shard.zero import Zero
from stretto.strategy import ON_ONE_HOST, Strategy, _are_on_gpus
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.noloco import NoLoCo
from stretto.sync.outer import Nesterov, SlowMo
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

COMPENSATED = Asynchronous(True, DelayCompensation(2.0, decay=0.95))
STEPPING = [
    Strategy(aggregate=ParameterServer(), sync=sync) for sync in (StaleSynchronous(3), COMPENSATED, SoftSync(2), BackupWorkers(1))
]
ALL = list(dict.fromkeys([*STRATEGIES, *EVERY_ALGORITHM, *STEPPING, recipes.hogwild(), recipes.wagma(), recipes.moshpit()]))


@pytest.mark.parametrize("strategy", ALL, ids=repr)
def test_what_is_printed_reads_back(strategy: Strategy) -> None:
    assert parse(repr(strategy)) == strategy
    assert hash(parse(repr(strategy))) == hash(strategy)
    assert pickle.loads(pickle.dumps(strategy)) == strategy


def test_the_text_tells_strategies_apart() -> None:
    assert len({repr(strategy) for strategy in ALL}) == len(ALL)
    assert repr(Strategy()) == repr(Strategy(schedule=Buckets()))


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Strategy().schedule = WaitFree()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ({"schedule": WaitFree}, r"Did you mean WaitFree\(\), with parentheses"),
        ({"schedule": "WaitFree"}, r"Write schedule= one of AfterBackward\(\), WaitFree\(\), Buckets\(\)"),
        ({"schedule": NoCompression()}, r"It answers another question: write compress=NoCompression\(\)"),
        ({"aggregate": WaitFree()}, r"write schedule=WaitFree\(\)"),
        ({"sync": None}, r"Strategy\(sync=None\): not an answer"),
        ({"shard": 3}, r"Write shard= one of Replicated\(\)"),
    ],
)
def test_a_wrong_answer_is_refused_with_the_right_ones(answers: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Strategy(**answers)


@pytest.mark.parametrize("bad", [0, -1, 2.5, "1MB", True])
@pytest.mark.parametrize("field", ["bytes", "first_bytes"])
def test_buckets_hold_a_positive_number_of_bytes(field: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Buckets\({field}={bad!r}\).*Write for instance Buckets"):
        Buckets(**{field: bad})


@pytest.mark.parametrize("bad", ["rign", "", 3, None])
def test_an_unknown_algorithm_is_refused_with_those_there_are(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match="halving_doubling"):
        AllReduce(bad)


def test_every_algorithm_of_the_catalogue_is_an_answer() -> None:
    for name in (*catalogue.names(Kind.ALL_REDUCE), "auto", "native"):
        assert AllReduce(name).algorithm == name


def test_recipes_are_compositions() -> None:
    assert recipes.ddp() == Strategy(schedule=Buckets(bytes=25 << 20))
    assert recipes.data_parallel() == Strategy(aggregate=AllReduce("master_worker"), schedule=AfterBackward())
    assert recipes.horovod(fusion_bytes=64) == Strategy(aggregate=AllReduce("ring"), schedule=Buckets(bytes=64, first_bytes=64))
    servers = ParameterServer(shards=2)
    assert recipes.tictac() == Strategy(schedule=Tac())
    assert recipes.tictac(servers=4) == Strategy(aggregate=ParameterServer(4), schedule=Tac())
    assert recipes.p3(servers=2) == Strategy(aggregate=servers, schedule=Priority(partition=200_000, credit=200_000))
    assert recipes.bytescheduler(servers=2) == Strategy(aggregate=servers, schedule=Priority())
    assert recipes.byteps(shards=2) == Strategy(aggregate=servers, schedule=Priority(partition=4 << 20))
    assert recipes.downpour() == Strategy(aggregate=ParameterServer(), sync=Asynchronous())
    assert recipes.ssp(5, shards=2) == Strategy(aggregate=servers, sync=StaleSynchronous(5))
    assert recipes.softsync(2, shards=2) == Strategy(aggregate=servers, sync=SoftSync(2))
    assert recipes.backup_workers(2, shards=2) == Strategy(aggregate=servers, sync=BackupWorkers(2))
    groups = Hierarchy(outer=servers, group_size=4)
    assert recipes.mxnet_mpi(group_size=4, shards=2) == Strategy(aggregate=groups, sync=Asynchronous())
    drawn = Hierarchy(outer=ParameterServer(), elastic=Elastic(4))
    assert recipes.mxnet_mpi(elastic=Elastic(4)) == Strategy(aggregate=drawn, sync=Asynchronous())
    assert recipes.hogwild() == Strategy(aggregate=SharedMemory(), sync=Asynchronous())
    assert recipes.adpsgd(Ring()) == Strategy(aggregate=Gossip(Ring()), sync=Asynchronous())
    assert recipes.moshpit(size=3) == Strategy(aggregate=GroupAverage(3))
    assert recipes.moshpit(every=5) == Strategy(aggregate=GroupAverage(4), sync=LocalSGD(5))
    assert recipes.wagma(size=8) == Strategy(aggregate=GroupAverage(8), sync=StaleSynchronous(10))
    assert recipes.local_sgd(8) == Strategy(sync=LocalSGD(8))
    assert recipes.post_local_sgd(100, every=8) == Strategy(sync=LocalSGD(8, start_after=100))
    assert recipes.slowmo(12, momentum=0.5) == Strategy(sync=LocalSGD(12, outer=SlowMo(0.5), optimizer_state="reset"))
    assert recipes.noloco(20) == Strategy(aggregate=Gossip(RandomMatching()), sync=LocalSGD(20, outer=NoLoCo(0.5, 0.7, 0.7)))
    assert recipes.diloco(20) == Strategy(sync=LocalSGD(20, outer=Nesterov(0.7, 0.9)))
    for every, overlap in ((100, 5), (24, 5), (20, 4), (8, 1), (4, 0)):
        sync = LocalSGD(every, outer=Nesterov(0.4, 0.9), fragments=4, overlap=overlap, merge=0.5)
        assert recipes.streaming_diloco(every) == Strategy(sync=sync, compress=E3M0())
    assert recipes.zero_r(3, buffer_bytes=64) == Strategy(schedule=Buckets(bytes=64, first_bytes=64), shard=Zero(3))
    assert recipes.diloco(20, compress=Int8()) == Strategy(sync=LocalSGD(20, outer=Nesterov(0.7, 0.9)), compress=Int8())
    to_say = {"one_bit_adam": "warm_up", "post_local_sgd": "start_after"}  # how long is for the user to say
    for name, recipe in recipes.by_name().items():
        arguments = {to_say[name]: 10} if name in to_say else {}
        assert recipe.__doc__ and recipe(**arguments) == parse(f"{name}({to_say[name]}=10)" if arguments else name)
    own = {name for name, value in vars(recipes).items() if getattr(value, "__module__", "") == recipes.__name__}
    for_pipelines = {"gpipe", "pipedream_flush"}  # arguments of `stretto.pipeline`
    assert own == {*recipes.by_name(), *recipes.LAYOUTS, *for_pipelines, "by_name", "_after", "_by"}


@pytest.mark.parametrize(
    ("launched_with", "given", "taken"),
    [
        (None, None, Strategy()),
        ("horovod(fusion_bytes=64)", None, recipes.horovod(fusion_bytes=64)),
        ("horovod(fusion_bytes=64)", "Strategy(schedule=WaitFree())", Strategy(schedule=WaitFree())),  # what the script says wins
        ("horovod(fusion_bytes=64)", Strategy(), Strategy()),
    ],
)
def test_a_script_that_names_no_strategy_gets_the_one_of_its_launcher(
    launched_with: str | None, given: Strategy | str | None, taken: Strategy
) -> None:
    def program(job: Job) -> Strategy:
        job.launch = dataclasses.replace(job.launch, strategy=launched_with)
        model = nn.Linear(2, 1)
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), given, job=job)
        return engine_of(model).strategy

    assert run_jobs(2, program) == [taken] * 2


def test_a_strategy_of_the_launcher_that_cannot_be_read_is_an_error_of_every_worker() -> None:
    def program(job: Job) -> None:
        job.launch = dataclasses.replace(job.launch, strategy="no_such_recipe()")
        model = nn.Linear(2, 1)
        with pytest.raises(ConfigurationError, match=r"'no_such_recipe' is not known"):
            distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), job=job)

    run_jobs(2, program)


class OnGpu(nn.Parameter):
    is_cuda = True


def model_on(rank: int, gpus: tuple[int, ...]) -> nn.Module:
    model = nn.Linear(2, 2)
    if rank in gpus:
        model.weight = OnGpu(model.weight.data)
    return model


@pytest.mark.parametrize(
    ("hosts", "gpus", "expected"),
    [
        ("aa", (0, 1), Strategy(aggregate=Hierarchy(), schedule=ON_ONE_HOST)),
        ("aba", (0, 1, 2), Strategy(aggregate=Hierarchy())),  # between hosts buckets leave early
        ("ab", (0, 1), Strategy()),  # nobody shares a host
        ("aa", (), Strategy()),
        ("aa", (1,), Strategy()),  # all workers, or none
    ],
)
def test_on_gpus_the_default_keeps_gradients_there(hosts: str, gpus: tuple[int, ...], expected: Strategy) -> None:
    def program(job: Job) -> Strategy:
        on_gpus = _are_on_gpus(model_on(job.rank, gpus), job)
        return Strategy()._for_gpus(job) if on_gpus else Strategy()

    assert run_jobs(len(hosts), program, hosts=list(hosts)) == [expected] * len(hosts)


@pytest.mark.parametrize(("hosts", "device", "warns"), [("aa", "cuda:0", True), ("ab", "cuda:0", False), ("aa", "cpu", False)])
def test_a_model_that_came_to_a_gpu_too_late_is_warned_about(
    hosts: str, device: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run_jobs(2, lambda job: warn_of_host_memory("Net", [torch.device(device)], job), hosts=list(hosts))
    assert ("gradients of Net lie on a GPU and go through host memory" in caplog.text) == warns


def test_what_the_user_has_asked_for_is_done_on_gpus_too() -> None:
    assert Strategy()._is_left_to_us and Strategy(schedule=WaitFree())._is_left_to_us
    local = Strategy(sync=LocalSGD(4))
    for asked in (Strategy(aggregate=AllReduce("ring")), Strategy(compress=Int8()), Strategy(aggregate=Hierarchy()), local):
        assert not asked._is_left_to_us
