"""On a GPU: every codec says the same there as on the CPU, and the Triton kernels the same as the torch references."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from compress.together import Workers
from stretto.compress import dynamic8
from stretto.compress.bfloat16 import BFloat16
from stretto.compress.codec import Codec, Compression
from stretto.compress.demo import DeMo
from stretto.compress.dgc import DGC
from stretto.compress.dynamic8 import Dynamic8
from stretto.compress.e3m0 import E3M0
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.int8 import Int8
from stretto.compress.kernels import compiling
from stretto.compress.layout import Blocks, Layout
from stretto.compress.one_bit import OneBit
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.qsgd import QSGD
from stretto.compress.random_k import RandomK
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sign import Sign
from stretto.compress.state import CompressionState
from stretto.compress.tern_grad import TernGrad
from stretto.compress.threshold import Threshold
from stretto.compress.top_k import TopK
from stretto.errors import MalformedPayload

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: a thousand tests of the kernels", allow_module_level=True)

DRAW = RandomKeys.of_round(3, rank=1)
LARGEST = torch.finfo(torch.float32).max

LAYOUTS: dict[str, list[tuple[int, ...]]] = {
    "nothing": [],
    "nothing in it": [(0,), (3, 0)],
    "one": [(1,)],
    "single elements": [(1,)] * 70,
    "small tensors": [(1 + 7 * i % 23,) for i in range(60)],
    "holes": [(5,), (0,), (300,), (0,), (1,)],
    "even": [(64, 256), (4096,), (16,)],
    "tails": [(257,), (4097,), (255,), (100, 83), (1,), (12289,)],
    "large": [(3, 20001), (1 << 16,), (5,)],
}


def gaussian(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def one_hot(n: int) -> Tensor:
    x = torch.zeros(n)
    x[n // 2 : n // 2 + 1] = -3.0
    return x


def mixed(n: int) -> Tensor:
    """All magnitudes that there are, many zeros, and equals."""
    x = gaussian(n) * torch.logspace(-44, 37, n)
    x[::3] = 0.0
    x[1::7] = 0.25
    return x


VALUES: dict[str, Callable[[int], Tensor]] = {
    "gaussian": gaussian,
    "zeros": torch.zeros,
    "constant": lambda n: torch.full((n,), -0.37),
    "one hot": one_hot,
    "denormal": lambda n: gaussian(n) * 2.0**-140,
    "largest": lambda n: torch.where(gaussian(n) < 0, -LARGEST, LARGEST),
    "mixed": mixed,
}

AWKWARD = ("small tensors", "tails")  # with values of all kinds; other layouts with two kinds

WITH_KERNELS: list[Codec] = [
    Int8(), Int8(1), Int8(100), Int8(5000), Int8(stochastic=True), Int8(5000, stochastic=True),
    Sign(), Sign(1), Sign(100), Sign(9000), Sign(vote=True),
    BFloat16(), BFloat16(stochastic=True), BFloat16().among(3),
    TopK(0.001), TopK(0.01), TopK(0.2), TopK(1.0),
    QSGD(), QSGD(bits=2, norm="l2"), QSGD(bits=3), QSGD(bits=5, bucket=100), QSGD(bits=7, bucket=9000), QSGD(bits=8),
    TernGrad(), TernGrad(clip=None), TernGrad(clip=None, block=None), TernGrad(clip=2.3, block=9000),
    OneBit(), Dynamic8(), Dynamic8(100), Dynamic8(9000), Float16(), Float16().among(3),
]  # fmt: skip
OTHERS: list[Codec] = [
    E3M0(), E3M0(100), RandomK(0.1), RandomK(0.1, scaled=True), Threshold(0.5),
]  # fmt: skip


def sums(codec: Codec) -> bool:
    """Whether its scales are sums, whose last bit depends on the order."""
    if isinstance(codec, TernGrad):
        return codec.clip is not None
    return codec.norm == "l2" if isinstance(codec, QSGD) else isinstance(codec, Sign | OneBit)


def case(shapes: list[tuple[int, ...]], codec: Codec, make: Callable[[int], Tensor]) -> tuple[Tensor, Blocks]:
    layout = Layout.of((f"p{i}", shape) for i, shape in enumerate(shapes))
    return make(layout.num_elements), codec.blocks(layout)


def assert_same(codec: Codec, here: Tensor, there: Tensor) -> None:
    if sums(codec):
        torch.testing.assert_close(here, there.cpu(), rtol=1e-6, atol=1e-44)
    else:
        assert torch.equal(here, there.cpu())


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By Triton's kernels, or without Triton."""
    if request.param == "kernels":
        pytest.importorskip("triton")
    else:
        monkeypatch.setattr(compiling, "has_triton", lambda: False)
    return str(request.param)


def compare_all(codec: Codec, shapes: list[tuple[int, ...]], make: Callable[[int], Tensor]) -> None:
    """Encode, decode, encode_residual and add_decoded on both devices."""
    values, blocks = case(shapes, codec, make)
    on_gpu = values.cuda()
    payload, payload_on_gpu = codec.encode(values, blocks, DRAW), codec.encode(on_gpu, blocks, DRAW)
    assert torch.equal(on_gpu.cpu(), values), "encode changes nothing"
    assert payload_on_gpu.device.type == "cuda" and payload.shape == payload_on_gpu.shape
    if not sums(codec):
        assert torch.equal(payload, payload_on_gpu.cpu())
    decoded = codec.decode(payload, blocks, DRAW)
    assert_same(codec, decoded, codec.decode(payload_on_gpu, blocks, DRAW))
    assert torch.equal(decoded, codec.decode(payload.cuda(), blocks, DRAW).cpu()), "of the same bytes the same values"
    at_odd_address = torch.cat([torch.zeros(1, dtype=torch.uint8), payload]).cuda()[1:]
    total = torch.ones(len(values))
    total_on_gpu = total.cuda()
    codec.add_decoded(payload, blocks, DRAW, total)
    codec.add_decoded(at_odd_address, blocks, DRAW, total_on_gpu)
    assert torch.equal(total, total_on_gpu.cpu())
    if getattr(codec, "vote", False):
        return
    kept = on_gpu.clone()
    assert torch.equal(codec.encode_residual(kept, blocks, DRAW), payload_on_gpu)
    assert torch.equal(kept, on_gpu - codec.decode(payload_on_gpu, blocks, DRAW))


@pytest.mark.parametrize("codec", WITH_KERNELS, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_says_the_same_as_a_cpu(way: str, codec: Codec, layout: str) -> None:
    for kind in VALUES if way == "kernels" and layout in AWKWARD else ("gaussian", "mixed"):
        compare_all(codec, LAYOUTS[layout], VALUES[kind])


@pytest.mark.parametrize("codec", OTHERS, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codecs_without_gpu_kernels_run_there_in_torch(codec: Codec, layout: str) -> None:
    for kind in VALUES if layout in AWKWARD else ("gaussian", "mixed"):
        compare_all(codec, LAYOUTS[layout], VALUES[kind])


@pytest.mark.parametrize("codec", WITH_KERNELS, ids=repr)
def test_damaged_payloads_are_refused_where_a_cpu_refuses_them(way: str, codec: Codec) -> None:
    values, blocks = case([(70,), (3,), (1000,)], codec, mixed)
    payload = codec.encode(values, blocks, DRAW)
    chance = random.Random(5)
    for _ in range(60):
        damaged = payload.clone()
        for _ in range(chance.choice((1, 1, 3))):
            at = chance.randrange(8 * len(payload))
            damaged[at // 8] ^= 1 << (at % 8)
        assert refuses(codec, damaged.cuda(), blocks) == refuses(codec, damaged, blocks)
    for length in (0, len(payload) - 1):
        assert refuses(codec, payload[:length].cuda(), blocks)
    assert refuses(codec, torch.cat([payload, payload[:1]]).cuda(), blocks)


def refuses(codec: Codec, payload: Tensor, blocks: Blocks) -> bool:
    total = torch.zeros(blocks.num_elements, device=payload.device)
    try:
        codec.add_decoded(payload, blocks, DRAW, total)
    except MalformedPayload:
        with pytest.raises(MalformedPayload):
            codec.decode(payload, blocks, DRAW)
        return True
    assert bool(total.isfinite().all()) and bool(codec.decode(payload, blocks, DRAW).isfinite().all())
    return False


@pytest.mark.parametrize("codec", [OneBit(), Dynamic8(100), Dynamic8(9000)], ids=repr)
@pytest.mark.parametrize("sizes", [(70, 3, 1000), (3, 5001)], ids=repr)  # all rows of one tile, and one of two
def test_headers_that_no_encoder_writes_are_refused_where_a_cpu_refuses_them(
    way: str, codec: Codec, sizes: tuple[int, ...]
) -> None:
    values, blocks = case([(size,) for size in sizes], codec, gaussian)
    payload = codec.encode(values, blocks, DRAW)
    num_refused = 0
    for at in range(0, 4 * len(blocks) * (2 if isinstance(codec, OneBit) else 1), 4):
        for number in (float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 0.0, -1e-45):
            damaged = payload.clone()
            damaged[at : at + 4] = torch.tensor([number]).view(torch.uint8)
            refused = refuses(codec, damaged, blocks)
            assert refuses(codec, damaged.cuda(), blocks) == refused
            num_refused += refused
    assert num_refused >= 4 * len(blocks)


@pytest.mark.parametrize("sizes", [(70, 3, 1000), (3, 5001)], ids=repr)
def test_padding_of_rows_is_refused_where_it_is_not_zero(way: str, sizes: tuple[int, ...]) -> None:
    values, blocks = case([(size,) for size in sizes], OneBit(), gaussian)
    payload, end = OneBit().encode(values, blocks, DRAW), 8 * len(blocks)
    for size in sizes:
        end += (size + 7) // 8
        damaged = payload.clone()
        damaged[end - 1] ^= 0x80
        assert refuses(OneBit(), damaged.cuda(), blocks) == (size % 8 != 0)


def test_a_row_of_a_million_elements_and_one_of_three() -> None:
    """So many pieces that their sums are not added up at once."""
    pytest.importorskip("triton")
    for kind in ("gaussian", "mixed"):
        compare_all(OneBit(), [(3,), (1_100_003,)], VALUES[kind])


def ties(n: int) -> Tensor:
    """Numbers halfway between two codes, and 1, which makes the scale 1."""
    return torch.tensor([1.0, *dynamic8.halfway()]).repeat(n // 256 + 1)[:n]


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_the_nearest_code_is_found_at_and_beside_every_tie(way: str, step: int) -> None:
    def make(n: int) -> Tensor:
        beside = ties(n).view(torch.int32).add(step).view(torch.float32)
        return torch.where(ties(n) == 1.0, 1.0, beside)

    for codec in (Dynamic8(256), Dynamic8(), Dynamic8(5000)):
        compare_all(codec, [(5000,), (256, 3)], make)
        compare_all(codec, [(5000,), (256, 3)], lambda n: -make(n))


@pytest.mark.parametrize("codec", [Float16(), Float16().among(3)], ids=repr)
def test_every_half_and_what_lies_between_and_beside(way: str, codec: Codec) -> None:
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    at = torch.cat([halves, (halves[1:] + halves[:-1]) / 2, torch.tensor([65519.0, 65520.0, 1e30])]).view(torch.int32)
    values = torch.cat([at, at + 1, (at - 1).clamp(min=0)]).view(torch.float32)
    compare_all(codec, [(2 * len(values),)], lambda n: torch.cat([values, -values]))


def corner(n: int) -> Tensor:
    """Everything of importance in one place, where a sample hardly looks."""
    x = torch.zeros(n)
    x[n - 500 :] = gaussian(500)
    return x


def steps(n: int) -> Tensor:
    """Few different magnitudes, in bands of very different width."""
    return torch.floor(torch.rand(n, generator=torch.Generator().manual_seed(1)) ** 8 * 50)


def halves(n: int) -> Tensor:
    """As gradients of bfloat16 are: every magnitude many times."""
    return gaussian(n).bfloat16().float()


def pairs(n: int) -> Tensor:
    """Every magnitude twice, so that often one of two equals is chosen: the first."""
    return gaussian(n // 2 + 1).repeat_interleave(2)[:n] * (1 - 2 * (torch.arange(n) % 2))


@pytest.mark.parametrize("most_listed", [1024, 4], ids=["", "short lists"])  # short: the window is narrowed until all are equal
@pytest.mark.parametrize("fraction", [1e-6, 0.0001, 0.0005, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("make", [gaussian, mixed, corner, steps, one_hot, halves, pairs], ids=lambda make: make.__name__)
def test_the_largest_are_found_whatever_the_sample_says(
    make: Callable[[int], Tensor], fraction: float, most_listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from stretto.compress.kernels import top_k_cuda

    assert top_k_cuda.MOST_LISTED == 1024
    monkeypatch.setattr(top_k_cuda, "MOST_LISTED", most_listed)
    codec = TopK(fraction)
    values, blocks = case([(2_000_003,), (30_000,), (8_192,), (8_193,)], codec, make)
    expected = codec.encode(values, blocks, DRAW)
    for key in range(3):
        assert torch.equal(codec.encode(values.cuda(), blocks, RandomKeys(shared=0xFFFFFFFF - key)).cpu(), expected)


@pytest.mark.parametrize("fraction", [0.001, 0.1], ids=["listed", "bitmapped"])
@pytest.mark.parametrize("make", [gaussian, halves], ids=lambda make: make.__name__)
def test_the_largest_of_so_many_that_programs_take_several_spans(make: Callable[[int], Tensor], fraction: float) -> None:
    pytest.importorskip("triton")
    codec = TopK(fraction)
    values, blocks = case([(9_000_001,), (70_000,)], codec, make)
    expected = codec.encode(values, blocks, DRAW)
    on_gpu = values.cuda()
    payload = codec.encode_residual(on_gpu, blocks, DRAW)
    assert torch.equal(payload.cpu(), expected)
    assert torch.equal(codec.decode(payload, blocks, DRAW).cpu() + on_gpu.cpu(), values)


@pytest.mark.parametrize("fraction", [0.0001, 0.01, 0.5])
def test_the_largest_are_found_among_any_bits(fraction: float) -> None:
    """Infinities and all kinds of NaN included: nobody should send them, and nothing may be written where it does not belong."""
    pytest.importorskip("triton")
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    bits[::1000] |= 0x7FFFFFF0
    codec, values = TopK(fraction), bits.view(torch.float32)
    blocks = codec.blocks(Layout.of([("a", (30_000,)), ("b", (70_000,))]))
    ours = codec.encode(values.cuda(), blocks, DRAW).cpu()
    assert torch.equal(ours, codec.encode(values, blocks, DRAW))


@pytest.mark.parametrize("codec", WITH_KERNELS, ids=repr)
def test_values_that_begin_anywhere(codec: Codec) -> None:
    """After a call with values that begin at a multiple of 16 bytes, for which another variant of a kernel was compiled."""
    values, blocks = case([(64, 64), (4096,)], codec, gaussian)
    for first in (0, 1, 0, 2):
        memory = torch.empty(len(values) + 4, device="cuda")
        on_gpu = memory[first : first + len(values)].copy_(values)
        payload = codec.encode(on_gpu, blocks, DRAW)
        decoded = codec.decode(payload, blocks, DRAW)
        assert_same(codec, codec.decode(codec.encode(values, blocks, DRAW), blocks, DRAW), decoded)
        codec.add_decoded(payload, blocks, DRAW, on_gpu)
        assert torch.equal(on_gpu.cpu(), values + decoded.cpu())


@pytest.mark.parametrize("codec", WITH_KERNELS, ids=repr)
def test_what_was_worked_out_for_blocks_goes_with_them(codec: Codec) -> None:
    values, blocks = case([(20_000,), (5,)], codec, gaussian)
    codec.decode(codec.encode(values.cuda(), blocks, DRAW), blocks, DRAW)
    bounds = weakref.ref(blocks.bounds)
    del blocks
    gc.collect()
    assert bounds() is None


def test_two_threads_share_blocks_and_kernels() -> None:
    codecs: list[Codec] = [TopK(0.01), Int8(), Sign(), QSGD()]
    cases = [case([(300_000,), (5,)], codec, gaussian) for codec in codecs]
    expected = [codec.encode(values.cuda(), blocks, DRAW).cpu() for codec, (values, blocks) in zip(codecs, cases, strict=True)]

    def encoded(_: int) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            rounds = [[codec.encode(v.cuda(), b, DRAW) for codec, (v, b) in zip(codecs, cases, strict=True)] for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return [payload.cpu() for payload in rounds[-1]]

    with ThreadPoolExecutor(4) as threads:
        for payloads in threads.map(encoded, range(4)):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(payloads, expected, strict=True))


class GpuWorkers(Workers):
    def __init__(self, compression: Compression, named: list[tuple[str, tuple[int, ...]]], size: int) -> None:
        super().__init__(compression, named, size)
        self.states = [CompressionState(self.layout, torch.device("cuda")) for _ in range(size)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "compression",
    [
        ErrorFeedback(Int8()), ErrorFeedback(Sign()), ErrorFeedback(TopK(0.1)), ErrorFeedback(BFloat16()), Sign(vote=True),
        ErrorFeedback(PowerSGD(2)), DeMo(), DGC(0.1), EF21(TopK(0.1)), OneBitAdam(warm_up=1),
    ],
    ids=repr,
)  # fmt: skip
def test_three_rounds_end_as_on_a_cpu(compression: Compression, size: int) -> None:
    named = [("w", (40, 30)), ("b", (40,)), ("s", ())]
    here, there = Workers(compression, named, size), GpuWorkers(compression, named, size)
    for number in range(3):
        gradients = [gaussian(1241 + 10 * number + rank)[:1241] for rank in range(size)]
        expected = here.round(gradients)
        for mine, other in zip(there.round([gradient.cuda() for gradient in gradients]), expected, strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-4, atol=1e-5)
