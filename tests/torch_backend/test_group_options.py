"""The algorithm and the codec of a group: what travels, and that results are what they should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, ReduceScatterOptions

from stretto.compress.bfloat16 import BFloat16
from stretto.compress.codec import Compression
from stretto.compress.dynamic8 import Dynamic8
from stretto.compress.e3m0 import E3M0
from stretto.compress.float16 import Float16
from stretto.compress.int8 import Int8
from stretto.compress.qsgd import QSGD
from stretto.compress.tern_grad import TernGrad
from stretto.errors import ConfigurationError, RankMismatch
from stretto.torch_backend.options import GroupOptions
from stretto.torch_backend.process_group import StrettoGroup
from torch_backend.groups import run_groups

LENGTH = 4000
CODECS: dict[Compression, float] = {  # and how far off a sum of normal numbers may be
    BFloat16(): 0.01, Float16(): 0.001, Int8(): 0.02, Dynamic8(): 0.03, E3M0(): 0.4, QSGD(): 0.4, TernGrad(): 2.5,
}  # fmt: skip


def _compressed(group: StrettoGroup) -> tuple[float, float, list[float], int]:
    rank, size = group.rank(), group.size()
    everybody = torch.randn(size, size * LENGTH, generator=torch.Generator().manual_seed(0))
    total = everybody.sum(0)
    summed = everybody[rank].clone()
    group.allreduce([summed]).wait()
    options: Any = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.AVG
    mine, given = torch.empty(LENGTH), everybody[rank].clone()
    before = sum(group.job.ledger.sent.values())
    group.reduce_scatter_single(mine, given, options).get_future().wait()
    sent = sum(group.job.ledger.sent.values()) - before
    want = total.view(size, LENGTH)[rank] / size
    assert given.equal(everybody[rank])
    return (
        float((summed - total).norm() / total.norm()), float((mine - want).norm() / want.norm()),
        summed[:50].tolist(), sent,
    )  # fmt: skip


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_compressed_sums_are_about_right_the_same_everywhere_and_short(codec: Compression, size: int) -> None:
    results = run_groups(size, _compressed, options=GroupOptions(compress=codec))
    assert len({tuple(result[2]) for result in results}) == 1
    for of_sum, of_part, _, sent in results:
        assert of_sum < CODECS[codec] and of_part < CODECS[codec]
        assert sent <= 0.52 * 4 * LENGTH * (size - 1) + 200


def test_quantised_hops_where_a_ring_is_asked_for() -> None:
    results = run_groups(3, _compressed, options=GroupOptions("ring", Int8()))
    assert all(result[0] < 0.03 for result in results)


def test_what_is_short_or_no_sum_of_floats_travels_as_it_is() -> None:
    def program(group: StrettoGroup) -> None:
        for tensor in (torch.randn(1000), torch.randn(5000, dtype=torch.float64), torch.arange(5000)):
            mine = tensor.clone()
            group.broadcast([mine]).wait()
            want = 2 * mine
            group.allreduce([mine]).wait()
            assert mine.equal(want)
        options: Any = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        mine = torch.randn(5000)
        group.broadcast([mine]).wait()
        want = mine.clone()
        group.allreduce([mine], options).wait()
        assert mine.equal(want)

    run_groups(2, program, options=GroupOptions(compress=QSGD()))


def test_a_value_that_is_not_finite_on_one_worker_is_seen_by_all() -> None:
    def program(group: StrettoGroup) -> list[bool]:
        x = torch.ones(LENGTH)
        if group.rank() == 1:
            x[5] = float("inf")
        group.allreduce([x]).wait()
        mine = torch.empty(LENGTH)
        given = torch.ones(2 * LENGTH)
        given[0] = torch.nan if group.rank() == 0 else 1.0
        group.reduce_scatter_single(mine, given).wait()
        good = torch.ones(LENGTH)
        group.allreduce([good]).wait()
        return [
            bool(x.isnan().all()),
            bool(mine.isnan().all()),
            bool(torch.allclose(good, torch.full((LENGTH,), 2.0), rtol=0.02)),
        ]

    assert run_groups(2, program, options=GroupOptions(compress=Int8())) == [[True, True, True]] * 2


def test_half_precision_stays_half_precision() -> None:
    def program(group: StrettoGroup) -> None:
        x = torch.full((LENGTH,), 1.5, dtype=torch.bfloat16)
        group.allreduce([x]).wait()
        assert x.dtype is torch.bfloat16 and torch.allclose(x.float(), torch.full((LENGTH,), 3.0), rtol=0.02)

    run_groups(2, program, options=GroupOptions(compress=Int8()))


def test_the_algorithm_is_that_of_the_options() -> None:
    def program(group: StrettoGroup, algorithm: str) -> str:
        group.allreduce([torch.ones(10)]).wait()
        with pytest.raises(RankMismatch) as told:  # the belief of a collective names its algorithm
            group.allreduce([torch.ones(10 + group.rank())]).wait()
        return str(told.value)

    for algorithm in ("ring", "double_binary_tree"):
        for text in run_groups(3, program, algorithm, options=GroupOptions(algorithm)):
            assert f"algorithm={algorithm}" in text


@pytest.mark.usefixtures("measured_links")
def test_auto_measures_when_the_group_is_made() -> None:
    def program(group: StrettoGroup) -> bool:
        assert group.group.choices is not None
        x = torch.ones(100_000)
        group.allreduce([x]).wait()
        return bool(x.eq(2).all())

    assert run_groups(2, program, options=GroupOptions("auto")) == [True, True]


def test_members_with_different_options_are_told() -> None:
    def program(group: StrettoGroup) -> str:
        mine = GroupOptions(compress=Int8()) if group.rank() else GroupOptions()
        members = group.group.sub([0, 1])
        with pytest.raises(RankMismatch) as told:
            StrettoGroup(group.job, members, mine)
        return str(told.value)

    for text in run_groups(2, program):
        assert "GroupOptions(algorithm=None, compress=Int8(" in text and "compress=NoCompression()" in text


def test_tensors_of_several_dtypes_as_one_are_refused_with_a_codec_too() -> None:
    def program(group: StrettoGroup) -> None:
        with pytest.raises(ConfigurationError, match="convert them to one dtype"):
            group.allreduce_coalesced([torch.ones(LENGTH), torch.ones(LENGTH, dtype=torch.int64)])

    run_groups(2, program, options=GroupOptions(compress=Int8()))
