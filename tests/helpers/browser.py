"""The manual as a site, and headless Chromium, driven by its DevTools protocol without packages.

`open_page` says what a page asked for, what its console said, and runs expressions in it.
"""

import contextlib
import itertools
import json
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT, run_python

NEEDED = "sphinx myst_nb sphinx_book_theme sphinx_copybutton sphinx_design matplotlib".split()
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run
    --disable-background-networking --disable-component-update --disable-sync --disable-extensions
    --hide-scrollbars --remote-debugging-pipe
""".split()


def build_site(root: Path, site: Path) -> None:
    """Builds the manual of a repository, without a warning."""
    for name in NEEDED:
        pytest.importorskip(name, reason=f"{name} is in the docs extra")
    command = ["-m", "sphinx", "-W", "-q", "-b", "html", "docs", str(site)]
    result = run_python(*command, cwd=root, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr


class Browser:
    """A running Chromium with one page."""

    def __init__(self, executable: str, profile: str):
        command = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # It reads commands from file descriptor 3, and writes to 4: here its input and its output.
        shell = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1', "sh"]
        self._process = subprocess.Popen(
            [*shell, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(60)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self, timeout: float) -> dict[str, Any]:
        """Returns the next message, after noting it if it is an event."""
        assert self._process.stdout is not None
        end = time.monotonic() + timeout
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], end - time.monotonic())
            if not ready:
                raise TimeoutError(f"Chromium said nothing for {timeout} seconds.")
            read = self._process.stdout.read(65536)
            if not read:
                raise RuntimeError(f"Chromium ended, with code {self._process.wait()}.")
            self._unread += read
        text, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def open_page(self, url: str, width: int = 1280) -> None:
        """Opens a page of a width, and waits until it has loaded; `events` are of it alone."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        for each in ("about:blank", url):
            self.events.clear()
            self.call("Page.navigate", url=each)
            while not any(event["method"] == "Page.loadEventFired" for event in self.events):
                self._read(60)
        # What scripts do once the page is there, such as the requests that they make.
        script = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))"
        self.evaluate(script)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page, as if a user asked for it."""
        result = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,  # without it, nothing can be copied
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 10) -> None:
        """Waits until a JavaScript expression is true in the page."""
        end = time.monotonic() + seconds
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} was not true within {seconds} seconds.")
            time.sleep(0.05)

    def requests(self) -> list[str]:
        """Returns the addresses that the page has asked for."""
        sent = (e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent")
        return [each["request"]["url"] for each in sent]

    def complaints(self) -> list[str]:
        """Returns errors and warnings of the console, exceptions, and requests that failed."""
        found = []
        for event in self.events:
            method, values = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(values["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
                found.append(" ".join(str(each.get("value")) for each in values["args"]))
            elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                found.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
            elif method == "Network.loadingFailed" and not values.get("canceled"):
                found.append(f"a request failed: {values['errorText']}")
            elif method == "Network.responseReceived" and values["response"]["status"] >= 400:
                found.append(f"{values['response']['status']}: {values['response']['url']}")
        return found

    def close(self) -> None:
        """Ends Chromium."""
        self._session = None
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Runs Chromium while the context lasts; skips the test if this machine has none."""
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip("there is no Chromium on this machine")
    browser = Browser(executable, str(profile))
    try:
        yield browser
    finally:
        browser.close()
