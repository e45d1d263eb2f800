"""A worker's side of synchronous rounds that are compressed: payloads to the servers of each range, and means that come back.

A bucket's compression drives its round as it does among workers (`compress/exchange.py`), so error feedback, EF21 and warm-ups
are what they are there, with their state and how it is kept right. What they ask for here is `Serve`: a payload for each range of
the bucket.

What servers have not said yet is theirs while they serve. It is written to checkpoints as rank 0's own (`SERVER`), and comes back
to servers before rank 0 pushes again: no round ends without that push, so nobody has to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.aggregate.all_reduce.bucket import ReducedBucket
from stretto.aggregate.all_reduce.exchange import UnderWay
from stretto.aggregate.parameter_server.client import Export, Fill, Pull, PulledPayload, Push
from stretto.aggregate.parameter_server.encoded_sum import residual_of, to_begin_with
from stretto.aggregate.parameter_server.encoding import RangeBlocks, as_bytes, unit_of, writing_in
from stretto.aggregate.parameter_server.layout import ParameterRange, ServedParameter
from stretto.aggregate.parameter_server.messages import CodecRound
from stretto.aggregate.parameter_server.service import ServedModel
from stretto.collectives.request import InProgress
from stretto.collectives.urgency import Urgency
from stretto.compress.codec import Codec
from stretto.compress.exchange import blamed_on
from stretto.compress.rounds import ExchangeContext, Serve, Share, Sum
from stretto.errors import MalformedPayload, StrettoError
from stretto.protocol.loop import Running

AT_ONCE = 8  # ranges whose residuals are under way


class RangePlace(NamedTuple):
    """A range of the servers, and where it lies in its bucket's memory."""

    number: int
    start: int
    stop: int


def served_parameters(bucket: ReducedBucket) -> list[ServedParameter]:
    """A bucket is a group to the servers."""
    return [
        ServedParameter(
            place.name, place.size, str(bucket.number), place.shape, unit_of(bucket.compression, place.name, place.shape)
        )
        for place in bucket.layout.places
    ]


def codecs_of(buckets: Sequence[ReducedBucket]) -> dict[str, str]:
    return {str(bucket.number): repr(bucket.compression) for bucket in buckets if bucket.state is not None}


class EncodedRounds:
    """See the module's text. For one arrangement, and the service that goes with it. `all_of(answers)`: to wait for."""

    def __init__(
        self,
        service: Running,
        model: ServedModel,
        places: Mapping[ReducedBucket, Sequence[RangePlace]],
        all_of: Callable[[Sequence[Future[Any]]], InProgress],
        patience_s: float,
    ) -> None:
        self._service = service
        self._all_of = all_of
        self._ranges = model.layout().ranges
        self._blocks = RangeBlocks(self._ranges, model.parameters)
        self._places = {bucket: each for bucket, each in places.items() if bucket.state is not None}
        self._patience_s = patience_s
        self._clocks: dict[ReducedBucket, int] = {}  # of the round under way
        self._may_have_some = False  # servers, left over
        self._unheard: dict[ReducedBucket, list[bool]] = {}  # of each parameter, in the last round
        self._concluded: dict[ReducedBucket, ExchangeContext] = {}  # the last round of which that was said

    # -- rounds -------------------------------------------------------------------------------------------------------

    def begin(self, bucket: ReducedBucket, turn: ExchangeContext, clock: int) -> None:
        """This turn of the bucket's is with servers."""
        if self._places.get(bucket):
            self._clocks[bucket], self._may_have_some = clock, True
            turn.served = lambda codec: self._parts(bucket, codec)

    def _parts(self, bucket: ReducedBucket, codec: Codec) -> list[Share]:
        return [Share(start, stop, self._blocks.of(index, codec)) for index, start, stop in self._places[bucket]]

    def drive(self, bucket: ReducedBucket, values: Tensor, urgency: Urgency | None) -> UnderWay:
        """Replace `values`, which are this worker's, by the mean over all workers."""
        turn = bucket.turn
        assert turn is not None
        steps = bucket.compression.exchange(values, turn)
        asked = next(steps)
        if isinstance(asked, Sum):  # this round is not compressed
            tensor = asked.tensor
            memory = tensor.to("cpu", torch.float32)
            parts = [memory[start:stop] for _, start, stop in self._places[bucket]]
            asked = Serve((part.view(torch.uint8) for part in parts), _copier(parts))
            yield from self._serve(bucket, asked, turn.state.rounds, urgency)
            if memory is not tensor:
                tensor.copy_(memory)
        else:
            assert isinstance(asked, Serve), f"{bucket.compression!r} was to be refused"
            yield from self._serve(bucket, asked, turn.state.rounds, urgency)
        with suppress(StopIteration):
            steps.send(values)
            raise AssertionError(f"{bucket.compression!r} asks servers a second time in a round")

    def _serve(self, bucket: ReducedBucket, asked: Serve, number: int, urgency: Urgency | None) -> Iterator[InProgress]:
        places, clock, answers, pulls = self._places[bucket], self._clocks[bucket], [], []
        for (index, _, _), payload in zip(places, asked.payloads, strict=True):
            drawn = CodecRound(number, self._unheard_in(bucket, self._ranges[index]))
            push = Push(index, clock, payload.cpu().numpy().data, {}, 0, urgency=urgency, drawn=drawn)
            answers.append(self._service.request(push))
            pull = Pull(index, clock + 1, None, urgency=urgency)
            pulls.append(self._service.request(pull))
        yield self._all_of([*answers, *pulls])
        for place, answer in enumerate(pulls):
            reply: PulledPayload = answer.result()
            with blamed_on(reply.source, repr(bucket.compression)):
                asked.take(place, as_bytes(reply.payload).to(bucket.flat.device))

    # -- what was heard -----------------------------------------------------------------------------------------------

    def concluded(self, bucket: ReducedBucket, unheard: Sequence[bool]) -> None:
        """The round under way is over, and of these parameters of the bucket its mean is not used. Only the first word counts."""
        if bucket in self._places and bucket.turn is not None and self._concluded.get(bucket) is not bucket.turn:
            self._concluded[bucket] = bucket.turn
            self._unheard[bucket] = list(unheard)

    def _unheard_in(self, bucket: ReducedBucket, each: ParameterRange) -> list[tuple[int, int]]:
        flags = self._unheard.get(bucket)
        if flags is None or not any(flags):
            return []
        unheard = {name for name, flag in zip(bucket.names, flags, strict=True) if flag}
        intervals: list[tuple[int, int]] = []
        for number, name in enumerate(each.names):
            if name in unheard and intervals and intervals[-1][1] == number:
                intervals[-1] = (intervals[-1][0], number + 1)
            elif name in unheard:
                intervals.append((number, number + 1))
        return intervals

    # -- what servers have left over ----------------------------------------------------------------------------------

    def _remembering(self) -> Iterator[tuple[ReducedBucket, RangePlace]]:
        for bucket, places in self._places.items():
            assert bucket.state is not None
            writing = writing_in(bucket.compression, bucket.state.rounds)
            if writing is not None and writing.remembers:
                yield from ((bucket, place) for place in places)

    def left_over(self) -> dict[str, Tensor]:
        """What servers have not said yet, by parameter; nothing of those of which nothing is left."""
        asked = list(self._remembering())
        found: dict[str, Tensor] = {}
        vectors: dict[ReducedBucket, Tensor] = {}
        for (bucket, place), data in zip(asked, self._all([Export(place.number) for _, place in asked]), strict=True):
            each = self._ranges[place.number]
            residual = residual_of(memoryview(data.content), each.slices, self._unheard_in(bucket, each))
            if residual is not None:
                vector = vectors.setdefault(bucket, torch.zeros(bucket.layout.num_elements, dtype=torch.float32, device="cpu"))
                vector[place.start : place.stop] = residual
        for bucket, vector in vectors.items():
            for each_place in bucket.layout.places:
                found[each_place.name] = each_place.as_tensor(vector[each_place.start : each_place.stop]).contiguous()
        return found

    def go_on_with(self, residuals: Mapping[str, Tensor]) -> None:
        """Servers begin anew, and have this left over. Rank 0 only."""
        if not residuals and not self._may_have_some:
            return
        self._may_have_some = True
        fills = []
        vectors: dict[ReducedBucket, Tensor] = {}
        for bucket, place in self._remembering():
            if bucket not in vectors:
                vectors[bucket] = _joined(bucket, residuals)
            part = vectors[bucket][place.start : place.stop]
            fills.append(Fill(place.number, to_begin_with(part if bool(part.any()) else None), exported=True))
        self._all(fills)

    def forget(self) -> None:
        """The next round is the first of another history."""
        self._unheard.clear()

    def _all(self, requests: Sequence[Export | Fill]) -> list[Any]:
        results: list[Any] = []
        for start in range(0, len(requests), AT_ONCE):
            answers: list[Future[Any]] = [self._service.request(request) for request in requests[start : start + AT_ONCE]]
            for answer in answers:
                try:
                    results.append(answer.result(self._patience_s))
                except TimeoutError:
                    raise StrettoError(
                        f"the servers were asked for what they have left over of a codec, and have not answered within "
                        f"{self._patience_s:g} s."
                    ) from None
        return results


def _copier(parts: Sequence[Tensor]) -> Callable[[int, Tensor], None]:
    def take(number: int, reply: Tensor) -> None:
        if len(reply) != parts[number].nbytes:
            raise MalformedPayload(f"{len(reply)} bytes, not {parts[number].nbytes}")
        parts[number].copy_(reply.to("cpu").view(torch.float32))

    return take


def _joined(bucket: ReducedBucket, residuals: Mapping[str, Tensor]) -> Tensor:
    vector = torch.zeros(bucket.layout.num_elements, dtype=torch.float32, device="cpu")
    for place in bucket.layout.places:
        if place.name in residuals:
            vector[place.start : place.stop] = place.as_vector(residuals[place.name].to("cpu", torch.float32))
    return vector
