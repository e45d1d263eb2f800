"""A real browser without a window, told what to do over a pipe in Chrome's DevTools protocol: no package is needed for it.

Messages are JSON and end in a zero byte; the browser reads from its descriptor 3 and writes to 4. Every wait has a deadline.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S = 60.0
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # the browser's own calls home reach nobody either
)  # fmt: skip
HAND_OVER = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"


def find_browser() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


class Browser:
    """One page at a time. `events` is everything that the browser has said by itself: console, exceptions, requests."""

    def __init__(self, program: str, folder: Path) -> None:
        self.net_log = folder / "net-log.json"
        self.events: list[dict[str, Any]] = []
        self._count = 0
        self._rest = b""
        theirs_in, self._to = _pipe()
        self._from, theirs_out = _pipe()
        options = [*OPTIONS, f"--user-data-dir={folder / 'profile'}", f"--log-net-log={self.net_log}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", HAND_OVER, str(theirs_in), str(theirs_out), program, *options, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._read_until(lambda message: message.get("id") == self._count)
        assert "error" not in answer, answer
        return answer["result"]

    def _read_until(self, wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while True:
            while b"\0" in self._rest:
                text, self._rest = self._rest.split(b"\0", 1)
                message: dict[str, Any] = json.loads(text)
                self.events.append(message)
                if wanted(message):
                    return message
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(self._from, 1 << 16) if ready else b""
            assert received, f"the browser has said nothing for {LIMIT_S} s, or is gone"
            self._rest += received

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        if not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self._read_until(lambda event: event.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, after the next two frames: what was asked for has been drawn."""
        settled = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        return self.evaluate_now(f"{settled}.then(() => ({expression}))")

    def evaluate_now(self, expression: str) -> Any:
        made = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in made, made
        return made["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def complaints(self) -> list[Any]:
        """Uncaught exceptions and everything in the console, which a violation of the page's security policy is too."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in kinds]

    def requested(self) -> list[str]:
        requests = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in requests]

    def close(self) -> None:
        """End it in order, so that its log of requests is whole."""
        self._session = None
        self.call("Browser.close")
        try:
            self._process.wait(LIMIT_S)
        finally:
            self._process.kill()
            self._process.wait(LIMIT_S)
            os.close(self._to)
            os.close(self._from)


def _pipe() -> tuple[int, int]:
    """Both ends have numbers above those that the browser wants to have."""
    made = []
    for end in os.pipe():
        made.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return made[0], made[1]
