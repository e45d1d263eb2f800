"""What the page says about servers, as HTML: the servers, the workers at them, staleness and queues as pictures."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from stretto.observe.quantities import percent, seconds, size
from stretto.report.servers import ServerFigures, ServersFigures, WorkerAtServers
from stretto.report.shown import shown

LISTED = 100
BARS = 24  # of the histogram; what is staler is in the last
HEIGHT = 60


def servers_section(found: ServersFigures) -> str:
    """Between the heading and the end of the section."""
    parts = [_workers(found)]
    if found.staleness:
        parts.append(_histogram(found.staleness))
    if found.servers:
        parts.append(_servers(found))
    else:
        parts.append('<p class="note">No server left a trace: it was killed, or was started apart from the workers.</p>')
    return "".join(parts)


def _workers(found: ServersFigures) -> str:
    head = _row("th", ("worker", "steps", "staleness", "at most", "held back a step", "because of", "pushed", "pulled"))
    rows = "".join(_row("td", _worker(each)) for each in found.workers[:LISTED])
    return (
        f'<div class="wide"><table class="full workers-at-servers">{head}{rows}</table></div>'
        f"{_cut(len(found.workers), 'workers')}"
        '<p class="note">Staleness: updates between the version that a gradient was computed on and the one that it was applied '
        "to, on average over this worker's steps. Held back: a server did not answer yet, because another worker was behind. "
        "All these are of the whole run; what was pushed and pulled is of the spans that the trace has.</p>"
    )


def _worker(each: WorkerAtServers) -> tuple[str, ...]:
    because = "-" if each.held_by is None else f"rank {each.held_by}"
    stale = (f"{each.mean_staleness:.2f}", f"{each.most_staleness}")
    moved = (size(each.bytes_pushed), size(each.bytes_pulled))
    return (f"rank {each.rank}", f"{each.steps:,}", *stale, seconds(each.held_s), because, *moved)


def _histogram(staleness: Mapping[int, int]) -> str:
    """Bars with their numbers; it says the counts to those who cannot see it."""
    counts = [0] * (min(max(staleness), BARS - 1) + 1)
    for stale, count in staleness.items():
        counts[min(stale, BARS - 1)] += count
    most, width, drawn = max(1, *counts), 100 / len(counts), ""
    for number, count in enumerate(counts):
        tall, title = HEIGHT * count / most, f"{number}{'+' if number == BARS - 1 else ''}: {count:,} steps"
        where = f'x="{(number + 0.1) * width:.2f}" y="{HEIGHT - tall:.2f}" width="{0.8 * width:.2f}" height="{tall:.2f}"'
        drawn += f'<rect class="compute" {where}><title>{title}</title></rect>'
    said = ", ".join(f"{number}: {count}" for number, count in enumerate(counts) if count)
    axis = "".join(f"<span>{number}{'+' if number == BARS - 1 else ''}</span>" for number in range(len(counts)))
    picture = f'<svg viewBox="0 0 100 {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="steps by staleness: {said}">'
    return (
        f'<figure class="histogram"><figcaption>Staleness of the steps of all workers</figcaption>{picture}{drawn}</svg>'
        f'<div class="axis">{axis}</div></figure>'
    )


def _servers(found: ServersFigures) -> str:
    names = ("server", "host", "busy", "optimizer", "pushes", "a push takes", "copied on", "queue", "at most", "queue over time")
    rows = "".join(_row("td", _server(each)) for each in found.servers[:LISTED])
    return (
        f'<div class="wide"><table class="full servers">{_row("th", names)}{rows}</table></div>'
        f"{_cut(len(found.servers), 'servers')}"
        '<p class="note">Busy: the share of the time, from its first push to its last, in which it worked on pushes; the '
        "optimizer is part of that. Queue: gradients and pulls that wait there, as noted from time to time.</p>"
    )


def _server(each: ServerFigures) -> tuple[str, ...]:
    host = f"<bdi>{html.escape(shown(each.host))}</bdi>"
    work = (percent(each.busy), percent(each.optimizer), f"{each.num_pushes:,}", seconds(each.push_s), size(each.bytes_copied))
    return (f"server {each.server}", host, *work, f"{each.mean_queue:.1f}", f"{each.longest_queue}", _line(each))


def _line(each: ServerFigures) -> str:
    """The queue of a server as a line."""
    if not each.longest_queue:
        return "-"
    path = " ".join(f"{100 * moment:.2f},{20 - 19 * count / each.longest_queue:.2f}" for moment, count in each.queue)
    said = f"queue of server {each.server}, at most {each.longest_queue}"
    return (
        f'<svg class="line" viewBox="0 0 100 20" preserveAspectRatio="none" role="img" aria-label="{said}">'
        f'<polyline points="{path}"/></svg>'
    )


def _row(kind: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{cell}</{kind}>" for cell in cells) + "</tr>"


def _cut(count: int, what: str) -> str:
    return f'<p class="note">The first {LISTED} of {count:,} {what}.</p>' if count > LISTED else ""
