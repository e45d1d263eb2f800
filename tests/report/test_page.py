"""The page as text, without a browser: what is in it, that it is bounded, and that nothing in it is foreign code or a request."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from report.traces import HOSTILE, job, plan_of, span, step, trace
from stretto.observe.quantities import percent, seconds, size
from stretto.observe.trace import TraceEvent, TraceFile
from stretto.plan.planned import PlannedStep
from stretto.report.bottleneck import find_bottleneck
from stretto.report.figures import job_figures
from stretto.report.page import json_for_html, make_page, prose
from stretto.report.shown import shown
from stretto.report.timeline import DEEPEST, TimelineRow, depths, lanes, make_timeline, window_begin

TWO = ({"compute": 60.0, "network": [(40.0, 90.0)], "wait": 38.0},) * 2


class Elements(HTMLParser):
    """Every tag with its attributes, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.data: dict[str, str] = {}
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = f"{tag} {dict(attrs).get('type', '')}".strip()

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in.startswith(("script", "style")):
            self.data[self._in] = self.data.get(self._in, "") + data
        else:
            self.text.append(data)


def page_of(files: list[TraceFile], planned: PlannedStep | None = None, *, title: str = "job", limit: int = 20_000) -> str:
    figures = job_figures(files)
    return make_page(title, figures, find_bottleneck(figures, planned), make_timeline(files, limit), planned).decode()


def test_it_has_the_sentence_the_figures_and_all_tables() -> None:
    text = " ".join(" ".join(Elements(page_of(job(*TWO), plan_of("a.weight", "b.weight"))).text).split())

    assert "Poor overlap: 50.0 ms of communication and 60.0 ms of computation" in text
    for figure in ("Step time T 100 ms", "Computing U 0.60", "Overlap α 0.20", "Network load ρ 0.83", "Sent a step 1.00 MB"):
        assert figure in text
    assert "Predicted step 110 ms 10 % more than measured" in text
    assert "from 0 - 4.00 MB from 1 4.00 MB -" in text  # the links
    assert "a.weight … last (2)" in text and "4.00 MB 4 5.00 ms" in text  # the plan: bytes, parts, expected
    assert "The timeline needs JavaScript" in text


def test_names_from_outside_stay_text_wherever_they_stand() -> None:
    files = [
        trace(
            rank, [*step(0, 100, compute=60), *(span("module", name, 1, 2, collective=name) for name in HOSTILE)], host=HOSTILE[0]
        )
        for rank in range(2)
    ]
    page = page_of(files, plan_of(*HOSTILE), title=HOSTILE[0])
    elements = Elements(page)

    expected = {
        "html", "head", "meta", "link", "title", "style", "body", "main", "header", "h1", "h2", "p", "div", "section", "dl",
        "dt", "dd", "small", "code", "ul", "li", "span", "button", "canvas", "noscript", "table", "tr", "th", "td", "svg", "rect",
        "bdi", "b", "script",
    }  # fmt: skip
    assert {tag for tag, _ in elements.tags} <= expected
    assert not [name for _, attributes in elements.tags for name in attributes if name.startswith("on") or name == "style"]
    assert sum(tag == "script" for tag, _ in elements.tags) == 2
    named = json.loads(elements.data["script application/json"])["names"]
    assert {shown(name) for name in HOSTILE} <= set(named)
    assert "\u202e" not in page and "\x00" not in page and "\x1b" not in page


def test_it_asks_nobody_for_anything() -> None:
    page = page_of(job(*TWO), plan_of("a.weight"))
    elements = Elements(page)

    assert not re.search(
        r"https?:|//[a-z]|@import|url\(|fetch|XMLHttp|import\(|WebSocket|sendBeacon", re.sub(r"^\s*//.*$", "", page, flags=re.M)
    )
    links = [value for _, attributes in elements.tags for name, value in attributes.items() if name in ("src", "href", "action")]
    assert links == ["data:,"]
    (policy,) = [attributes["content"] for _, attributes in elements.tags if "Content-Security-Policy" in str(attributes)]
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy


def test_json_in_a_page_is_json_and_ends_no_element() -> None:
    text = json_for_html({"names": HOSTILE})
    assert json.loads(text) == {"names": list(HOSTILE)}
    assert not set(text) & set("<>&\u2028\u2029")
    assert prose("<b> `a<b` c") == "&lt;b&gt; <code>a&lt;b</code> c"


def test_the_timeline_is_cut_to_the_last_whole_steps_and_says_so() -> None:
    files = job(*TWO, steps=50)
    count = sum(len(file.traceEvents) for file in files)
    timeline = make_timeline(files, 100)

    assert timeline.num_spans == count and 80 < timeline.num_drawn <= 100
    assert timeline.begin_us % 100_000 == 0 and min(timeline.begin) == 0.0  # a step begins there
    assert f"Left out: {count - timeline.num_drawn:,} earlier spans" in page_of(files, limit=100)
    assert "Left out" not in page_of(files)
    assert len(page_of(files)) < 60 * count + 60_000


@pytest.mark.parametrize(
    ("moments", "steps", "limit", "begin"),
    [
        ([], [], 3, 0.0),
        ([5.0, 1.0, 3.0], [], 3, 1.0),
        ([1.0, 2.0, 3.0, 4.0], [], 3, 2.0),
        ([1.0, 2.0, 3.0, 4.0], [1.0, 3.0], 3, 3.0),
        ([1.0, 2.0, 2.0, 3.0], [1.0], 2, 3.0),  # two of one moment, of which only one would fit
        ([2.0, 2.0, 2.0], [], 2, float("inf")),
    ],
)
def test_no_more_spans_than_the_limit_begin_in_the_window(
    moments: list[float], steps: list[float], limit: int, begin: float
) -> None:
    assert window_begin(moments, steps, limit) == begin
    assert sum(moment >= begin for moment in moments) <= limit


def flights(*intervals: tuple[float, float]) -> list[TraceEvent]:
    return [span("send", "send to 1", begin, end) for begin, end in intervals]


def test_nested_spans_go_down_and_overlapping_ones_aside() -> None:
    assert depths(flights((0, 10), (1, 4), (2, 3), (5, 6), (10, 12))) == [0, 1, 2, 1, 0]
    assert lanes(flights((0, 10), (1, 4), (2, 3), (5, 6), (10, 12))) == [0, 1, 2, 1, 0]
    assert max(depths(flights(*[(0, 10)] * 9))) == max(lanes(flights(*[(0, 10)] * 9))) == DEEPEST - 1


def test_rows_are_by_rank_threads_first_then_what_is_in_flight() -> None:
    spans = [*step(0, 100, compute=60, network=[(0.0, 5.0)]), span("reduce", "reduce", 5, 6), span("strange", "x", 1, 2, tid=9)]
    rows = make_timeline([trace(0, spans), trace(1, [])]).rows
    assert rows == [TimelineRow(0, name) for name in ("compute", "reduce", "other", "send")] + [TimelineRow(1, "nothing")]


def test_the_start_up_is_not_drawn_but_all_is_where_there_are_no_steps() -> None:
    early = span("send", "send to 1", -500, -400, peer=1, bytes=1)
    assert make_timeline([trace(0, [early, *step(0, 100, compute=60)])]).num_drawn == 3
    alone = make_timeline([trace(0, [early])])
    assert alone.num_drawn == 1 and alone.begin == [0.0]


def test_missing_ranks_dropped_spans_and_many_links_are_said() -> None:
    text = page_of([trace(3, step(0, 100, compute=60), world_size=30, dropped=1234)])
    assert "No trace of 29 of 30 ranks (0, 1, 2, 4, 5, 6, 7, 8, 9, 10 ...)" in text and "1,234 older spans were dropped" in text
    sends = [span("send", f"send to {peer}", peer, peer + 1, peer=peer, bytes=1000 * peer) for peer in range(1, 200)]
    text = page_of([trace(0, [*step(0, 300, compute=60), *sends], world_size=200)])
    assert "The first 100 of 199 links, the busiest." in text and "199 KB" in text


def test_quantities_are_for_people() -> None:
    assert [seconds(value) for value in (0.0, 2e-6, 0.0123, 0.9999, 75.0)] == ["0 ms", "2.00 µs", "12.3 ms", "1.00 s", "75.0 s"]
    assert [size(value) for value in (0, 999, 1500, 999_600, 4e15)] == ["0 B", "999 B", "1.50 KB", "1.00 MB", "4,000 TB"]
    assert percent(0.956) == "96 %"
