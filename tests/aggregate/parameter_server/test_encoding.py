"""Ranges whose gradients are compressed: what servers read and refuse, what they answer, and what they have left over."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.aggregate.parameter_server.client import ClientMachine, Enter, Export, Fill, Pull, PulledPayload, Push
from stretto.aggregate.parameter_server.encoded_sum import EncodedSum, residual_of, to_begin_with
from stretto.aggregate.parameter_server.encoding import (
    RangeBlocks,
    as_bytes,
    encodings,
    read_compression,
    refusal,
    unit_of,
    writing_in,
)
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import (
    CodecRound,
    PullValues,
    PushGradient,
    PushTaken,
    RequestRefused,
    ValuesPulled,
)
from stretto.aggregate.parameter_server.range_state import RangeState
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.compress.by_parameter import ByParameter
from stretto.compress.codec import Codec, Compression
from stretto.compress.dynamic8 import Dynamic8
from stretto.compress.e3m0 import E3M0
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.exchange import keys_of_reply
from stretto.compress.float16 import Float16
from stretto.compress.int8 import Int8
from stretto.compress.layout import Blocks, Layout
from stretto.compress.none import NoCompression
from stretto.compress.one_bit import OneBit
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.qsgd import QSGD
from stretto.compress.random_k import RandomK
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sign import Sign
from stretto.compress.tern_grad import TernGrad
from stretto.compress.threshold import Threshold
from stretto.compress.top_k import TopK
from stretto.compress.warm_up import WarmUp
from stretto.errors import ConfigurationError, MalformedPayload
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.synchronous import Synchronous
from stretto.testing.faults import Kill, Pause
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

CODECS: list[Codec] = [
    Float16(), Int8(block=8), Dynamic8(block=8), E3M0(block=8), QSGD(bucket=8), TernGrad(block=8), OneBit(), Sign(block=8),
    TopK(0.2), RandomK(0.2), RandomK(0.2, scaled=True), Threshold(0.5),
]  # fmt: skip
SHAPES = {"matrix": (6, 8), "bias": (5,), "last": (7,)}


def served(compression: Compression, group: str = "g") -> list[ServedParameter]:
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    return [ServedParameter(n, sizes[n], group, shape, unit_of(compression, n, shape)) for n, shape in SHAPES.items()]


class Served:
    """A model that is compressed so: its ranges, and what a worker does with them."""

    def __init__(self, compression: Compression, range_bytes: int = 64) -> None:
        self.compression = compression
        self.parameters = served(compression)
        self.layout = RangeLayout(self.parameters, range_bytes)
        self.blocks = RangeBlocks(self.layout.ranges, self.parameters)
        self.encoding_of = encodings(self.layout.ranges, self.parameters, {"g": repr(compression)})

    def make_values(self, index: int, values: memoryview | None) -> EncodedSum:
        encoding = self.encoding_of(index)
        assert encoding is not None
        return EncodedSum(encoding, self.layout.ranges[index].slices)

    def codec_in(self, draw: int) -> Codec:
        writing = writing_in(self.compression, draw)
        assert writing is not None
        return writing.codec

    def payload(self, index: int, values: Tensor, draw: int, rank: int) -> bytes:
        codec = self.codec_in(draw)
        return codec.encode(values, self.blocks.of(index, codec), RandomKeys.of_round(draw, rank)).numpy().tobytes()

    def reply(self, index: int, payload: bytes | memoryview, draw: int) -> Tensor:
        codec = self.codec_in(draw)
        keys = keys_of_reply(codec, RandomKeys.of_round(draw, 0))
        return codec.decode(as_bytes(payload), self.blocks.of(index, codec), keys)

    def values(self, index: int, draw: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * draw + 10 * index + rank)
        return torch.randn(self.layout.ranges[index].numel, generator=generator)

    def server(self, rank: int, servers: Sequence[int], workers: Sequence[int], replicas: int = 0) -> ServerMachine:
        return ServerMachine(
            rank, self.layout, servers=servers, workers=workers, sync=Synchronous(), make_values=self.make_values,
            replicas=replicas, encoding_of=self.encoding_of,
        )  # fmt: skip


# -- which codecs -----------------------------------------------------------------------------------------------------


class MyCodec(Sign):
    """A user's own."""


@pytest.mark.parametrize(
    ("compression", "why"),
    [
        (PowerSGD(2), "drives rounds of its own"),
        (ErrorFeedback(PowerSGD(2)), "drives rounds of its own"),
        (MyCodec(), "a codec of your own"),
        (ByParameter(("*.bias", NoCompression()), ("*", PowerSGD(2))), "drives rounds of its own"),
        (WarmUp(3, ErrorFeedback(MyCodec())), "a codec of your own"),
    ],
    ids=repr,
)
def test_what_servers_cannot_read_is_said_with_its_reason(compression: Compression, why: str) -> None:
    assert why in (refusal(compression, steps=False) or "")


@pytest.mark.parametrize("compression", [EF21(TopK(0.1)), Sign(vote=True)], ids=repr)
def test_what_needs_everybodys_mean_is_not_for_servers_that_step(compression: Compression) -> None:
    assert refusal(compression, steps=False) is None and refusal(compression, steps=True) is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("__import__('os').system('true')", "not understood"),
        ("PowerSGD(2)", "'PowerSGD' is not known"),
        ("ErrorFeedback(ErrorFeedback(Sign()))", "remembers"),
        ("3", "not a codec"),
        ("Sign(block=0)", "at least 1"),
        ("WarmUp(1, 2)", "not a compression"),
        ("Sign(" + " " * 5000 + ")", "at most 4096"),
    ],
)
def test_a_server_builds_nothing_that_is_not_in_its_list(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        read_compression(text)


@pytest.mark.parametrize("shape", [(6, 9), (-6, -8), (48, 0)])
def test_a_shape_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    parameters = [ServedParameter("matrix", 48, "g", shape)]
    with pytest.raises(ConfigurationError, match="has 48 elements"):
        encodings(RangeLayout(parameters).ranges, parameters, {"g": "Sign()"})


# -- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [one for one in CODECS if one.splits], ids=repr)
@settings(max_examples=30)
@given(range_bytes=st.integers(40, 300), seed=st.integers(0, 3))
def test_what_is_sent_does_not_depend_on_where_ranges_are_cut(codec: Codec, range_bytes: int, seed: int) -> None:
    """Where a block fits into a range. And it is as long as the formula says of the whole."""
    cut = Served(codec, range_bytes)
    whole = codec.blocks(Layout.of(SHAPES.items()))
    values = torch.randn(whole.num_elements, generator=torch.Generator().manual_seed(seed))
    keys = RandomKeys.of_round(seed, 1)
    start, decoded, num_bytes = 0, [], 0
    for each in cut.layout.ranges:
        blocks = cut.blocks.of(each.index, codec)
        payload = codec.encode(values[start : start + each.numel], blocks, keys)
        decoded.append(codec.decode(payload, blocks, keys))
        start, num_bytes = start + each.numel, num_bytes + len(payload)
    assert torch.equal(torch.cat(decoded), codec.decode(codec.encode(values, whole, keys), whole, keys))
    assert num_bytes == codec.num_bytes(whole)


def test_where_a_block_is_longer_than_a_range_each_piece_is_a_tensor_of_its_own() -> None:
    cut = Served(TopK(0.1), range_bytes=64)
    pieces = [each for each in cut.layout.ranges if each.names == ["matrix"]]
    assert len(pieces) == 3
    blocks = [cut.blocks.of(each.index, TopK(0.1)) for each in pieces]
    assert all(len(one) == 1 and one.num_elements == 16 for one in blocks)
    assert len({int(one.keys[0]) for one in blocks}) == 3  # other random numbers for each


# -- one server -------------------------------------------------------------------------------------------------------


def tell(machine: ServerMachine, worker: int, header: Any, payload: bytes = b"") -> list[Any]:
    return list(machine.on_message(0.0, worker, header, memoryview(payload)))


def push(model: Served, index: int, clock: int, drawn: CodecRound | None) -> PushGradient:
    return PushGradient(model.layout.digest, 0, 1, index, clock, 0, 1.0, {}, drawn=drawn)


def bad_payloads(codec: Codec, good: bytes, blocks: Blocks) -> list[bytes]:
    """Too short, too long, and what no encoder writes, where there is such a thing of that length."""
    bad = [b"", good[:-1], good + b"\0"]
    return bad + ([b"\xff" * len(good)] if not isinstance(codec, Float16) or good else [])


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_malformed_payload_is_refused_with_its_sender_and_changes_nothing(codec: Codec) -> None:
    model = Served(ErrorFeedback(codec) if codec.no_contraction is None and codec.no_residual is None else codec)
    machine = model.server(9, [9], [0, 1])
    machine.on_start(0.0)
    good = [model.payload(0, model.values(0, 0, rank), 0, rank) for rank in (0, 1)]
    assert not tell(machine, 0, push(model, 0, 0, CodecRound(0, [])), good[0])
    before = machine.served()[0].header(), machine.served()[0].values.export()
    drawn = CodecRound(0, [])
    wrong: list[tuple[CodecRound | None, bytes, str]] = [
        *((drawn, payload, "it is nothing that") for payload in bad_payloads(codec, good[1], model.blocks.of(0, codec))),
        (None, good[1], "it is of None, and that of rank 0"),
        (CodecRound(7, []), good[1], "and that of rank 0 at the same clock"),
    ]
    for said, payload, reason in wrong:
        (sent,) = tell(machine, 1, push(model, 0, 0, said), payload)
        assert isinstance(sent.header, RequestRefused) and "of rank 1 for range 0" in sent.header.reason
        assert reason in sent.header.reason
        assert (machine.served()[0].header(), machine.served()[0].values.export()) == before
    other = model.server(9, [9], [0, 1])
    other.on_start(0.0)
    for said, reason in (
        (None, "it is not encoded"),
        (CodecRound(-1, []), "which there cannot be"),
        (CodecRound(0, [(0, 99)]), "a range with"),
        (CodecRound(0, [(1, 0)]), "a range with"),
    ):
        (sent,) = tell(other, 1, push(model, 0, 0, said), good[1])
        assert reason in sent.header.reason
    answers = tell(machine, 1, push(model, 0, 0, drawn), good[1])  # the server goes on
    assert [type(each.header) for each in answers] == [PushTaken, PushTaken]


def test_a_push_that_waits_for_others_holds_neither_the_memory_of_the_wire_nor_a_decoded_copy() -> None:
    model = Served(ErrorFeedback(Sign(block=8)))
    machine = model.server(9, [9], [0, 1])
    machine.on_start(0.0)
    for clock in range(2):
        for rank in (0, 1):
            wire = np.frombuffer(model.payload(0, model.values(0, clock, rank), clock, rank), np.uint8).copy()
            came = weakref.ref(wire)
            list(machine.on_message(0.0, rank, push(model, 0, clock, CodecRound(clock, [])), wire.data))
            del wire
            assert came() is None


def test_an_encoded_push_to_a_range_that_takes_float32_is_refused() -> None:
    parameters = served(NoCompression())
    layout = RangeLayout(parameters)
    assert encodings(layout.ranges, parameters, {})(0) is None
    machine = ServerMachine(9, layout, servers=[9], workers=[0], sync=Synchronous(), make_values=Served(Sign()).make_values)
    machine.on_start(0.0)
    header = PushGradient(layout.digest, 0, 1, 0, 0, 0, 1.0, {}, drawn=CodecRound(0, []))
    (sent,) = tell(machine, 0, header, bytes(layout.ranges[0].num_bytes))
    assert "come as float32" in sent.header.reason


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_servers_that_step_refuse_it_too_and_apply_what_is_right(codec: Codec) -> None:
    model = Served(codec)
    size = model.layout.ranges[0].numel

    def make_values(index: int, values: memoryview | None) -> RangeState:
        return RangeState(torch.zeros(model.layout.ranges[index].numel), OptimizerSpec("SGD", {"lr": 1.0}))

    machine = ServerMachine(
        9, model.layout, servers=[9], workers=[0, 1], sync=Asynchronous(), make_values=make_values, filled=True,
        encoding_of=model.encoding_of,
    )  # fmt: skip
    machine.on_start(0.0)
    good = model.payload(0, model.values(0, 5, 1), 5, 1)
    before = machine.served()[0].header(), machine.served()[0].values.export()
    for payload in bad_payloads(codec, good, model.blocks.of(0, codec)):
        (sent,) = tell(machine, 1, push(model, 0, 0, CodecRound(5, [])), payload)
        assert isinstance(sent.header, RequestRefused) and "of rank 1 for range 0" in sent.header.reason
        assert (machine.served()[0].header(), machine.served()[0].values.export()) == before
    (sent,) = tell(machine, 1, push(model, 0, 0, CodecRound(5, [])), good)
    assert isinstance(sent.header, PushTaken) and sent.header.applied
    decoded = codec.decode(as_bytes(good), model.blocks.of(0, codec), RandomKeys.of_round(5, 0))
    (pulled,) = tell(machine, 1, PullValues(model.layout.digest, 0, 1, 0, 1, -1))
    values = -decoded
    if isinstance(codec, Float16):
        assert pulled.payload.nbytes == 2 * size
        assert torch.equal(as_bytes(pulled.payload).view(torch.float16).float(), values)
    else:
        assert torch.equal(as_bytes(pulled.payload).view(torch.float32), values)


# -- what is left over ------------------------------------------------------------------------------------------------


def handed_out(model: Served, values: EncodedSum, total: Tensor, draw: int, unheard: list[tuple[int, int]]) -> Tensor:
    values.hand_out(total.numpy(), 3.0, CodecRound(draw, unheard))
    return model.reply(0, values.value(), draw)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", [Sign(block=8), TopK(0.1), OneBit(), Float16()], ids=repr)
def test_what_was_not_heard_is_said_again_and_what_was_is_not(codec: Codec) -> None:
    """A range of several parameters, of which some are not heard in some rounds."""
    model = Served(ErrorFeedback(codec), range_bytes=1 << 10)
    (each,) = model.layout.ranges
    values, lengths = model.make_values(0, None), [piece.stop - piece.start for piece in each.slices]
    given = heard = torch.zeros(each.numel, dtype=torch.float64)
    unheard: list[tuple[int, int]] = []
    draw = 0
    for number in range(12):
        total = 3 * model.values(0, number, 0)
        reply = handed_out(model, values, total, draw, unheard)
        unheard = [[], [(0, 3)], [(1, 2)], [(0, 1), (2, 3)]][number % 4]
        is_heard = [not any(first <= place < last for first, last in unheard) for place in range(len(lengths))]
        mask = torch.repeat_interleave(torch.tensor(is_heard), torch.tensor(lengths))
        given, heard = given + total / 3 * mask, heard + reply * mask
        draw += unheard != [(0, 3)]
    left = residual_of(memoryview(values.export()), each.slices, unheard)
    assert left is not None and bool(left.any())
    assert torch.allclose(heard + left, given, atol=1e-4)


def test_a_round_that_nobody_heard_leaves_no_trace() -> None:
    model = Served(ErrorFeedback(Sign(block=8)), range_bytes=1 << 10)
    one, other = model.make_values(0, None), model.make_values(0, None)
    for values in (one, other):
        handed_out(model, values, model.values(0, 0, 0), 0, [])
    handed_out(model, other, model.values(0, 9, 9), 1, [])  # nobody uses it
    expected = handed_out(model, one, model.values(0, 1, 0), 1, [])
    assert torch.equal(handed_out(model, other, model.values(0, 1, 0), 1, [(0, 3)]), expected)


def test_a_sum_beyond_float32_leaves_finite_numbers_behind() -> None:
    model = Served(ErrorFeedback(TopK(0.5)), range_bytes=1 << 10)
    values = model.make_values(0, None)
    total = torch.full((60,), 1.0)
    total[:3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    values.hand_out(total.numpy(), 3.0, CodecRound(0, []))
    assert bool(model.reply(0, values.value(), 0).isfinite().all())  # type: ignore[arg-type]


def test_what_was_exported_goes_on_with_the_same_bytes_and_nothing_else_is_taken() -> None:
    model = Served(ErrorFeedback(Sign(block=8)), range_bytes=1 << 10)
    values, copy = model.make_values(0, None), model.make_values(0, None)
    for draw in range(3):
        handed_out(model, values, model.values(0, draw, 0), draw, [])
        copy.install(memoryview(values.export()))
        assert copy.export() == values.export() and bytes(copy.value()) == bytes(values.value())
    exported = values.export()
    nan = np.full(60, np.nan, np.float32).tobytes()
    for wrong in (b"", exported[:-1], exported + b"\0", exported[:-240] + nan, b"\xff" * 100, b"\0" * 8 + b"\3" + 3 * nan):
        with pytest.raises(MalformedPayload):
            copy.install(memoryview(wrong))
        assert copy.export() == exported
    residual = residual_of(memoryview(exported), model.layout.ranges[0].slices, [])
    assert residual is not None
    copy.install(memoryview(to_begin_with(residual)))
    assert bytes(copy.value()) == bytes(values.value())  # somebody may have yet to read it
    again = residual_of(memoryview(copy.export()), model.layout.ranges[0].slices, [])
    assert again is not None and torch.equal(again, residual)


# -- with faults ------------------------------------------------------------------------------------------------------

ROUNDS = 5
MODEL = NetworkModel(Link(latency_s=1e-3, jitter=ExponentialDelay(4e-3), loss=0.02, retransmit_s=0.05), detect_s=0.02)
SERVERS = [10, 11, 12]


class Rounds:
    """Workers that push and pull, round after round, each with its own residual; servers die meanwhile."""

    def __init__(self, model: Served, seed: int, num_workers: int, faults: list[Any]) -> None:
        self.model = model
        self.network = VirtualNetwork(seed=seed, model=MODEL, faults=faults, reliable=True)
        workers = list(range(num_workers))
        for rank in SERVERS:
            self.network.add(rank, model.server(rank, SERVERS, workers, replicas=1))
        self.replies: dict[tuple[int, int, int], bytes] = {}  # by worker, range and round
        self.pushed: Counter[int] = Counter()  # bytes, by range
        self.ended: set[int] = set()
        for rank in workers:
            self.network.add(rank, ClientMachine(rank, model.layout, servers=SERVERS, replicas=1))
            entered = self.network.request(rank, Enter())
            entered.add_done_callback(lambda _, rank=rank: self._begin(rank, 0))  # type: ignore[misc]

    def _begin(self, rank: int, clock: int) -> None:
        if clock == ROUNDS:
            self.ended.add(rank)
            return
        waiting = set(range(len(self.model.layout)))

        def came(index: int, answer: Future[PulledPayload]) -> None:
            self.replies[rank, index, clock] = answer.result().payload
            waiting.discard(index)
            if not waiting:
                self._begin(rank, clock + 1)

        for index in range(len(self.model.layout)):
            payload = self.model.payload(index, self.model.values(index, clock, rank), clock, rank)
            self.pushed[index] += len(payload)
            self.network.request(rank, Push(index, clock, payload, {}, 0, drawn=CodecRound(clock, [])))
            pull = self.network.request(rank, Pull(index, clock + 1, None))
            pull.add_done_callback(lambda answer, index=index: came(index, answer))  # type: ignore[misc]


def run(model: Served, seed: int, num_workers: int, faults: list[Any]) -> Rounds:
    rounds = Rounds(model, seed, num_workers, faults)
    rounds.network.run_until(lambda: len(rounds.ended) == num_workers, until_s=30)
    assert len(rounds.ended) == num_workers, f"seed {seed}: only {rounds.ended} have ended"
    return rounds


def expected(model: Served, num_workers: int) -> dict[tuple[int, int], bytes]:
    """By range and round: what one server answers that nothing happens to."""
    out = {}
    for index in range(len(model.layout)):
        values = model.make_values(index, None)
        for draw in range(ROUNDS):
            codec, total = model.codec_in(draw), torch.zeros(model.layout.ranges[index].numel)
            for rank in range(num_workers):
                payload = as_bytes(model.payload(index, model.values(index, draw, rank), draw, rank))
                codec.add_decoded(payload, model.blocks.of(index, codec), RandomKeys.of_round(draw, 0), total)
            values.hand_out(total.numpy(), float(num_workers), CodecRound(draw, []))
            out[index, draw] = bytes(values.value())
    return out


SEEDS = [pytest.param(range(12), id="12"), pytest.param(range(12, 150), id="138 more", marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("compression", [ErrorFeedback(Sign(block=8)), ErrorFeedback(TopK(0.2)), QSGD(bucket=8)], ids=repr)
def test_whatever_dies_all_workers_read_the_same_bytes_as_if_nothing_had(compression: Compression, seeds: range) -> None:
    """One server of three dies, at another moment each time, and one stands still; it may die too, when copies have been made."""
    fired: Counter[str] = Counter()
    model = Served(compression)
    for seed in seeds:
        num_workers = (1, 2, 3, 4)[seed % 4]
        dies, stalls = SERVERS[seed % 3], SERVERS[(seed + 1) % 3]
        faults = [Kill(dies, at_s=0.01 * (seed % 23) + 0.01), Pause(stalls, at_s=0.02, for_s=0.015)]
        faults += [Kill(stalls, at_s=0.01 * (seed % 23) + 0.16)] if seed % 2 else []
        rounds, wanted = run(model, seed, num_workers, faults), expected(model, num_workers)
        fired += Counter(fault.partition("(")[0] for fault in rounds.network.fired)
        assert {wanted[index, draw] == reply for (_, index, draw), reply in rounds.replies.items()} == {True}
        assert len(rounds.replies) == num_workers * len(wanted)
    assert fired["Kill"] > len(seeds) and fired["Pause"] > 0.8 * len(seeds), fired


def test_a_copy_that_forgets_what_its_head_had_left_over_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    export = EncodedSum.export

    def forgets(self: EncodedSum) -> bytes:
        self._residual = self._before = None
        return export(self)

    monkeypatch.setattr(EncodedSum, "export", forgets)
    with pytest.raises(AssertionError):
        test_whatever_dies_all_workers_read_the_same_bytes_as_if_nothing_had(ErrorFeedback(Sign(block=8)), range(8))


def test_what_was_left_over_comes_back_to_servers_without_touching_what_is_still_to_be_read() -> None:
    model = Served(ErrorFeedback(Sign(block=8)))
    network = VirtualNetwork(seed=1, model=MODEL, reliable=True)
    for rank in SERVERS:
        network.add(rank, model.server(rank, SERVERS, [0], replicas=1))
    network.add(0, ClientMachine(0, model.layout, servers=SERVERS, replicas=1))
    network.request(0, Enter())
    payload = model.payload(0, model.values(0, 0, 0), 0, 0)
    network.request(0, Push(0, 0, payload, {}, 0, drawn=CodecRound(0, [])))
    residual = torch.linspace(-1, 1, model.layout.ranges[0].numel)
    network.request(0, Fill(0, to_begin_with(residual), exported=True))
    pull, exported = network.request(0, Pull(0, 1, None)), network.request(0, Export(0))
    network.run(until_s=5)
    assert pull.result().payload == expected(model, 1)[0, 0]
    found = residual_of(memoryview(exported.result().content), model.layout.ranges[0].slices, [])
    assert found is not None and torch.equal(found, residual)
    assert isinstance(pull.result().header, ValuesPulled)
