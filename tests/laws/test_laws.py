"""The laws of the design, asked of every strategy and every awkward model, on worlds of 1, 2, 3, 4 and 7.

    1   a world of one equals the plain optimizer, bit for bit
    2   n workers on shares = one worker on the whole batch
    3   all replicas hold the same bits after every step
    4   scheduling and bucketing never change the result beyond reduction order
    7   synchronous rounds are never stale
    8   bytes on the wire equal the formula
    9   save, kill, resume: the same bits as never having stopped
    10  mismatched models or strategies are an error on all ranks before any gradient is sent

(5 is about lossy codecs: `test_lossy.py`. 6 is about mixing, and comes with the values that mix.)
A run is made once and asked everything.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from laws.cases import BY_NAME, CASES, Case
from laws.strategies import (
    EVERY_ALGORITHM,
    IN_SLICES,
    PARAMETERS_TOO,
    PLAIN,
    SMALL_BUCKETS,
    STRATEGIES,
    WAIT_FREE,
    refused,
    short,
)
from laws.training import alone, assert_close, assert_same_bits, build, share, state_of, together
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.all_reduce.planning import ROUNDS_TO_WATCH
from stretto.checkpoint import load, save
from stretto.collectives import catalogue
from stretto.collectives.messages import Begun
from stretto.collectives.plan import Kind
from stretto.collectives.request import Request
from stretto.collectives.run import EAGER_BYTES
from stretto.collectives.schedule import Action, compile_plan
from stretto.distributing import distribute, engine_of
from stretto.engine.bucket import Bucket
from stretto.engine.training import Participation
from stretto.errors import BackwardFailed, RankMismatch
from stretto.job import Job
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.schedule.priority import Priority
from stretto.shard.replicated import Replicated
from stretto.strategy import Strategy
from stretto.testing import run_jobs
from stretto.wire.frames import HEADER_BYTES

SIZES = (1, 2, 3, 4, 7)
STEPS = 30
MANY = 20
SOME = 10
FEW = 4


def _name(value: Any) -> str:
    return short(value) if isinstance(value, Strategy) else value.name if isinstance(value, Case) else str(value)


def _worlds() -> list[Any]:
    """(strategy, case, size, steps): what runs always, and what is slow: every strategy with every case, in a small world and a
    large one, which take turns. So any two of strategy, case and size meet. All three need not: that takes twice as long."""
    names = [case.name for case in CASES]
    quick = [(SMALL_BUCKETS, name, 3, SOME) for name in names]
    quick += [(strategy, name, 2, FEW) for strategy in (PLAIN, WAIT_FREE) for name in names]
    quick += [(IN_SLICES, name, 3, FEW) for name in names]
    quick += [(PARAMETERS_TOO, name, 2, FEW) for name in names]
    quick += [(strategy, "mlp", size, _quick_steps(strategy, size)) for strategy in STRATEGIES for size in SIZES]
    quick += [(strategy, "mlp", 3, FEW) for strategy in EVERY_ALGORITHM]
    quick = list(dict.fromkeys(quick))
    steps = dict.fromkeys(SIZES, FEW) | {3: STEPS}
    whole = [(strategy, "mlp", size, FEW) for strategy in EVERY_ALGORITHM for size in (2, 4, 7)]
    for (at, strategy), (number, name) in product(enumerate(STRATEGIES), enumerate(names)):
        whole += [(strategy, name, size, steps[size]) for size in (SIZES[:3][(at + number) % 3], SIZES[3:][(at + number) % 2])]
    quick, whole = ([world for world in worlds if world[1] not in refused(world[0])] for worlds in (quick, whole))
    slow = [world for world in whole if world not in set(quick)]
    return [pytest.param(*world, id=_id(world)) for world in quick] + [
        pytest.param(*world, id=_id(world), marks=pytest.mark.slow) for world in slow
    ]


def _quick_steps(strategy: Strategy, size: int) -> int:
    """Those of sharded state are many, in one world."""
    return MANY if strategy.shard != Replicated() and size == 3 else FEW


def _id(world: tuple[Strategy, str, int, int]) -> str:
    strategy, case, size, steps = world
    return f"{case}, {size} workers, {steps} steps, {short(strategy)}"


WORLDS = _worlds()


def test_the_worlds_that_always_run_leave_no_strategy_no_case_and_no_size_out() -> None:
    quick = [world.values for world in WORLDS if not world.marks]
    assert {strategy for strategy, *_ in quick} == {*STRATEGIES, *EVERY_ALGORITHM}
    assert {case for _, case, *_ in quick} == {case.name for case in CASES}
    assert {(strategy, size) for strategy, _, size, _ in quick} >= {(one, size) for one in STRATEGIES for size in SIZES}
    assert {(case, size) for _, case, size, _ in quick} >= {(case.name, size) for case in CASES for size in (2, 3)}


def test_any_two_of_strategy_case_and_size_meet_in_some_world() -> None:
    worlds = [world.values for world in WORLDS]
    pairs = {(strategy, case.name) for strategy in STRATEGIES for case in CASES if case.name not in refused(strategy)}
    assert {(strategy, case) for strategy, case, *_ in worlds} >= pairs
    assert {(strategy, size) for strategy, _, size, _ in worlds} >= set(product(STRATEGIES, SIZES))
    assert {(case, size) for _, case, size, _ in worlds} >= set(product((case.name for case in CASES), SIZES))


every_world = pytest.mark.parametrize(("strategy", "case", "size", "steps"), WORLDS)


@pytest.mark.parametrize("case", CASES, ids=_name)
@pytest.mark.parametrize("strategy", [PLAIN, Strategy()], ids=_name)
def test_law_1_a_world_of_one_is_the_plain_optimizer_bit_for_bit(strategy: Strategy, case: Case) -> None:
    (run,) = together(case.name, strategy, 1, FEW)
    assert_same_bits(run.state, alone(case.name, FEW))


@every_world
def test_law_2_workers_on_shares_are_one_worker_on_the_whole_batch(strategy: Strategy, case: str, size: int, steps: int) -> None:
    assert_close(together(case, strategy, size, steps)[0].state, alone(case, steps))


@every_world
def test_law_3_all_replicas_hold_the_same_bits_after_every_step(strategy: Strategy, case: str, size: int, steps: int) -> None:
    runs = together(case, strategy, size, steps)
    assert len(set(runs[0].digests)) == steps  # the steps did change something
    for run in runs[1:]:
        assert run.digests == runs[0].digests
        assert_same_bits(run.state, runs[0].state)


@every_world
def test_law_4_scheduling_never_changes_the_result_beyond_reduction_order(
    strategy: Strategy, case: str, size: int, steps: int
) -> None:
    assert_close(together(case, strategy, size, steps)[0].state, together(case, PLAIN, size, steps)[0].state)


@pytest.mark.parametrize("schedule", [AfterBackward(), WaitFree(), Buckets(bytes=100)], ids=repr)
def test_law_4_with_two_workers_there_is_one_order_and_the_bits_are_equal(schedule: Any) -> None:
    changed = Strategy(aggregate=PLAIN.aggregate, schedule=schedule)
    assert together("mlp", changed, 2, FEW)[0].digests == together("mlp", PLAIN, 2, FEW)[0].digests


# -- 7: staleness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=_name)
def test_law_7_synchronous_rounds_are_never_stale(strategy: Strategy, size: int) -> None:
    """One round for every step; one whose backward failed somewhere combines nothing, and does not count."""

    def program(job: Job) -> dict[int, int]:
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))
        model = nn.Linear(3, 3)
        distribute(model, _optimizer(model), strategy, job=job)
        for number in range(3):
            out = model(torch.ones(2, 3))
            if number == 1 and job.rank == 0:
                out.register_hook(_fail)
            try:
                out.sum().backward()
            except (BackwardFailed, ZeroDivisionError):
                engine_of(model).flush()
            model.zero_grad()
        return dict(job.ledger.staleness)

    assert run_jobs(size, program) == [{0: 2}] * size


def _fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError("on purpose")


# -- 8: bytes ---------------------------------------------------------------------------------------------------------


def bytes_of(bucket: Bucket, job_rank: int, size: int, algorithm: str, label: str) -> int:
    """What one all-reduce sends from one rank: every message of the plan with its header, and one announcement to each rank
    that it will receive from, unless the bucket is small enough to go unannounced."""
    plan = catalogue.plan(Kind.ALL_REDUCE, algorithm, job_rank, size, group=size)
    request = Request(plan, bucket.flat, "mean", label=label)
    schedule = compile_plan(plan, bucket.flat.numel(), request.segment_bytes // bucket.flat.element_size())
    messages = [task for task in schedule.tasks if task.action is Action.SEND]
    payload = sum(task.stop - task.start for task in messages) * bucket.flat.element_size()
    announcement = HEADER_BYTES + len(msgspec.msgpack.encode(Begun(2, 0, request.belief)))
    num_announcements = 0 if bucket.num_bytes <= EAGER_BYTES else len(schedule.sources)
    return payload + HEADER_BYTES * len(messages) + num_announcements * announcement


FIXED = [
    s
    for s in STRATEGIES
    if isinstance(s.aggregate, AllReduce)
    and s.aggregate != AllReduce()
    and not s.schedule.needs_profile
    and s.shard == Replicated()
]


@pytest.mark.parametrize("strategy", FIXED, ids=_name)
@pytest.mark.parametrize("size", SIZES[1:])
def test_law_8_bytes_on_the_wire_equal_the_formula(strategy: Strategy, size: int) -> None:
    """Beside the questions to a worker that is far behind, which a busy machine makes necessary."""
    for rank, run in enumerate(together("mlp", strategy, size, FEW)):
        assert isinstance(strategy.aggregate, AllReduce)
        algorithm = strategy.aggregate.algorithm
        expected = sum(bytes_of(bucket, rank, size, algorithm, "") for bucket in run.buckets)
        assert all(bucket.num_bytes <= EAGER_BYTES for bucket in run.buckets)  # none announces itself unasked
        assert run.bytes_sent == [expected] * FEW


@pytest.mark.parametrize("size", SIZES[1:])
def test_law_8_holds_for_plans_too_once_they_are_made(size: int) -> None:
    """What is left under way when a step ends counts to the next, so a few steps are counted together, and waited for."""

    def program(job: Job) -> tuple[int, int]:
        model = build(BY_NAME["mlp"], seed=0)
        optimizer = BY_NAME["mlp"].optimizer(model)
        distribute(model, optimizer, Strategy(aggregate=AllReduce("ring"), schedule=Priority(partition=256)), job=job)
        before = 0
        for number in range(ROUNDS_TO_WATCH + FEW):
            if number == ROUNDS_TO_WATCH:
                before = job.ledger.sent_by("all_reduce")
            BY_NAME["mlp"].step(model, share(BY_NAME["mlp"].batch(number), job.rank, size), number)
            optimizer.step()
            optimizer.zero_grad()
        model.state_dict()
        payload = 0
        for bucket in engine_of(model).buckets:
            plan = catalogue.plan(Kind.ALL_REDUCE, "ring", job.rank, size, group=size)
            tasks = compile_plan(plan, bucket.flat.numel(), 1 << 20).tasks
            sent = sum(task.stop - task.start for task in tasks if task.action is Action.SEND)
            payload += sent * bucket.flat.element_size()
        return job.ledger.sent_by("all_reduce") - before, FEW * payload

    for sent, expected in run_jobs(size, program):
        assert sent == expected > 0


def test_law_8_counts_the_announcements_of_large_buckets() -> None:
    num_elements, size = 300 * 300, 3

    def program(job: Job) -> tuple[int, int]:
        model = nn.Linear(300, 300, bias=False)
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), PLAIN, job=job)
        assert job.wire is not None
        before = job.wire.bytes_sent
        model(torch.ones(2, 300)).sum().backward()
        engine = engine_of(model)
        (bucket,) = engine.buckets
        training: Any = engine.training
        label = training._label + training._loop_label(
            Participation.WORKING
        )  # it is the closing bucket, which tells of the loop too
        return job.wire.bytes_sent - before, bytes_of(bucket, job.rank, size, "ring", label)

    for counted, expected in run_jobs(size, program):
        assert counted == expected
        assert 4 * num_elements * 4 / 3 < counted < 4 * num_elements * 4 / 3 * 1.01  # 2(P-1)/P of the model, and little else


# -- 9: save and resume -----------------------------------------------------------------------------------------------


LOADED_BY = ["every rank before", "every rank after", "rank 0 before"]
quick_or_slow = [
    pytest.param(size, loaded_by, marks=[] if size == 3 or loaded_by == LOADED_BY[1] else pytest.mark.slow)
    for size in SIZES
    for loaded_by in LOADED_BY
]


@pytest.mark.parametrize(("size", "loaded_by"), quick_or_slow)
def test_law_9_a_plain_state_dict_resumes_with_the_same_bits(size: int, loaded_by: str, tmp_path: Any) -> None:
    case = CASES[1]

    def first_half(job: Job) -> None:
        model, optimizer, _ = _continue(job, case, range(FEW))
        if job.rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")

    def second_half(job: Job) -> dict[str, torch.Tensor]:
        saved = torch.load(tmp_path / "saved.pt", weights_only=True)
        return _continue(job, case, range(FEW, 2 * FEW), saved, loaded_by)[2]

    whole = run_jobs(size, lambda job: _continue(job, case, range(2 * FEW))[2])
    run_jobs(size, first_half)
    for rank, state in enumerate(run_jobs(size, second_half)):
        assert_same_bits(state, whole[rank])


def _continue(
    job: Job, case: Case, numbers: range, saved: Any = None, loaded_by: str = "every rank after"
) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    model = build(case, seed=job.rank)
    optimizer = case.optimizer(model)

    def load() -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    if saved and (loaded_by == "every rank before" or (loaded_by == "rank 0 before" and job.rank == 0)):
        load()
    distribute(model, optimizer, SMALL_BUCKETS, job=job)
    if saved and loaded_by == "every rank after":
        load()
    for number in numbers:
        case.step(model, share(case.batch(number), job.rank, job.world_size), number)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, state_of(model)


STATELESS = [case for case in CASES if case.name != "unused in turns, AdamW"]  # it counts its calls outside of its state_dict


@pytest.mark.parametrize(
    ("strategy", "case", "size"),
    [pytest.param(SMALL_BUCKETS, case, 2, id=case.name) for case in STATELESS]
    + [
        pytest.param(s, CASES[1], 3, id=short(s))
        for s in STRATEGIES
        if s.aggregate != AllReduce() and not s.schedule.needs_profile
    ],
)
def test_law_9_save_and_load_resume_with_the_same_bits(strategy: Strategy, case: Case, size: int, tmp_path: Any) -> None:
    """(`auto` is left out, and so are plans by measured times: two jobs may choose differently, and the order of additions with
    it. With a profile that was saved, plans are the same: `tests/engine/test_cross_barrier.py`.)"""

    def program(job: Job, numbers: range) -> dict[str, torch.Tensor]:
        model = build(case, seed=job.rank + numbers.start)
        optimizer = case.optimizer(model)
        distribute(model, optimizer, strategy, job=job)
        if numbers.start:
            assert load(tmp_path / "saved.pt", model, optimizer).extra == {"steps": numbers.start}
        for number in numbers:
            case.step(model, share(case.batch(number), job.rank, job.world_size), number)
            optimizer.step()
            optimizer.zero_grad()
        save(tmp_path / "saved.pt", model, optimizer, extra={"steps": numbers.stop})
        return state_of(model)

    whole = run_jobs(size, program, range(2 * FEW))
    run_jobs(size, program, range(FEW))
    for rank, state in enumerate(run_jobs(size, program, range(FEW, 2 * FEW))):
        assert_same_bits(state, whole[rank])


# -- 10: disagreement -------------------------------------------------------------------------------------------------


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _wider(rank: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4 if rank == 1 else 3)), PLAIN, {}


def _longer(rank: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(2 + (rank == 1))]), PLAIN, {}


def _other_dtype(rank: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    return nn.Linear(3, 3).to(torch.float64 if rank == 1 else torch.float32), PLAIN, {}


def _other_order(rank: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    layers = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}
    return nn.ModuleDict(dict(reversed(layers.items())) if rank == 1 else layers), PLAIN, {}


def _other_layout(rank: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    model: Any = nn.Conv2d(3, 3, 3)
    return model.to(memory_format=torch.channels_last) if rank == 1 else model, PLAIN, {}


def _frozen(rank: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].requires_grad_(rank != 1)
    return model, PLAIN, {}


def _other_strategy(rank: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    return nn.Linear(3, 3), SMALL_BUCKETS if rank == 1 else PLAIN, {}


def _other_options(rank: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    return nn.Linear(3, 3), PLAIN, {"check_finite": rank == 1}


def _other_buffer(rank: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=rank != 1)), PLAIN, {}


@pytest.mark.parametrize(
    ("build_differently", "names"),
    [
        (_wider, ("parameter 1.weight: (3, 3) float32", "parameter 1.weight: (4, 3) float32")),
        (_longer, ("nothing there", "parameter 2.weight")),
        (_other_dtype, ("weight: (3, 3) float32", "weight: (3, 3) float64")),
        (_other_order, ("parameter a.weight", "parameter b.weight")),
        (_other_layout, ("weight", "strides (27, 1, 9, 3)")),
        (_frozen, ("1.weight", "frozen")),
        (_other_strategy, ("strategy=Strategy", "AfterBackward()", "Buckets(bytes=256")),
        (_other_options, ("check_finite=False", "check_finite=True")),
        (_other_buffer, ("buffer 1.running_mean", "nothing there")),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_law_10_a_mismatch_is_an_error_on_all_ranks_that_names_the_first_difference(
    build_differently: Any, names: tuple[str, ...], size: int
) -> None:
    def program(job: Job) -> str:
        model, strategy, options = build_differently(job.rank)
        with pytest.raises(RankMismatch) as caught:
            distribute(model, _optimizer(model), strategy, job=job, **options)
        assert job.world_size > 1 and not hasattr(model, "_stretto_engine")
        job.barrier()  # the job itself is as it was
        return str(caught.value)

    messages = run_jobs(size, program)
    assert len(set(messages)) == 1
    assert "no gradient was sent" in messages[0] and "rank 0:" in messages[0] and "rank 1:" in messages[0]
    for name in names:
        assert name in messages[0]


def test_law_10_another_optimizer_or_other_groups_are_a_mismatch() -> None:
    def program(job: Job) -> str:
        model = nn.Linear(3, 3)
        kind = torch.optim.SGD if job.rank else torch.optim.Adam
        with pytest.raises(RankMismatch, match="group 0: weight, bias") as caught:
            distribute(model, kind(model.parameters(), lr=0.1), PLAIN, job=job)
        return str(caught.value)

    first, second = run_jobs(2, program)
    assert first == second and "SGD" in first and "Adam" in first


def test_law_10_models_that_change_differently_later_are_a_mismatch_on_all_ranks() -> None:
    """Shapes and sizes are equal: only names tell that one worker's `1` would be added to another's `2`."""

    def program(job: Job) -> str:
        model = nn.Sequential(nn.Linear(3, 3), *[nn.Linear(3, 3).requires_grad_(False) for _ in range(2)])
        distribute(model, _optimizer(model), PLAIN, job=job)
        model(torch.ones(1, 3)).sum().backward()
        model[2 if job.rank == 1 else 1].requires_grad_(True)
        with pytest.raises(RankMismatch, match=r"for gradients of \w+ \(model 1\), layout") as caught:
            model(torch.ones(1, 3)).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        return str(caught.value)

    assert len(set(run_jobs(3, program))) == 1
