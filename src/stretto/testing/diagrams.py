"""A plan as a table for terminals and logs: a row per step, a column per rank, and in each cell what that rank does:

    >2[0:4]     sends chunks 0..3 to rank 2          +1[3]   adds chunk 3 from rank 1
    =1[3]       keeps chunk 3 from rank 1            W+=D    adds DATA to WORK (D=W copies WORK to DATA)

(The pictures in docs/collectives.md are drawn by docs/plan_pictures.py, from the plans as well.)
"""

from __future__ import annotations

from stretto.collectives.plan import Buffer, Local, Operation, PlanMaker, Send

_LETTER = {Buffer.DATA: "D", Buffer.WORK: "W"}


def as_text(maker: PlanMaker, size: int) -> str:
    """The plan as a table: a row per step, a column per rank."""
    plans = [maker(rank, size) for rank in range(size)]
    steps = max(plan.num_steps for plan in plans)
    rows = [["step", *(f"rank {rank}" for rank in range(size))]]
    for step in range(steps):
        cells = [" ".join(word_of(o, plan.num_chunks) for o in plan.operations if o.step == step) for plan in plans]
        rows.append([str(step), *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(size + 1)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def word_of(operation: Operation, num_chunks: int) -> str:
    """What a rank does in one operation."""
    if isinstance(operation, Local):
        sign = "+=" if operation.add else "="
        return f"{_LETTER[operation.target]}{sign}{_LETTER[operation.source]}{chunks_of(operation, num_chunks)}"
    sign = ">" if isinstance(operation, Send) else "+" if operation.add else "="
    return f"{sign}{operation.peer}{chunks_of(operation, num_chunks)}"


def chunks_of(operation: Operation, num_chunks: int) -> str:
    """The chunks of an operation; nothing when it is the whole vector or empty."""
    if operation.hi == operation.lo or (operation.lo, operation.hi) == (0, num_chunks):
        return ""
    return f"[{operation.lo}]" if operation.hi == operation.lo + 1 else f"[{operation.lo}:{operation.hi}]"
