"""The page in a real browser: drawn, moved by the mouse, without an error in its console and without a request to anybody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from report.browser import Browser, find_browser
from report.traces import HOSTILE, job, plan_of, span, with_servers, write
from stretto.plan.planned import write_planned
from stretto.report.command import write_report

PROGRAM = find_browser()
CONTROL = "http://page.invalid/x"
pytestmark = [pytest.mark.processes, pytest.mark.skipif(PROGRAM is None, reason="not installed: chromium")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks of four steps, and names that would like to be more than names."""
    folder = tmp_path_factory.mktemp("traces") / "<b>job"
    files = job(
        {"compute": 60.0, "network": [(40.0, 90.0)], "wait": 38.0}, {"compute": 60.0, "network": [(40.0, 90.0)], "wait": 38.0}
    )
    for file in files:
        for number, name in enumerate(HOSTILE):
            file.traceEvents.append(span("module", name, number + 310, number + 311))
        file.traceEvents.append(span("transfer", "transfer 0", 340, 390, bytes=4_200_000, collective=HOSTILE[0]))
    files[1].otherData = msgspec.structs.replace(files[1].otherData, host=HOSTILE[0])
    write(folder, files)
    write_planned(folder, plan_of(*HOSTILE))
    write_report(folder, None)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    made = Browser(PROGRAM, tmp_path_factory.mktemp("browser"))
    yield made
    made.close()
    log = json.loads(made.net_log.read_text())
    kind = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    begun = [event["params"] for event in log["events"] if event["type"] == kind and "url" in event.get("params", {})]
    asked = {
        each["url"] for each in begun if each.get("initiator") != "not an origin"
    }  # that is what the browser asks for itself
    assert asked <= {CONTROL}, "a page has asked for something, and not only that which was made to"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_the_timeline_is_drawn_and_nobody_complains(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    spans = json.loads(browser.evaluate("document.getElementById('timeline-data').textContent"))["begin"]

    assert browser.evaluate("Number(document.getElementById('timeline').dataset.spans)") == len(spans) > 40
    assert 0 < browser.evaluate("Number(document.getElementById('timeline').dataset.drawn)") <= len(spans)
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than its window"
    colours = "(c => [...new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)])"
    assert browser.evaluate(f"new Set({colours}(document.querySelector('canvas'))).size") > 8, "nothing is painted"
    assert browser.complaints() == []
    assert set(browser.requested()) <= {page.as_uri(), "data:,"}  # the second is its icon


def test_names_out_of_a_trace_are_shown_and_do_nothing(browser: Browser, page: Path) -> None:
    browser.open(page)

    assert browser.evaluate("document.querySelectorAll('img, iframe, b job, [onerror]').length") == 0
    assert browser.evaluate("window.pwned === undefined && document.querySelectorAll('script').length") == 2
    for name in HOSTILE[:2]:
        assert browser.evaluate(f"document.body.innerText.includes({json.dumps(name)})"), name
    assert browser.complaints() == []


def view(browser: Browser) -> tuple[float, float]:
    begin, end = browser.evaluate(
        "[document.getElementById('timeline').dataset.from, document.getElementById('timeline').dataset.to]"
    )
    return float(begin), float(end)


def test_the_view_follows_buttons_wheel_and_mouse(browser: Browser, page: Path) -> None:
    browser.open(page)
    begin, end = view(browser)
    browser.evaluate("document.querySelector('[data-action=closer]').click()")
    closer = view(browser)
    assert closer[1] - closer[0] == pytest.approx(0.6 * (end - begin))
    browser.evaluate("document.querySelector('[data-action=right]').click()")
    right = view(browser)
    assert right[0] > closer[0] and right[1] - right[0] == pytest.approx(closer[1] - closer[0])
    browser.evaluate("document.querySelector('[data-action=steps]').click()")
    assert view(browser) == pytest.approx((begin, end))

    left, top, wide, _ = browser.evaluate(
        "(b => [b.left, b.top, b.width, b.height])((document.querySelector('canvas').scrollIntoView({block: 'center'}), "
        "document.querySelector('canvas').getBoundingClientRect()))"
    )
    x, y = left + wide / 2, top + 55
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=100)
    assert view(browser) == pytest.approx((begin, end)), "the wheel alone scrolls the page"
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100, modifiers=2)
    zoomed = view(browser)
    assert zoomed[1] - zoomed[0] < 0.9 * (end - begin)

    top = browser.evaluate("document.querySelector('canvas').getBoundingClientRect().top")
    browser.mouse("mousePressed", x, top + 55, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", x + 100, top + 55, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 100, top + 55, button="left", clickCount=1)
    assert view(browser)[0] < zoomed[0], "what is dragged to the right comes from the left"
    assert browser.complaints() == []


def test_a_tooltip_says_what_a_span_is(browser: Browser, page: Path) -> None:
    browser.open(page)
    left, wide, top = browser.evaluate(
        "(b => [b.left, b.width, b.top])((document.querySelector('canvas').scrollIntoView({block: 'center'}), "
        "document.querySelector('canvas').getBoundingClientRect()))"
    )
    said = set()
    for row in range(48, 300, 16):
        for share in (0.5, 0.9, 0.95):
            browser.mouse("mouseMoved", left + wide * share, top + row)
            said.add(browser.evaluate_now("(t => t.hidden ? '' : t.innerText)(document.querySelector('.tip'))"))
    text = "\n---\n".join(said)
    assert "backward Net" in text and "rank 0 on here" in text and f"rank 1 on {HOSTILE[0]}" in text
    assert "transfer 0\n50.00 ms" in text and "4.20 MB, 84.0 MB/s" in text
    assert browser.evaluate("window.pwned === undefined") and browser.complaints() == []


def test_a_request_or_a_handler_in_the_page_would_be_noticed(browser: Browser, page: Path, tmp_path: Path) -> None:
    """The policy stops both and says so; without the policy the request is seen."""
    slipped = page.read_text().replace("<main>", f"<main><img src='{CONTROL}' onerror='window.pwned = 1'>")
    (tmp_path / "guarded.html").write_text(slipped)
    browser.open(tmp_path / "guarded.html")
    assert browser.evaluate("window.pwned === undefined") and len(browser.complaints()) >= 2

    (tmp_path / "open.html").write_text(slipped.replace("Content-Security-Policy", "x-no-policy"))
    browser.open(tmp_path / "open.html")
    assert CONTROL in browser.requested() and browser.evaluate("window.pwned === 1")


def test_a_page_with_servers_is_drawn_in_full_and_in_a_narrow_window(browser: Browser, tmp_path: Path) -> None:
    workers, servers = with_servers(held_s=0.12)
    write(tmp_path / "job", [*workers, *servers])
    write_report(tmp_path / "job", None)
    for width in (1280, 390):
        browser.open(tmp_path / "job" / "report.html", width=width)
        assert browser.evaluate("document.querySelectorAll('#servers .histogram rect').length") == 3
        assert browser.evaluate("document.querySelector('.histogram svg').getBoundingClientRect().height") > 50
        assert browser.evaluate("document.querySelectorAll('#servers svg.line polyline').length") == 2
        assert browser.evaluate("document.querySelectorAll('table.workers-at-servers tr').length") == 4
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than its window"
        assert browser.complaints() == []
