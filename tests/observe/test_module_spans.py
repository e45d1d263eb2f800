"""Spans of single modules: where they lie in forward and backward, what they are called, and that they leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stretto.observe.compute import trace_compute
from stretto.observe.trace import Span, Tracer


class Net(nn.Module):
    """Has a parameter of its own, a module without any, and a pair of modules that share theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = next(self.body.parameters())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.tied(self.body(x * self.scale))
        return result


def counting() -> Tracer:
    """A tracer whose clock ticks once each time it is read."""
    ticks = itertools.count()
    return Tracer(now=lambda: next(ticks))


def within(spans: list[Span], outer: Span) -> list[str]:
    """The modules whose spans lie inside of another span, in their order."""
    inside = (s for s in spans if s.category == "module" and outer.begin_ns <= s.begin_ns and s.end_ns <= outer.end_ns)
    return [span.name for span in sorted(inside, key=lambda span: span.begin_ns)]


def one(spans: list[Span], name: str) -> Span:
    (found,) = (span for span in spans if span.name == name)
    return found


def test_each_module_with_parameters_has_a_span_in_forward_and_one_in_backward() -> None:
    tracer, model = counting(), Net()
    trace_compute(tracer, model, ())
    model(torch.ones(2, 4)).sum().backward()

    spans = tracer.spans
    assert within(spans, one(spans, "forward Net")) == ["body.0", "body.2", "tied"]
    backward = one(spans, "backward Net")
    assert within(spans, backward) == ["tied", "body.2", "body.0", "Net"]  # the shared weight is complete with body.0
    parts = sorted(s for s in spans if s.category == "module" and s.begin_ns >= backward.begin_ns)
    parts.sort(key=lambda span: span.begin_ns)
    assert parts[0].begin_ns == backward.begin_ns  # each begins where the one before it ended
    assert all(before.end_ns == after.begin_ns for before, after in itertools.pairwise(parts))


def open_forwards(model: Net) -> list[tuple[str, int]]:
    hook: Any = next(iter(model.tied._forward_pre_hooks.values()))
    return hook._method.__self__._modules  # type: ignore[no-any-return]


def test_after_a_pass_that_fails_the_next_ones_are_right() -> None:
    tracer, model = counting(), Net()
    handles = trace_compute(tracer, model, ())
    handle = model.tied.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)  # the module ends without having begun
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4))
    handle.remove()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    out = model(torch.ones(2, 4))
    out.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    model.body[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4))
    model.body[0]._forward_hooks.popitem()
    assert open_forwards(model) == []
    seen = len(tracer.spans)
    model(torch.ones(2, 4)).sum().backward()

    fresh = tracer.spans[seen:]
    assert within(fresh, one(fresh, "forward Net")) == ["body.0", "body.2", "tied"]
    assert within(fresh, one(fresh, "backward Net")) == ["tied", "body.2", "body.0", "Net"]
    for handle in handles:
        handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_module_that_fails_before_it_has_begun_does_not_end_another_one() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.child = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ZeroDivisionError):
                self.child(x)
            return x + self.shift

    tracer, tries = counting(), Tries()
    model = nn.Sequential(tries)
    trace_compute(tracer, model, ())
    tries.child.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
    model(torch.ones(2, 4))
    assert [span.name for span in tracer.spans] == ["0", "forward Sequential"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_backward_computes_again_is_shown_inside_backward(reentrant: bool) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=reentrant))  # type: ignore[no-any-return]

    tracer, model = counting(), Saving()
    trace_compute(tracer, model, ())
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    spans = tracer.spans
    assert within(spans, one(spans, "forward Saving")) == ["first", "second"]
    in_backward = within(spans, one(spans, "backward Saving"))
    assert in_backward == ["second", "first", "first"]  # its gradients, and within the time they took its forward once more
    assert len(tracer.spans) == 7


def test_the_limit_holds_with_modules_and_the_hooks_do_not_keep_the_model() -> None:
    tracer, model = Tracer(limit=20), Net()
    trace_compute(tracer, model, ())
    for _ in range(10):
        model(torch.ones(2, 4)).sum().backward()
    assert len(tracer.spans) == 20 and tracer.num_dropped == 10 * 9 - 20
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_compiled_model_stays_one_graph_and_is_shown_as_a_whole() -> None:
    tracer, model = Tracer(), Net()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    trace_compute(tracer, compiled, (), model)  # type: ignore[arg-type]
    compiled(torch.ones(2, 4)).sum().backward()
    spans = tracer.spans
    assert within(spans, one(spans, "forward OptimizedModule")) == []
    assert set(within(spans, one(spans, "backward OptimizedModule"))) == {"tied", "body.2", "body.0", "Net"}
