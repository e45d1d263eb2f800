"""What a worker had of its own, while the mean of all workers is in the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class OwnValues(NamedTuple):
    """One worker's parameters as one vector, and its buffers by the tensors that they are in."""

    weights: Tensor
    buffers: list[tuple[Tensor, Tensor]]

    def put_back_buffers(self) -> None:
        with torch.no_grad():
            for buffer, value in self.buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)

    def buffers_by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """Those whose values have changed since."""
        names = {id(buffer): name for name, buffer in model.named_buffers()}
        return {names[id(buffer)]: value for buffer, value in self.buffers if not torch.equal(buffer, value)}
