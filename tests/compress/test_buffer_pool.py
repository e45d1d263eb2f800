"""Memory that is lent again: never while somebody sees it, always when nobody does, with the same bits as new memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compress.together import Workers
from stretto.compress import buffer_pool
from stretto.compress.bfloat16 import BFloat16
from stretto.compress.buffer_pool import UNIT_BYTES, BufferPool
from stretto.compress.codec import Codec, Compression
from stretto.compress.dynamic8 import Dynamic8
from stretto.compress.e3m0 import E3M0
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.int8 import Int8
from stretto.compress.kernels.compiling import has_numba
from stretto.compress.layout import Blocks, Layout
from stretto.compress.one_bit import OneBit
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.qsgd import QSGD
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import Collective, Gather, Steps, Transpose, share_out
from stretto.compress.sign import Sign
from stretto.compress.tern_grad import TernGrad
from stretto.compress.threshold import Threshold
from stretto.compress.top_k import TopK
from stretto.distributing import distribute
from stretto.job import Job
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts
from stretto.schedule.orders import AfterBackward
from stretto.strategy import Strategy
from stretto.testing import run_jobs

CPU = torch.device("cpu")
DRAW = RandomKeys.of_round(2, rank=1)
CODECS: list[Codec] = [
    Float16(), BFloat16(), BFloat16(stochastic=True), Int8(16), Int8(16, stochastic=True), Dynamic8(32), E3M0(32),
    QSGD(3, 32), TernGrad(block=64), OneBit(), Sign(64), Sign(64, vote=True),
]  # fmt: skip
AROUND: list[Compression] = [ErrorFeedback(Sign(64)), ErrorFeedback(BFloat16()), EF21(Int8(16)), OneBitAdam(2, codec=Sign(64))]
LARGE: list[Compression] = [
    Float16(), BFloat16(), BFloat16(stochastic=True), Int8(), Int8(stochastic=True), Dynamic8(), QSGD(), TernGrad(), OneBit(),
    Sign(), Sign(vote=True), ErrorFeedback(Sign()), ErrorFeedback(BFloat16()), EF21(Int8()), OneBitAdam(1),
]  # fmt: skip
SHAPES = [("a", (37, 11)), ("b", (300,)), ("empty", (0,)), ("c", (8, 16))]


@pytest.fixture
def tiny_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vectors of some hundred bytes were large."""
    monkeypatch.setattr(buffer_pool, "UNIT_BYTES", 64)


def lend(memory: BufferPool, num_bytes: int = UNIT_BYTES) -> Tensor:
    return memory.empty(num_bytes, torch.uint8, CPU)


def random(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def without_memory(blocks: Blocks) -> Blocks:
    return Blocks(blocks.bounds, blocks.keys, BufferPool(most=0))


# -- lending ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dtype"), [(UNIT_BYTES, torch.uint8), ((3, UNIT_BYTES // 8), torch.float32)])
@pytest.mark.parametrize("less", [0, 1])
def test_what_is_lent_is_as_from_torch(shape: Any, dtype: torch.dtype, less: int) -> None:
    shape = shape - less if isinstance(shape, int) else (*shape[:-1], shape[-1] - less)
    lent, expected = BufferPool().empty(shape, dtype, CPU), torch.empty(shape, dtype=dtype)

    assert (lent.shape, lent.dtype, lent.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert lent.untyped_storage().nbytes() == expected.untyped_storage().nbytes() and lent.data_ptr() % 64 == 0


def test_what_was_let_go_is_lent_again_also_for_a_length_that_is_nearly_the_same() -> None:
    memory = BufferPool()
    lent = lend(memory, 3 * UNIT_BYTES)
    address = lent.data_ptr()
    del lent

    assert lend(memory, 3 * UNIT_BYTES - 5).data_ptr() == address
    assert memory.empty((2, UNIT_BYTES // 2), torch.int16, CPU).data_ptr() != address  # of two units


@pytest.mark.parametrize(
    "see",
    [
        lambda lent: lent,
        lambda lent: lent[10:20],
        lambda lent: lent[:8].view(torch.float32).view(2, 1).t(),
        lambda lent: lent.numpy()[5:],
        lambda lent: memoryview(lent.numpy())[3:4],
        lambda lent: lent.untyped_storage(),
    ],
    ids=["tensor", "part", "other dtype", "array", "memoryview", "storage"],
)
def test_what_somebody_sees_is_not_lent_again(see: Callable[[Tensor], Any]) -> None:
    memory = BufferPool()
    lent = lend(memory)
    address = lent.data_ptr()
    seen = see(lent)
    del lent

    other = lend(memory)
    assert other.data_ptr() != address
    del seen
    assert lend(memory).data_ptr() == address


@pytest.mark.parametrize("most", [0, 1, 2])
def test_no_more_than_asked_for_is_kept(most: int) -> None:
    memory = BufferPool(most)
    lent = [lend(memory, length * UNIT_BYTES) for length in (1, 1, 1, 2)]
    assert len({each.data_ptr() for each in lent}) == 4
    del lent
    small = lend(memory, UNIT_BYTES - 1)
    del small

    assert {length: len(free) for length, free in memory._free.items()} == {1: most, 2: min(most, 1)}


def test_who_asks_for_ever_new_lengths_gets_them_and_only_the_last_are_kept() -> None:
    memory = BufferPool()
    for length in (*range(1, 21), 15):
        assert lend(memory, length * UNIT_BYTES).numel() == length * UNIT_BYTES
    assert list(memory._free) == [13, 14, 16, 17, 18, 19, 20, 15]

    late = lend(memory, 40 * UNIT_BYTES)
    for length in range(1, 9):
        lend(memory, length * UNIT_BYTES)
    del late  # nobody has asked for such a length since
    assert list(memory._free) == list(range(1, 9))


def test_payloads_of_other_lengths_in_every_round_are_not_kept(tiny_units: None) -> None:
    workers = Workers(Threshold(1.0), [("a", (40, 100))], 3)
    for number in range(6):
        workers.round([random(4000, 10 * number + rank) * (1 + number + rank) for rank in range(3)])
    kept = [value for one in workers.kept for value in one.values() if isinstance(value, Blocks)]
    assert len(kept) == 3 and all(not any(blocks.pool._free.values()) for blocks in kept)


def test_a_copy_begins_with_nothing() -> None:
    memory = BufferPool(1)
    lend(memory)
    assert sum(map(len, memory._free.values())) == 1
    assert not copy.deepcopy(memory)._free and copy.deepcopy(memory)._most == 1


def test_threads_never_get_the_same(tiny_units: None) -> None:
    """All ask and let go at the same time; what each has written stays as it is until it lets go."""
    memory, wrong = BufferPool(most=8), []

    def use(number: int) -> None:
        for _ in range(300):
            lent = lend(memory, 64).fill_(number)
            again = lend(memory, 64).fill_(number + 100)
            if not (bool((lent == number).all()) and bool((again == number + 100).all())):
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- codecs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_payload_that_is_held_stays_as_it_is_and_bits_are_those_of_new_memory(codec: Codec, tiny_units: None) -> None:
    layout = Layout.of(SHAPES)
    blocks = codec.blocks(layout)
    held = []
    for seed in range(4):
        values = random(layout.num_elements, seed)
        payload = codec.encode(values, blocks, DRAW)
        held.append((values, payload, codec.decode(payload, blocks, DRAW)))
        codec.decode(codec.encode(-values, blocks, DRAW), blocks, DRAW)  # let go at once: the next ones are written there
    for values, payload, decoded in held:
        expected = codec.encode(values, without_memory(blocks), DRAW)
        assert torch.equal(payload, expected)
        assert torch.equal(decoded, codec.decode(expected, without_memory(blocks), DRAW))


@pytest.mark.skipif(not has_numba(), reason="torch takes memory of its own")
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_kernels_write_to_the_memory_of_the_call_before(codec: Codec, tiny_units: None) -> None:
    layout = Layout.of(SHAPES)
    blocks, values = codec.blocks(layout), random(layout.num_elements, 0)
    payload = codec.encode(values, blocks, DRAW)
    calls: list[Callable[[], Tensor]] = [
        lambda: codec.encode(values, blocks, DRAW),
        lambda: codec.decode(payload, blocks, DRAW),
    ]
    for call in calls:
        address = call().data_ptr()
        assert call().data_ptr() == address


# -- exchanges --------------------------------------------------------------------------------------------------------


class Takes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which operations of torch give memory that their arguments have not, if it is `limit` bytes or more."""

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in known and out.nbytes >= self.limit:
            self.found.append(str(func))
        return out


class Watched(Workers):
    """What the exchanges take, but not what carrying out the collectives takes."""

    takes = Takes(1 << 62)

    def drive(self, generators: list[Steps]) -> None:
        super().drive([self._watch(generator) for generator in generators])

    def _watch(self, steps: Steps) -> Steps:
        result: Tensor | None = None
        while True:
            try:
                with self.takes:
                    asked = next(steps) if result is None else steps.send(result)
            except StopIteration:
                return
            result = yield asked


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("compression", [*CODECS, *AROUND, TopK(0.1)], ids=repr)
def test_rounds_in_kept_memory_give_the_bits_of_rounds_in_new_memory(
    compression: Compression, size: int, tiny_units: None
) -> None:
    keeping, fresh = Workers(compression, SHAPES, size), Workers(compression, SHAPES, size)
    for number in range(4):
        fresh.kept = [{} for _ in range(size)]
        grads = [random(keeping.layout.num_elements, 10 * number + rank) for rank in range(size)]
        for one, other in zip(keeping.round(grads), fresh.round(grads), strict=True):
            assert torch.equal(one, other)


class Recorded(Workers):
    """What every worker asks for, in order."""

    def carry_out(self, asked: list[Collective]) -> list[Tensor]:
        self.asked = [*getattr(self, "asked", []), asked]
        return super().carry_out(asked)


def test_padding_is_zeros_whatever_the_memory_held(tiny_units: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BufferPool.empty
    monkeypatch.setattr(BufferPool, "empty", lambda self, *what: real(self, *what).fill_(255))
    codec, workers = Int8(64), Recorded(Int8(64), SHAPES, 3)
    lengths = [codec.num_bytes(part.blocks) for part in share_out(codec.blocks(workers.layout), 3)]
    workers.round([random(workers.layout.num_elements, rank) for rank in range(3)])

    (first, second), shortest = workers.asked, lengths.index(min(lengths))
    assert min(lengths) < max(lengths)
    for one in first:
        assert isinstance(one, Transpose) and not one.rows[shortest, lengths[shortest] :].any()
    gathered = second[shortest]
    assert isinstance(gathered, Gather) and len(gathered.row) == max(lengths) and not gathered.row[lengths[shortest] :].any()


@pytest.mark.skipif(not has_numba(), reason="torch takes memory of its own")
@pytest.mark.parametrize("size", [2, 3])  # gathered, and in two phases
@pytest.mark.parametrize("compression", LARGE, ids=repr)
def test_after_the_first_rounds_nothing_large_is_taken(
    compression: Compression, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large: an eighth of the values, in bytes, or more. Of a codec's scales and bounds there is less."""
    monkeypatch.setattr(buffer_pool, "UNIT_BYTES", 2 << 10)
    workers = Watched(compression, [("a", (16, 1024))], size)
    grads = [random(workers.layout.num_elements, rank) for rank in range(size)]
    for first in (True, False):
        workers.takes = Takes(2 << 10)
        for _ in range(2):
            workers.round(grads)
        assert bool(workers.takes.found) == first, workers.takes.found


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compress", "dtype", "size"),
    [
        (BFloat16(), torch.bfloat16, 2),
        (ErrorFeedback(Sign(16)), torch.float32, 2),
        (ErrorFeedback(Sign(16)), torch.bfloat16, 3),
        (Int8(16), torch.float32, 3),
    ],
)
def test_training_over_a_wire_gives_the_same_bits(
    compress: Compression, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    building = threading.Lock()

    def program(job: Job) -> list[Tensor]:
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))  # not tried out here
        with building, torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Linear(9, 13).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = distribute(model, optimizer, Strategy(compress=compress, schedule=AfterBackward()), job=job)
        for number in range(5):
            model(random(36, 10 * number + job.rank).view(4, 9).to(dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    plain = run_jobs(size, program)
    monkeypatch.setattr(buffer_pool, "UNIT_BYTES", 16)
    for one, other in zip(plain, run_jobs(size, program), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
