"""Which buffers are averaged with the parameters, in the same vector."""

from __future__ import annotations

from stretto.aggregate.own_weights.admission import DTYPES
from stretto.engine.training import Named, Setting
from stretto.engine.watch import Watch


def averaged_buffers(setting: Setting) -> list[Named]:
    """Those of floating values that float32 can hold, such as the statistics of a BatchNorm; with buffers="local" none."""
    if not setting.broadcast_buffers:
        return []
    names = {id(buffer): name for name, buffer in setting.model.named_buffers()}
    return [(names[id(each)], each) for each in Watch(setting.model).buffers() if each.dtype in DTYPES and each.numel()]
