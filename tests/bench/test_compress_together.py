"""P workers in one process: they end where a mean would, send what is declared, and only their own work is timed."""

from __future__ import annotations

import pytest
import torch

from stretto.bench.compress_gradients import layout_of, values_of
from stretto.bench.compress_settings import DEFAULT_CODECS, compression_of
from stretto.bench.compress_together import SharedBucket, Together
from stretto.compress.codec import Codec
from stretto.compress.none import NoCompression
from stretto.compress.random_numbers import RandomKeys

CPU = torch.device("cpu")
LAYOUT = layout_of(8193)  # two matrices of 64 x 64 with their biases would be 8320: one, and a head with a rest


def gradients(size: int) -> list[torch.Tensor]:
    return [values_of("gradient-like", LAYOUT, seed, CPU) for seed in range(size)]


def declared(bucket: SharedBucket, rank: int, size: int) -> int | None:
    return bucket.compression.bytes_sent(bucket.layout, rank, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_uncompressed_all_end_with_the_mean(size: int) -> None:
    values = gradients(size)
    mean = torch.stack(values).mean(0)
    Together(NoCompression(), LAYOUT, size, CPU).round(values)

    for value in values:
        torch.testing.assert_close(value, mean)


@pytest.mark.parametrize("word", DEFAULT_CODECS)
@pytest.mark.parametrize("size", [2, 3])
def test_all_end_with_the_same_bits_and_send_what_is_declared(word: str, size: int) -> None:
    together = Together(compression_of(word), LAYOUT, size, CPU)
    together.round(gradients(size))
    together.end_warm_up()
    values = gradients(size)
    spent = together.round(values)

    assert all(torch.equal(value, values[0]) for value in values) and bool(values[0].isfinite().all())
    assert spent.seconds > 0
    sent = [[declared(bucket, rank, size) for bucket in together.buckets] for rank in range(size)]
    if not any(one is None for row in sent for one in row):  # else it depends on the values, and only counting tells
        assert spent.bytes_sent == max(sum(one for one in row if one is not None) for row in sent)
    assert 0 < spent.bytes_sent < NoCompression().bytes_sent(LAYOUT, 0, size)


@pytest.mark.parametrize("word", ["Int8()", "BFloat16()", "TopK(0.01)", "RandomK(0.01)", "ErrorFeedback(Sign())"])
def test_a_worker_alone_gives_one_payload_and_gets_it_back_decoded(word: str) -> None:
    compression = compression_of(word)
    codec = getattr(compression, "codec", compression)
    assert isinstance(codec, Codec)
    given = gradients(1)[0]
    blocks, draw = codec.blocks(LAYOUT), RandomKeys.of_round(0, rank=0)
    payload = codec.encode(given, blocks, draw)
    got = given.clone()
    spent = Together(compression, LAYOUT, 1, CPU).round([got])

    assert spent.bytes_given == len(payload) and spent.bytes_sent == 0
    torch.testing.assert_close(got, codec.decode(payload, blocks, draw))


def test_tensors_with_another_answer_have_a_bucket_of_their_own_and_keep_their_place() -> None:
    together = Together(compression_of("PowerSGD(1)"), LAYOUT, 2, CPU)
    values = gradients(2)
    mean = torch.stack(values).mean(0)
    together.round(values)

    assert len(together.buckets) == 2
    vectors = [place for place in LAYOUT.places if len(place.shape) < 2]
    assert vectors
    for place in vectors:
        torch.testing.assert_close(values[1][place.start : place.stop], mean[place.start : place.stop])


@pytest.mark.parametrize("word", ["DGC(0.01)", "OneBitAdam(50)", "WarmUp(50, ErrorFeedback(Sign()))"])
def test_a_warm_up_is_over_when_it_is_said_to_be(word: str) -> None:
    together = Together(compression_of(word), LAYOUT, 2, CPU)
    before = together.round(gradients(2)).bytes_sent
    together.end_warm_up()

    assert together.round(gradients(2)).bytes_sent < before / 5
