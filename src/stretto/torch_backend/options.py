"""How the collectives of one process group travel."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.collectives import catalogue
from stretto.collectives.plan import Kind
from stretto.compress.codec import Codec, Compression
from stretto.compress.none import NoCompression
from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """What `torch.distributed.init_process_group("stretto", pg_options=...)` and `new_group(pg_options=...)` take.

    `algorithm`: how all-reduces travel, as in `stretto.all_reduce`. "auto" measures the links when the group is made; without
    one it follows from the length alone. `compress`: how the sums and means of float32, float16 and bfloat16 tensors of 1,024
    elements and more are written on the wire, by all-reduce and by reduce-scatter: a codec that keeps no state.
    """

    algorithm: str | None = None
    compress: Compression = NoCompression()  # noqa: RUF009  # a frozen value

    def __post_init__(self) -> None:
        if self.algorithm not in (None, "auto"):
            catalogue.find(Kind.ALL_REDUCE, self.algorithm)
        if not isinstance(self.compress, Compression):
            raise ConfigurationError(
                f"GroupOptions(compress={self.compress!r}): this is no compression. Write a codec, such as stretto.Int8()."
            )
        why = _refusal(self.compress)
        if why is not None:
            raise ConfigurationError(
                f"GroupOptions(compress={self.compress!r}): {why}. A process group is given buffers without names, so that "
                f"nothing can be remembered for a parameter from one step to the next.\n"
                f"Use a codec that stands for itself, BFloat16(), Int8() or QSGD() for instance; or train with "
                f"stretto.distribute(model, optimizer, Strategy(compress=...)), which knows the parameters."
            )
        against = None if self.algorithm in (None, "auto") else self.compress.refusal(self.algorithm)
        if against is not None:
            raise ConfigurationError(f"{self!r}: {against}.\nLeave algorithm out, or write another.")


def _refusal(compression: Compression) -> str | None:
    if isinstance(compression, NoCompression):
        return None
    if not isinstance(compression, Codec) or compression.remembers or compression.hands_out != "mean":
        return "it keeps state"
    if compression.wants_feedback:
        return "what it leaves out is lost without error feedback, which keeps state"
    if not compression.splits and compression.payload_dtype is None:
        return "its payloads cannot be combined part by part"
    return None
