"""Profiles of made-up steps, for tests of planners and of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import strategies as st

from stretto.plan.profile import ModuleProfile, ParameterProfile, StepProfile, TransferCost
from stretto.plan.transfers import Gradient


def chain_profile(
    sizes: Sequence[int],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    cost: TransferCost,
    update_s: float = 0.0,
    biases: int = 0,
    unseen: frozenset[int] = frozenset(),
) -> StepProfile:
    """Modules one after the other, with a weight and, if `biases`, a bias of so many bytes each; lists are in forward order.
    `unseen`: modules whose parameters no module was seen to read."""
    count = len(sizes)
    ready = list(accumulate(reversed(backward_s)))[::-1]
    parameters = []
    for i in range(count):
        used_by = None if i in unseen else i
        parameters.append(ParameterProfile(name=f"m{i}.weight", num_bytes=sizes[i], ready_s=ready[i], used_by=used_by))
        if biases:
            parameters.append(ParameterProfile(name=f"m{i}.bias", num_bytes=biases, ready_s=ready[i], used_by=used_by))
    modules = [ModuleProfile(name=f"m{i}", forward_s=forward_s[i], backward_s=backward_s[i]) for i in range(count)]
    return StepProfile(
        model="Chain",
        digest="",
        world_size=4,
        steps=1,
        forward_s=sum(forward_s),
        backward_s=sum(backward_s),
        update_s=update_s,
        modules=tuple(modules),
        parameters=tuple(parameters),
        cost=cost,
    )


def gradients_of(profile: StepProfile, *, bias_kind: str = "") -> list[Gradient]:
    """In registration order, which in a chain is that of forward."""
    return [
        Gradient(name=one.name, num_bytes=one.num_bytes, kind=bias_kind if one.name.endswith("bias") else "")
        for one in profile.parameters
    ]


TIMES = st.floats(min_value=0.0, max_value=0.1).map(lambda seconds: round(seconds, 6))


@st.composite
def chain_profiles(draw: st.DrawFn, max_modules: int = 12) -> StepProfile:
    """From none to many modules; from free networks to such that take far longer than computation."""
    count = draw(st.integers(1, max_modules))
    sizes = draw(st.lists(st.integers(0, 20_000_000), min_size=count, max_size=count))
    forward_s = draw(st.lists(TIMES, min_size=count, max_size=count))
    backward_s = draw(st.lists(TIMES, min_size=count, max_size=count))
    start_s = draw(st.sampled_from([0.0, 1e-5, 1e-3, 1e-2]))
    per_byte_s = draw(st.sampled_from([0.0, 1e-10, 1e-8]))
    return chain_profile(
        sizes,
        forward_s,
        backward_s,
        cost=TransferCost(start_s=start_s, per_byte_s=per_byte_s),
        update_s=draw(TIMES),
        biases=draw(st.sampled_from([0, 4, 4096])),
        unseen=draw(st.sampled_from([frozenset(), frozenset({0}), frozenset({count - 1})])),
    )
