"""torch's table of process groups: what its functions (`dist.broadcast`, `get_backend`, meshes, ...) look a group up in.

Groups that torch has made are in it. One that a method of ours has made (`split_group`) is entered here, as torch enters its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group

_world: Any = dist.distributed_c10d._world


def has(group: Any) -> bool:
    return group in _world.pg_map


def enter(group: Any, parent: Any, ranks: Sequence[int]) -> None:
    """`ranks`: the members' ranks in torch's world, by place. `parent`: a group in the table, of the same backend."""
    name, tag = group.group_name, f"ptd:{group.group_name}"
    _world.pg_map[group] = _world.pg_map[parent]
    _world.pg_names[group] = name
    _world.pg_backend_config[group] = _world.pg_backend_config[parent]
    _world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    _world.pg_to_tag[group] = tag
    _world.tags_to_pg.setdefault(tag, []).append(group)
    _register_process_group(name, group)
