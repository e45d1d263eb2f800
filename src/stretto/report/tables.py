"""The tables of the page, as HTML: ranks, bytes per link, the plan. Every text out of a trace or a plan is escaped here."""

from __future__ import annotations

import html
from collections.abc import Sequence

from stretto.observe.quantities import percent, seconds, size
from stretto.plan.planned import PlannedStep
from stretto.plan.transfers import Transfer
from stretto.report.figures import JobFigures, RankFigures
from stretto.report.shown import shown

MATRIX_RANKS = 16  # more do not fit beside each other; then it is a list
NOTABLE = 1.05
LISTED = 100  # links, ranks or transfers
HEATS = 5


def heading(title: str, identifier: str = "") -> str:
    """The beginning of a section; the caller closes it."""
    attribute = f' id="{identifier}"' if identifier else ""
    return f"<section{attribute}><h2>{html.escape(title)}</h2>"


def rank_table(job: JobFigures) -> str:
    head = _head("rank", "host", "steps", "step", "compute", "network", "wait", "other", "U", "α", "share of a step")
    rows = "".join(_rank_row(rank, rank.compute_s > NOTABLE * job.compute_s) for rank in job.ranks[:LISTED])
    keys = "".join(
        f'<li><span class="key {name}"></span>{text}</li>'
        for name, text in (("compute", "compute"), ("wait", "wait"), ("other", "other"), ("rest", "communication alone"))
    )
    return (
        f'<div class="wide"><table class="full">{head}{rows}</table></div>{_cut(len(job.ranks), "ranks")}'
        '<p class="note">Medians of a step. Bold: computes more than 5 % longer than the median of all.</p>'
        f'<ul class="legend">{keys}</ul>'
    )


def _head(*names: str) -> str:
    """Numbers stand on the right of their column, the rest on the left."""
    text = ("host", "share of a step", "parameters")
    return "<tr>" + "".join(f'<th class="text">{name}</th>' if name in text else f"<th>{name}</th>" for name in names) + "</tr>"


def _rank_row(rank: RankFigures, slow: bool) -> str:
    times = [seconds(value) for value in (rank.step_s, rank.compute_s, rank.network_s, rank.wait_s, rank.other_s)]
    if slow:
        times[1] = f"<b>{times[1]}</b>"
    shares = ["-" if value is None else f"{value:.2f}" for value in (rank.utilisation, rank.overlap)]
    cells = "".join(f"<td>{cell}</td>" for cell in [f"{rank.num_steps}", *times, *shares])
    host = f'<td class="text"><bdi>{html.escape(shown(rank.host))}</bdi></td>'
    return f'<tr><th>{rank.rank}</th>{host}{cells}<td class="share">{_bar(rank)}</td></tr>'


def _bar(rank: RankFigures) -> str:
    """A step in one stripe; it says the shares to those who cannot see it."""
    parts = (("compute", rank.compute_s), ("wait", rank.wait_s), ("other", rank.other_s))
    whole = max(rank.step_s, sum(value for _, value in parts)) or 1.0
    drawn, at = "", 0.0
    for name, value in parts:
        drawn += f'<rect class="{name}" x="{100 * at:.2f}" y="0" width="{100 * value / whole:.2f}" height="10"/>'
        at += value / whole
    said = ", ".join(f"{name} {percent(value / whole)}" for name, value in parts)
    return f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{said}">{drawn}</svg>'


def link_table(job: JobFigures) -> str:
    if not job.links:
        return '<p class="note">No message of our own wire was traced in the steps.</p>'
    ranks = sorted({link.source for link in job.links} | {link.target for link in job.links})
    most = max(link.num_bytes for link in job.links)
    table = _link_matrix(job, ranks, most) if len(ranks) <= MATRIX_RANKS else _link_list(job, most)
    what = "from the first step on" if job.num_steps else "in all of the trace"
    total = sum(link.num_bytes for link in job.links)
    return f'<div class="wide">{table}</div><p class="note">Payload {what}: {size(total)} in all. Rows send, columns receive.</p>'


def _link_matrix(job: JobFigures, ranks: Sequence[int], most: int) -> str:
    bytes_of = {(link.source, link.target): link.num_bytes for link in job.links}
    head = "".join(f"<th>to {_name(target, job)}</th>" for target in ranks)
    rows = ""
    for source in ranks:
        cells = "".join(_heat(bytes_of.get((source, target)), most) for target in ranks)
        rows += f"<tr><th>from {_name(source, job)}</th>{cells}</tr>"
    return f'<table class="heat"><tr><th></th>{head}</tr>{rows}</table>'


def _name(rank: int, job: JobFigures) -> str:
    """Servers come after the workers."""
    return str(rank) if rank < job.world_size else f"server {rank - job.world_size}"


def _link_list(job: JobFigures, most: int) -> str:
    largest = sorted(job.links, key=lambda link: -link.num_bytes)[:LISTED]
    rows = "".join(
        f"<tr><td>{_name(link.source, job)}</td><td>{_name(link.target, job)}</td>"
        f"{_heat(link.num_bytes, most)}<td>{link.num_messages:,}</td></tr>"
        for link in largest
    )
    head = "<tr><th>from</th><th>to</th><th>bytes</th><th>messages</th></tr>"
    return f'<table class="heat">{head}{rows}</table>{_cut(len(job.links), "links, the busiest")}'


def _heat(num_bytes: int | None, most: int) -> str:
    if num_bytes is None:
        return '<td class="heat0">-</td>'
    heat = 1 + min(HEATS - 1, HEATS * num_bytes // max(1, most))
    return f'<td class="heat{heat}">{size(num_bytes)}</td>'


def plan_table(job: JobFigures, planned: PlannedStep) -> str:
    plan = planned.plan
    name = f"<code>{html.escape(shown(plan.schedule))}</code>"
    about = [f"{name}: {len(plan.transfers)} transfers of {size(plan.num_bytes)} together"]
    about.append("they begin in the backward" if plan.early else "they begin when backward has ended")
    if plan.credit_bytes is not None:
        about.append(f"at most {size(plan.credit_bytes)} on their way to one worker")
    reason = f" (<bdi>{html.escape(shown(plan.reason))}</bdi>)" if plan.reason else ""
    head = _head("#", "priority", "bytes", "parts", "expected", "measured", "parameters")
    rows = "".join(_plan_row(number, each, job, planned) for number, each in enumerate(plan.transfers[:LISTED]))
    return (
        f'<p>{", ".join(about)}{reason}.</p><div class="wide"><table class="full">{head}{rows}</table></div>'
        f"{_cut(len(plan.transfers), 'transfers')}"
        '<p class="note">Expected: with the network to itself. Measured: median, from when all ranks had begun it; transfers '
        "that share the network take longer.</p>"
    )


def _plan_row(number: int, transfer: Transfer, job: JobFigures, planned: PlannedStep) -> str:
    parts = 1 if transfer.part_bytes is None else -(-transfer.num_bytes // transfer.part_bytes)
    expected = seconds(planned.profile.cost.seconds(transfer.num_bytes)) if planned.profile is not None else "-"
    taken = job.transfers.get(f"transfer {number}")
    measured = seconds(taken.median_s) if taken is not None else "-"
    first, last = shown(transfer.parameters[0]), shown(transfer.parameters[-1])
    names = f"<bdi>{html.escape(first)}</bdi>"
    if len(transfer.parameters) > 1:
        names += f" … <bdi>{html.escape(last)}</bdi> ({len(transfer.parameters)})"
    cells = (number, transfer.priority, size(transfer.num_bytes), f"{parts:,}", expected, measured)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + f'<td class="names">{names}</td></tr>'


def _cut(count: int, what: str) -> str:
    return f'<p class="note">The first {LISTED} of {count:,} {what}.</p>' if count > LISTED else ""
