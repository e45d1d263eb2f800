"""Which parameters a model has, where each one's gradient goes (a bucket and a slot in it, or none if it is sparse), and what
lies there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stretto.engine.bucket import Bucket, refuse_graph
from stretto.engine.gradient_under_way import StandIn
from stretto.engine.training import Named, Training
from stretto.engine.watch import Watch
from stretto.engine.weak_hook import Orphan, when_accumulated
from stretto.plain_state import is_ours


class Places:
    """The parameters as they are now. Made anew when they change."""

    def __init__(self, model: nn.Module, training: Training[Any]) -> None:
        wanted: list[Named] = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        rows = _sparse_parameters(model)
        self.wanted = wanted
        self.sparse = [(name, p) for name, p in wanted if p in rows]
        self.buckets: list[Bucket] = list(training.arrange([(name, p) for name, p in wanted if p not in rows], self.sparse))
        self.dense = [named for bucket in self.buckets for named in zip(bucket.names, bucket.parameters, strict=True)]
        self.slots = [(bucket, slot) for bucket in self.buckets for slot in range(len(bucket.parameters))]
        self.of = {bucket.parameters[slot]: (bucket, slot) for bucket, slot in self.slots}
        self.known: set[Tensor] = set(model.parameters())
        self._own_are_watched = training.waits_before_use and not self.buckets
        self.hooks: dict[Tensor, RemovableHandle] = {}
        self.watch = Watch(model)

    @property
    def parameters(self) -> list[Tensor]:
        """Those that want a gradient."""
        return [parameter for _, parameter in (*self.dense, *self.sparse)]

    def set_hooks(
        self,
        on_gradient: Callable[[int, Tensor], None],
        on_last: Callable[[Tensor], None],
        on_own: Callable[[Tensor], None],
        orphan: Orphan,
    ) -> None:
        """Have `on_gradient(number of the slot, parameter)` called with every gradient; for parameters whose gradient stays where
        it is until the round ends, `on_last(parameter)`; without buckets, if it must be known which were read, `on_own`."""
        for number, (bucket, slot) in enumerate(self.slots):
            parameter = bucket.parameters[slot]
            if bucket.early or bucket.large[slot]:
                self.hooks[parameter] = when_accumulated(parameter, on_gradient, number, orphan=orphan)
            else:
                self.hooks[parameter] = when_accumulated(parameter, on_last, orphan=orphan)
        for _, parameter in self.sparse if self.buckets else ():
            self.hooks[parameter] = when_accumulated(parameter, on_last, orphan=orphan)
        for _, parameter in self.wanted if self._own_are_watched else ():
            self.hooks[parameter] = when_accumulated(parameter, on_own, orphan=orphan)

    def is_watched(self, bucket: Bucket) -> bool:
        """Whether a hook of the user's runs after ours. It must see the gradient: the bucket leaves at the end of backward."""
        hooks = [p._post_accumulate_grad_hooks for p in bucket.parameters]
        if max(map(len, hooks)) == 1:
            return False
        return not all(is_ours(next(reversed(mine.values()))) for mine in hooks)

    def holds_result(self, parameter: Tensor) -> bool:
        """Whether the gradient is what a round has left there. A mean of means is the mean only without loss: a new gradient of
        this worker's would lie on top of everybody's old one."""
        bucket, slot = self.of[parameter]
        return isinstance(parameter.grad, StandIn) or parameter.grad is bucket.views[slot]

    def name_of(self, parameter: Tensor) -> str:
        return next(name for name, other in self.wanted if other is parameter)

    def take_in(self) -> None:
        """Move gradients that are there to their places. What is on its way has none."""
        for parameter, (bucket, slot) in self.of.items():
            if parameter.grad is not None and not isinstance(parameter.grad, StandIn):
                bucket.put(slot)

    def leave_held_memory(self) -> None:
        """Before a round writes to it: somebody else may still hold a gradient of the last one."""
        for bucket in self.buckets:
            if bucket.is_held:
                bucket.leave_memory()

    def complete(self) -> None:
        """Fill the places of parameters that got no gradient in this round."""
        for bucket in self.buckets:
            if not bucket.sent:
                bucket.collect()
        for _, parameter in self.sparse:
            if parameter.grad is not None:
                refuse_graph(parameter.grad)

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _sparse_parameters(model: nn.Module) -> set[Tensor]:
    """The parameters whose gradients torch makes sparse: embeddings that were asked to."""
    return {module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse}
