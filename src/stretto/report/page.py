"""One HTML file with everything in it: it asks no network for anything, and can be mailed or kept with the results.

Its Content-Security-Policy names the only script and the only style by their digests, so even a name that slipped through the
escaping could run nothing and load nothing. All but the timeline is plain HTML and needs no JavaScript.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable
from importlib import resources

import msgspec

from stretto.observe.quantities import percent, seconds, size
from stretto.plan.planned import PlannedStep
from stretto.report.bottleneck import Bottleneck
from stretto.report.figures import JobFigures
from stretto.report.server_tables import servers_section
from stretto.report.shown import shown
from stretto.report.tables import heading, link_table, plan_table, rank_table
from stretto.report.timeline import CATEGORIES, Timeline

BUTTONS = (("closer", "Zoom in"), ("farther", "Zoom out"), ("left", "←"), ("right", "→"), ("steps", "Last steps"), ("all", "All"))
MEANINGS = (
    (
        "C, N, T",
        "C: time in which a rank computes (forward, backward, update) in a step. N: time in which at least one of its transfers "
        "is on its way, from when both sides are ready. T: the whole step, from forward to forward.",
    ),
    ("U = C / T", "the share of the time in which a rank computes. 1 is the best there is."),
    (
        "ρ = N / C",
        "the network's time against the computation's. Above 1, a step cannot be shorter than its communication, however well "
        "that is hidden.",
    ),
    (
        "α = (N + C − T) / min(N, C)",
        "how much of the shorter of the two is hidden behind the longer: 1 all of it, 0 they take turns.",
    ),
    ("wait", "the training thread waits for others: for communication that is not hidden, or for a slower rank."),
    ("other", "neither computing nor communicating nor waiting: loading data, logging, Python between the calls."),
)


def make_page(
    title: str, job: JobFigures, bottleneck: Bottleneck, timeline: Timeline, planned: PlannedStep | None = None
) -> bytes:
    style, script = _resource("page.css"), _resource("timeline.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )
    body = "\n".join(_body(title, job, bottleneck, timeline, planned))
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{html.escape(shown(title))} - stretto report</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<div class="tip" hidden></div>
<script type="application/json" id="timeline-data">{json_for_html(timeline)}</script>
<script>{script}</script>
</body>
</html>
"""
    return page.encode("utf-8", "replace")


def json_for_html(value: object) -> str:
    """JSON that a script element may hold: nothing in it can end the element, or a line of JavaScript."""
    text = msgspec.json.encode(value).decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _resource(name: str) -> str:
    return resources.files("stretto.report").joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _body(title: str, job: JobFigures, bottleneck: Bottleneck, timeline: Timeline, planned: PlannedStep | None) -> Iterable[str]:
    hosts = len({rank.host for rank in job.ranks})
    steps = max((rank.num_steps for rank in job.ranks), default=0)
    yield (
        f"<header><h1>stretto report</h1><p><bdi>{html.escape(shown(title))}</bdi>: {job.world_size} workers on {hosts} "
        f"host{'s' * (hosts != 1)}, {steps} step{'s' * (steps != 1)} measured</p></header>"
    )
    yield from _warnings(job)
    yield f'<div class="verdict"><p class="label">What holds the job back</p><p>{prose(bottleneck.sentence)}</p></div>'
    yield _figures(job, planned)
    yield _timeline(timeline)
    yield heading("Ranks") + rank_table(job) + "</section>"
    yield heading("Bytes per link") + link_table(job) + "</section>"
    if job.servers is not None:
        yield heading("Servers", "servers") + servers_section(job.servers) + "</section>"
    if planned is not None:
        yield heading("The plan") + plan_table(job, planned) + "</section>"
    meanings = "".join(f"<dt>{html.escape(word)}</dt><dd>{html.escape(text)}</dd>" for word, text in MEANINGS)
    yield f"{heading('What the figures mean')}<dl class='meaning'>{meanings}</dl></section>"


def prose(sentence: str) -> str:
    """What is between backticks is code."""
    pieces = html.escape(sentence).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))


def _warnings(job: JobFigures) -> Iterable[str]:
    """What is missing from the traces, and so from every figure here."""
    said = []
    if job.missing:
        ranks = ", ".join(map(str, job.missing[:10])) + (" ..." if len(job.missing) > 10 else "")
        said.append(f"No trace of {len(job.missing)} of {job.world_size} ranks ({ranks}): killed, or still running.")
    dropped = sum(rank.num_dropped for rank in job.ranks)
    if dropped:
        said.append(f"{dropped:,} older spans were dropped while tracing; the figures are of the steps after them.")
    unsure = max((rank.clock_uncertainty_s for rank in job.ranks), default=0.0)
    if job.step_s is not None and unsure > 0.05 * job.step_s and len({rank.host for rank in job.ranks}) > 1:
        said.append(f"The hosts' clocks are known to ± {seconds(unsure)} only, which is much in {seconds(job.step_s)}, a step.")
    if said:
        yield '<section class="warning">' + "".join(f"<p>{html.escape(line)}</p>" for line in said) + "</section>"


def _figures(job: JobFigures, planned: PlannedStep | None) -> str:
    cards = []
    if job.step_s is not None and job.step_low_s is not None and job.step_high_s is not None:
        spread = f"median; 8 of 10 steps: {seconds(job.step_low_s)} to {seconds(job.step_high_s)}"
        cards.append(("Step time T", seconds(job.step_s), spread))
    for name, value, about in (
        ("Computing U", job.utilisation, f"{seconds(job.compute_s)} of computation"),
        ("Overlap α", job.overlap, "1: all that can be is hidden"),
        ("Network load ρ", job.network_to_compute, f"{seconds(job.network_s)} of communication"),
    ):
        cards.append((name, "-" if value is None else f"{value:.2f}", about))
    what = "transfers" if job.transfers else "messages"
    cards.append(("Sent a step", size(job.bytes_sent), f"by each rank, in {job.num_transfers:.0f} {what}"))
    cards.append(("Waited a step", seconds(job.wait_s), percent(job.wait_s / job.step_s) + " of it" if job.step_s else ""))
    if planned is not None and planned.predicted_s is not None and job.step_s:
        off = planned.predicted_s / job.step_s - 1
        compared = f"{percent(abs(off))} {'more' if off > 0 else 'less'} than measured"
        cards.append(("Predicted step", seconds(planned.predicted_s), compared))
    cells = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}<small>{html.escape(about)}</small></dd></div>"
        for name, value, about in cards
    )
    return f'<dl class="figures">{cells}</dl>'


def _timeline(timeline: Timeline) -> str:
    buttons = "".join(f'<button type="button" data-action="{action}">{text}</button>' for action, text in BUTTONS)
    used = {CATEGORIES[number] for number in timeline.category}
    keys = "".join(f'<li><span class="key {name}"></span>{name}</li>' for name in CATEGORIES if name in used)
    left_out = timeline.num_spans - timeline.num_drawn
    said = f"{timeline.num_drawn:,} spans. Vertical lines: rank {timeline.rows[0].rank if timeline.rows else 0} begins a step. "
    if left_out:
        said += f"Left out: {left_out:,} earlier spans, of the start-up or of older steps (the figures count all steps). "
    said += "Drag to move, Ctrl + wheel to zoom (after a click the wheel alone does), or use + - and the arrow keys."
    return f"""{heading("Timeline", "timeline")}
<noscript><p class="note">The timeline needs JavaScript; the rest of this page does not.</p></noscript>
<div class="drawing" hidden>
<div class="tools"><ul class="legend">{keys}</ul><div class="buttons">{buttons}</div></div>
<div class="scroller" tabindex="0" role="img" aria-label="Timeline of all ranks"><canvas></canvas><div class="spacer"></div></div>
<p class="note">{html.escape(said)}</p>
</div></section>"""
