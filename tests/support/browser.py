"""A headless Chromium, driven over its DevTools protocol; tests that need one skip where there is none."""

import contextlib
import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge", "microsoft-edge")


def executable() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser was found (looked for {', '.join(NAMES)}; on Debian: apt-get install chromium)")
    return found


class Page:
    """One tab. ``problems``: console errors, uncaught exceptions and refused content; ``requests``: every URL asked for."""

    def __init__(self, socket, width: int) -> None:
        self.socket, self.number = socket, 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **params) -> dict:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=600))
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, method: str, params: dict) -> None:
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])

    def open(self, url: str) -> None:
        self.loaded = False
        self.call("Page.navigate", url=url)
        while not self.loaded:
            message = json.loads(self.socket.recv(timeout=600))
            self._note(message.get("method"), message.get("params", {}))

    def run(self, script: str):
        """The value of a JavaScript expression."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def hover(self, selector: str, number: int = 0) -> None:
        """Move the mouse to the middle of the n-th element."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{number}];"
            "e.scrollIntoView({block: 'center'}); const b = e.getClientRects()[0];"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def scheme(self, name: str) -> None:
        """``light`` or ``dark``, as the reader's system asks for."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])


@contextlib.contextmanager
def page(profile: Path, width: int = 1200):
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    options += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen([executable(), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = _address(process, profile / "DevToolsActivePort")
        with connect(address, max_size=None, proxy=None) as browser:
            browser.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
            while (message := json.loads(browser.recv(timeout=600))).get("id") != 1:
                pass
            target = next(t["targetId"] for t in message["result"]["targetInfos"] if t["type"] == "page")
        with connect(f"{address.rsplit('/', 2)[0]}/page/{target}", max_size=None, proxy=None) as tab:
            yield Page(tab, width)
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen, file: Path) -> str:
    """Where the browser listens; it writes the port and path into a file of its profile once it does."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        assert process.poll() is None, "the browser ended before it listened"
        with contextlib.suppress(OSError):
            lines = file.read_text().split()
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise AssertionError("the browser did not start")
