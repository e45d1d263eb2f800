"""Which parameters a model has, and where each one's gradient goes: a bucket and a slot in it, or none if it is sparse."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stretto.engine.bucket import Bucket
from stretto.engine.training import Named, Training
from stretto.engine.watch import Watch


class Places:
    """The parameters as they are now. Made anew when they change."""

    def __init__(self, model: nn.Module, training: Training[Any]) -> None:
        wanted: list[Named] = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        rows = _sparse_parameters(model)
        self.sparse = [(name, p) for name, p in wanted if p in rows]
        self.buckets: list[Bucket] = list(training.arrange([(name, p) for name, p in wanted if p not in rows], self.sparse))
        self.dense = [named for bucket in self.buckets for named in zip(bucket.names, bucket.parameters, strict=True)]
        self.slots = [(bucket, slot) for bucket in self.buckets for slot in range(len(bucket.parameters))]
        self.of = {bucket.parameters[slot]: (bucket, slot) for bucket, slot in self.slots}
        self.known: set[Tensor] = set(model.parameters())
        self.watch = Watch(model)


def _sparse_parameters(model: nn.Module) -> set[Tensor]:
    """The parameters whose gradients torch makes sparse: embeddings that were asked to."""
    return {module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse}
