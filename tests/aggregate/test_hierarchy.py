"""Two levels: what the laws do not ask. (`laws/` has Hierarchy among its strategies.)"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.worker import Refusing, assert_equal_everywhere, data, mlp, seeded, start, state_of, take_step
from laws.strategies import COMPRESSIONS
from stretto import AllReduce, Hierarchy, Strategy, parse
from stretto.aggregate.all_reduce.bucket import ReducedBucket
from stretto.aggregate.hierarchy import training as hierarchy
from stretto.aggregate.hierarchy.training import SynchronousHierarchy
from stretto.checkpoint import load, save
from stretto.collectives.group import Group
from stretto.compress.codec import Compression
from stretto.compress.dgc import DGC
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.none import NoCompression
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.sign import Sign
from stretto.compress.top_k import TopK
from stretto.distributing import distribute, engine_of, join
from stretto.engine.training import TensorsByName
from stretto.errors import BackwardFailed, ConfigurationError, PeerLost, RankMismatch, WireError
from stretto.fabric import choose
from stretto.fabric.mapped import MappedFabric
from stretto.fabric.native import NativeFabric
from stretto.job import Job
from stretto.plan import auto
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts
from stretto.schedule.orders import Buckets
from stretto.testing import run_jobs

RING = AllReduce("ring")
TWO_BY_TWO = ["a", "a", "b", "b"]
SMALL = Buckets(bytes=128, first_bytes=64)
SIGN = ErrorFeedback(Sign(block=16))


def two_levels(compress: Compression | None = None, inner: str = "native") -> Strategy:
    return Strategy(aggregate=Hierarchy(inner=AllReduce(inner)), compress=compress or NoCompression(), schedule=SMALL)


def flat(compress: Compression) -> Strategy:
    return Strategy(compress=compress, schedule=SMALL)


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes a ring, without measuring."""
    table = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))
    monkeypatch.setattr(auto, "_make_choices", lambda group: table)


def optimizer_for(compress: Compression, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if compress.optimizer_hint else 0.9)


def train(job: Job, strategy: Strategy, batches: list[int], steps: int = 4) -> dict[str, Tensor]:
    """`batches[rank]`: whose data this worker trains on."""
    model = mlp().float()
    optimizer = optimizer_for(strategy.compress, model)
    distribute(model, optimizer, strategy, job=job)
    for step in range(steps):
        model(data(batches[job.rank], step).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def remembered(model: nn.Module) -> TensorsByName:
    state = engine_of(model).training.state()
    assert state is not None
    return state.own


# -- what compression does between hosts ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("compress", COMPRESSIONS, ids=repr)
def test_hosts_whose_workers_have_the_same_data_are_a_job_of_as_many_workers_bit_for_bit(compress: Compression) -> None:
    expected = run_jobs(2, train, flat(compress), [0, 1])[0]
    both = run_jobs(4, train, two_levels(compress), [0, 0, 1, 1], hosts=TWO_BY_TWO)
    one_each = run_jobs(2, train, two_levels(compress), [0, 1], hosts=["a", "b"])
    assert_equal_everywhere([expected, *both, *one_each])


@pytest.mark.parametrize("compress", [NoCompression(), SIGN], ids=repr)
@pytest.mark.parametrize("hosts", [["a"] * 3, TWO_BY_TWO], ids=str)
def test_training_over_torchs_collectives_inside_hosts(
    compress: Compression, hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL does it on GPUs."""
    expected = run_jobs(len(hosts), train, two_levels(compress), list(range(len(hosts))), hosts=hosts)[0]
    made: list[str] = []

    def gloo(group: Group, members: object, device: torch.device) -> tuple[NativeFabric, str]:
        made.append("gloo")
        return NativeFabric(group, device, "gloo"), "as NCCL"

    monkeypatch.setattr(choose, "_fastest", gloo)
    states = run_jobs(len(hosts), train, two_levels(compress), list(range(len(hosts))), hosts=hosts)
    assert len(made) == len(hosts)
    assert_equal_everywhere(states)
    for name, value in expected.items():
        torch.testing.assert_close(states[0][name], value)


def test_workers_with_different_kinds_of_devices_combine_over_the_wire(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One on a GPU and one on the CPU, say: no fabric takes both, and buckets must be cut alike."""
    monkeypatch.setattr(SynchronousHierarchy, "_kinds_of_devices", lambda self, buckets: [f"kind {self._job.rank}"])
    expected = run_jobs(2, train, two_levels(inner="ring"), [0, 1])
    with caplog.at_level(logging.INFO, "stretto"):
        assert_equal_everywhere([expected[0], *run_jobs(2, train, two_levels(), [0, 1])])
    assert "through our wire: some workers of the job have on a GPU what others have on the CPU" in caplog.text


@pytest.mark.parametrize("fabric", ["mapped", "gloo"])
def test_an_error_between_the_levels_on_one_worker_is_told_to_all_at_once(fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for that worker's share; with torch's collectives it would itself wait, for the shares to come in order."""
    if fabric == "gloo":
        monkeypatch.setattr(choose, "_fastest", lambda group, members, device: (NativeFabric(group, device, "gloo"), ""))
    steps = SynchronousHierarchy._steps

    def failing(self: SynchronousHierarchy, bucket: ReducedBucket, share: Tensor) -> Any:
        if self._job.rank == 1 and bucket.number == 1:
            raise ValueError("a codec's")
        return steps(self, bucket, share)

    def program(job: Job) -> str:
        with pytest.raises((ValueError, WireError)) as raised:
            train(job, two_levels(), [0, 1, 2, 3], steps=1)
        return f"{type(raised.value).__name__}: {raised.value}"

    monkeypatch.setattr(SynchronousHierarchy, "_steps", failing)
    told = "WireError: rank 1 could not combine gradients: ValueError: a codec's"
    assert run_jobs(4, program, hosts=TWO_BY_TWO) == [told, "ValueError: a codec's", told, told]


@pytest.mark.parametrize("compress", [SIGN, ErrorFeedback(PowerSGD(2))], ids=repr)
@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b", "a", "b"], ["a", "b", "b", "c", "c", "c", "c"]], ids=str)
def test_replicas_stay_equal_wherever_the_workers_are(compress: Compression, hosts: list[str]) -> None:
    states = run_jobs(len(hosts), train, two_levels(compress), list(range(len(hosts))), hosts=hosts)
    assert_equal_everywhere(states)


@pytest.mark.parametrize("compress", [SIGN, ErrorFeedback(PowerSGD(2))], ids=repr)
def test_save_and_load_resume_with_the_same_bits_also_on_other_workers(compress: Compression, tmp_path: Path) -> None:
    def program(job: Job, numbers: range) -> dict[str, Tensor]:
        model = mlp(job.rank + numbers.start).float()
        optimizer = optimizer_for(compress, model)
        distribute(model, optimizer, two_levels(compress), job=job)
        if numbers.start:
            resumed = load(tmp_path / "c.pt", model, optimizer)
            assert any("between hosts" in line for line in resumed.carried)
            assert not any("compress" in line for line in resumed.lost)
        for step in numbers:
            model(data(job.rank, step).float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        save(tmp_path / "c.pt", model, optimizer)
        return state_of(model)

    whole = run_jobs(4, program, range(6), hosts=TWO_BY_TWO)
    run_jobs(4, program, range(3), hosts=TWO_BY_TWO)
    assert_equal_everywhere([whole[0], *run_jobs(4, program, range(3, 6), hosts=TWO_BY_TWO)])
    assert_equal_everywhere(run_jobs(3, program, range(6, 7), hosts=["a", "a", "b"]))  # another job: what was left is still said


@pytest.mark.parametrize("hosts", [TWO_BY_TWO, ["a", "a", "b"]], ids=str)
def test_law_5_what_was_handed_out_and_what_hosts_have_left_is_all_that_workers_gave(hosts: list[str]) -> None:
    """In the mean: over workers for what they gave, over hosts for what is left."""

    def program(job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model = mlp().float()
        optimizer = start(job, model, two_levels(SIGN), lr=0.0)
        given, handed_out = ({name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(2))
        for step in range(5):
            x = data(job.rank, step).float()
            alone = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            model(x).square().mean().backward()
            for (name, parameter), mine in zip(model.named_parameters(), alone, strict=True):
                assert parameter.grad is not None
                given[name] += mine
                handed_out[name] += parameter.grad
            optimizer.step()
            optimizer.zero_grad()
        return given, handed_out, {name: kinds["own residual"] for name, kinds in remembered(model).items()}

    results = run_jobs(len(hosts), program, hosts=hosts)
    for name, handed_out in results[0][1].items():
        given = torch.stack([given[name] for given, _, _ in results]).mean(0)
        kept = [residuals[name] for _, _, residuals in results if name in residuals]
        assert len(kept) == len(set(hosts))  # one worker of each host keeps it
        left = torch.stack(kept).mean(0)
        torch.testing.assert_close(handed_out + left, given, rtol=1e-4, atol=1e-5)
        assert left.numel() == 1 or float(left.abs().max()) > 0  # one number is its own sign and scale


@pytest.mark.parametrize("compress", [EF21(TopK(0.3)), DGC(0.1, warm_up=()), SIGN], ids=repr)
def test_a_checkpoint_is_loaded_by_as_many_workers_on_other_hosts(compress: Compression, tmp_path: Path) -> None:
    """What a worker kept is another worker's there."""

    def program(job: Job, begin: int) -> tuple[dict[str, Tensor], float]:
        model = mlp().float()
        optimizer = optimizer_for(compress, model)
        distribute(model, optimizer, two_levels(compress), job=job)
        if begin:
            load(tmp_path / "c.pt", model, optimizer)
        kept = sum(float(value.abs().sum()) for kinds in remembered(model).values() for value in kinds.values())
        for step in range(begin, begin + 3):
            model(data(job.rank, step).float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not begin:
            save(tmp_path / "c.pt", model, optimizer)
        assert "stretto" not in optimizer.state_dict()  # only all workers' together means something
        return state_of(model), kept

    run_jobs(4, program, 0, hosts=TWO_BY_TWO)
    for hosts in (["a", "b", "a", "b"], ["a", "b", "c", "d"], ["a"] * 4):
        resumed = run_jobs(4, program, 3, hosts=hosts)
        assert_equal_everywhere([state for state, _ in resumed])
        assert sum(kept for _, kept in resumed) > 0  # what was left to say is still there


def test_what_a_parameter_has_yet_to_say_is_kept_while_it_is_frozen() -> None:
    def program(job: Job) -> float:
        model = mlp().float()
        optimizer = start(job, model, two_levels(SIGN))
        take_step(model, job, optimizer)
        residuals = {name: kinds for name, kinds in remembered(model).items() if name.startswith("0.")}
        model[0].requires_grad_(False)
        take_step(model, job, optimizer, step=1)
        model[0].requires_grad_(True)
        model(data(job.rank).float())  # gets its place again
        after = remembered(model)
        for name, kinds in residuals.items():
            for kind, value in kinds.items():
                assert torch.equal(after[name][kind], value)
        return float(sum(value.abs().sum() for kinds in residuals.values() for value in kinds.values()))

    amounts = run_jobs(4, program, hosts=TWO_BY_TWO)
    assert sum(amounts[:2]) > 0 and sum(amounts[:2]) != amounts[0] * 2  # the two workers of a host keep different ones


def test_a_value_that_is_not_finite_makes_everybodys_gradients_nan_and_leaves_residuals_alone() -> None:
    def program(job: Job) -> None:
        model = mlp().float()
        optimizer = start(job, model, two_levels(SIGN))
        take_step(model, job, optimizer)
        before = remembered(model)
        bad = float("nan") if job.rank == 3 else 1.0
        (model(data(job.rank).float()).square().mean() * bad).backward()
        assert all(p.grad is not None and bool(p.grad.isnan().all()) for p in model.parameters())
        after = remembered(model)
        assert all(torch.equal(after[name][kind], value) for name, kinds in before.items() for kind, value in kinds.items())

    run_jobs(4, program, hosts=TWO_BY_TWO)


def test_workers_that_run_out_of_data_speak_on_for_their_host() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp().float()
        optimizer = start(job, model, two_levels(SIGN))
        with join(model):
            for step in range(1 + job.rank):
                take_step(model, job, optimizer, step=step)
        return state_of(model)

    assert_equal_everywhere(run_jobs(4, program, hosts=TWO_BY_TWO))


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["native", "ring"])
def test_a_host_sends_the_model_once_where_a_flat_ring_sends_it_one_and_a_half_times(inner: str) -> None:
    wide, payload = 200, 200 * 200 * 4

    def program(job: Job, strategy: Strategy) -> int:
        model = seeded(lambda: nn.Linear(wide, wide, bias=False))
        start(job, model, strategy)
        others = [peer.rank for peer in job.peers if peer.host != job.peers[job.rank].host]
        before = sum(map(job.ledger.sent_to, others))
        model(torch.ones(1, wide)).sum().backward()
        return sum(map(job.ledger.sent_to, others)) - before

    sent = run_jobs(4, program, two_levels(inner=inner), hosts=TWO_BY_TWO)
    assert payload < sum(sent[:2]) < 1.01 * payload and abs(sent[0] - sent[1]) < 0.01 * payload  # each of them its half
    by_ring = run_jobs(4, program, Strategy(aggregate=RING, schedule=SMALL), hosts=TWO_BY_TWO)
    assert 1.5 * payload < sum(by_ring[:2]) < 1.51 * payload


def test_buckets_go_in_pieces_and_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_jobs(4, train, two_levels(), [0, 1, 2, 3], hosts=TWO_BY_TWO)
    monkeypatch.setattr(hierarchy, "PIECE_BYTES", 40)
    pieces = run_jobs(4, train, two_levels(), [0, 1, 2, 3], hosts=TWO_BY_TWO)
    assert_equal_everywhere([*whole, *pieces])


def test_parameters_are_shared_out_evenly_and_keep_their_owner() -> None:
    def program(job: Job) -> list[int]:
        model = seeded(lambda: nn.Sequential(*[nn.Linear(10, 10) for _ in range(8)]))
        start(job, model, two_levels(SIGN))
        training = engine_of(model).training
        assert isinstance(training, SynchronousHierarchy)
        before = dict(training._owners)
        model[0].requires_grad_(False)
        model.append(nn.Linear(10, 10))
        model(torch.ones(1, 10))
        assert before.items() <= training._owners.items() and len(training._owners) == len(before) + 2
        loads = [0, 0]
        for name, parameter in model.named_parameters():
            loads[training._owners[name]] += parameter.numel()
        return loads

    loads = run_jobs(4, program, hosts=TWO_BY_TWO)
    assert loads[0] == loads[1] == loads[2] == loads[3] and max(loads[0]) <= 1.3 * min(loads[0])


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["native", "ring"])
@pytest.mark.parametrize("compress", [NoCompression(), SIGN], ids=repr)
def test_a_worker_that_dies_is_named_on_both_hosts(inner: str, compress: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "PIECE_BYTES", 40)

    def program(job: Job) -> str:
        model = mlp().float()
        optimizer = start(job, model, two_levels(compress, inner))
        if job.rank == 3:
            take_step(model, job, optimizer)
            assert job.wire is not None
            job.wire.abandon()
            return "died"
        with pytest.raises(PeerLost) as lost:
            for step in range(2):  # in the first, if rank 3 was quicker
                take_step(model, job, optimizer, step=step)
        return f"lost {lost.value.rank}"

    assert run_jobs(4, program, hosts=TWO_BY_TWO) == ["lost 3"] * 3 + ["died"]


def test_a_backward_that_fails_gives_nobody_a_step() -> None:
    def program(job: Job) -> None:
        model = mlp().float()
        optimizer = start(job, model, two_levels())
        take_step(model, job, optimizer)
        before = state_of(model)
        if job.rank == 1:
            model[1].register_forward_hook(lambda module, inputs, output: Refusing.apply(output))  # type: ignore[no-untyped-call]
        out = model(data(job.rank).float())
        if job.rank == 1:
            with pytest.raises(RuntimeError, match="cannot go on"):
                out.sum().backward()
            optimizer.step()
        else:
            with pytest.raises(BackwardFailed, match="1"):
                out.sum().backward()
        assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())

    run_jobs(4, program, hosts=TWO_BY_TWO)


@pytest.mark.parametrize("what", ["freezes a layer", "appends a layer", "is elsewhere"])
def test_one_worker_that_does_something_else_is_found_out_on_both_hosts(what: str) -> None:
    def program(job: Job) -> None:
        model = mlp().float()
        optimizer = start(job, model, two_levels())
        take_step(model, job, optimizer)
        with pytest.raises(RankMismatch):
            if job.rank == 1 and what == "freezes a layer":
                model[0].requires_grad_(False)
            if job.rank == 1 and what == "appends a layer":
                model.append(nn.Linear(1, 1))
            if job.rank == 1 and what == "is elsewhere":
                job.barrier()
            for step in range(1, 4):  # a frozen layer is noticed when it got no gradient
                take_step(model, job, optimizer, step=step)

    run_jobs(4, program, hosts=TWO_BY_TWO)


def test_a_round_that_fails_does_not_undo_the_one_before_where_it_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    in_second, others_disagree = threading.Event(), threading.Event()
    share = MappedFabric.share

    def late(self: MappedFabric, area: int, flat: Tensor, number: int, label: str) -> Any:
        if self._group.endpoint.rank == 3 and in_second.is_set():
            assert others_disagree.wait(20)
        yield from share(self, area, flat, number, label)

    def program(job: Job) -> dict[str, Tensor]:
        model = mlp().float()
        optimizer = start(job, model, Strategy(aggregate=Hierarchy()))  # one bucket
        take_step(model, job, optimizer)
        if job.rank == 3:
            in_second.set()
        take_step(model, job, optimizer, step=1)  # in which rank 3 is late, and rank 2 waits for it
        optimizer.param_groups[0]["lr"] *= 2 if job.rank == 1 else 1
        with pytest.raises(RankMismatch, match="learning rates"):
            try:
                take_step(model, job, optimizer, step=2)
            finally:
                others_disagree.set()
        return state_of(model)

    monkeypatch.setattr(MappedFabric, "share", late)
    assert_equal_everywhere(run_jobs(4, program, hosts=TWO_BY_TWO))


def test_parameters_that_change_again_and_again_take_no_more_channels() -> None:
    def program(job: Job) -> None:
        model = mlp().float()
        optimizer = start(job, model, two_levels())
        training = engine_of(model).training
        assert isinstance(training, SynchronousHierarchy)
        channels = None
        for step in range(6):
            model[0].requires_grad_(step % 2 == 0)
            take_step(model, job, optimizer, step=step)
            channels = channels or set(training._channels)
        assert training._channels == channels

    run_jobs(4, program, hosts=TWO_BY_TWO)


def test_the_log_says_what_was_chosen_inside_a_host(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stretto"):
        run_jobs(4, train, two_levels(), [0, 1, 2, 3], 1, hosts=TWO_BY_TWO)
    lines = sorted(line for line in caplog.messages if "combine what" in line)
    assert len(lines) == 2 and all("mapped host memory" in line for line in lines)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Hierarchy(inner=AllReduce("butterfly")), r'Write inner=AllReduce\("native"\)'),
        (lambda: Hierarchy(outer=AllReduce("native")), r"Write outer=AllReduce\(\)"),
        (lambda: Hierarchy(outer=Hierarchy()), r"Write outer=AllReduce\(\)"),  # type: ignore[arg-type]
        (lambda: Strategy(aggregate=Hierarchy(outer=RING), compress=Sign()), "do not add up"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write_instead(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_it_reads_back_from_its_text() -> None:
    strategy = Strategy(aggregate=Hierarchy(outer=RING), compress=ErrorFeedback(PowerSGD(4)))
    assert parse(repr(strategy)) == strategy
