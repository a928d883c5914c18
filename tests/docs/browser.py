"""A headless Chromium, driven by its DevTools protocol over a pipe: pages at a width, console errors, screenshots.

    python tests/docs/browser.py FOLDER [PAGE ...]

Takes screenshots of pages of build/site into FOLDER, at both widths; of every page, if none is named.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
HEIGHTS = {1280: 800, 390: 844}  # of the windows, by width
DEADLINE_S = 30.0


class Tab:
    """A page of the browser."""

    def __init__(self, sent: BinaryIO, received: BinaryIO) -> None:
        self._sent, self._received, self._unread = sent, received, b""
        self._ids, self._session = itertools.count(1), {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the result of a method of the protocol."""
        call = next(self._ids)
        message = {"id": call, "method": method, "params": params, **self._session}
        self._sent.write(json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != call:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        parts = [self._unread]
        while b"\0" not in parts[-1]:
            if not (part := self._received.read1(1 << 16)):
                raise EOFError("Chromium ended.")
            parts.append(part)
        text, _, self._unread = b"".join(parts).partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, url: str, width: int) -> None:
        """Loads a page in a window of this width, and waits until it is complete."""
        self.resize(width)
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def resize(self, width: int) -> None:
        size = {"width": width, "height": HEIGHTS[width], "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def run(self, script: str) -> Any:
        """Returns the value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Returns the value of an expression once it is true."""
        end = time.monotonic() + DEADLINE_S
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"not true within {DEADLINE_S:g} s: {script}")
            self.run("new Promise(resolve => setTimeout(resolve, 50))")
        return value

    def errors(self) -> list[str]:
        """Returns what the console shows as errors since the page was opened."""
        self.run("0")  # its answer comes after the events
        found = []
        for event in self.events:
            match event:
                case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                    found.append(str(details.get("exception", {}).get("description", details["text"])))
                case {"method": "Runtime.consoleAPICalled", "params": {"type": "error", "args": args}}:
                    found.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in args))
                case {"method": "Log.entryAdded", "params": {"entry": {"level": "error"} as entry}}:
                    found.append(f"{entry['text']} {entry.get('url', '')}")
        return found

    def screenshot(self, path: Path, **options: Any) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def open_tab(chromium: str) -> Iterator[Tab]:
    """Starts a browser with one tab; it ends with the pipe."""
    with tempfile.TemporaryDirectory(prefix="chromium_", ignore_cleanup_errors=True) as folder:
        for name in ("in", "out"):
            os.mkfifo(Path(folder) / name)
        # The protocol's pipes are descriptors 3 and 4.
        shell = ["sh", "-c", 'exec "$0" "$@" 3<in 4>out', chromium]
        command = [*shell, *FLAGS, f"--user-data-dir={folder}/profile", "--remote-debugging-pipe", "about:blank"]
        quiet = subprocess.DEVNULL
        options = {"cwd": folder, "stdin": quiet, "stdout": quiet, "stderr": quiet, "start_new_session": True}
        with subprocess.Popen(command, **options) as process:
            try:
                with open(f"{folder}/in", "wb", buffering=0) as sent, open(f"{folder}/out", "rb") as received:
                    tab = Tab(sent, received)
                    yield tab
                    tab.call("Browser.close")
                process.wait(10)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its helpers, too


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serves a folder on this machine; the value is its address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def main(folder: str, *pages: str) -> None:
    site = Path(__file__).parents[2] / "build/site"
    chromium = find_chromium() or sys.exit(f"none of {', '.join(NAMES)} is on the PATH")
    names = pages or sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    with serve(site) as address, open_tab(chromium) as tab:
        for name, width in itertools.product(names, HEIGHTS):
            tab.open(f"{address}/{name}", width)
            path = Path(folder) / f"{name.replace('/', '_').removesuffix('.html')}_{width}.png"
            tab.screenshot(path, captureBeyondViewport=True)
            wide = tab.run("document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth")
            print(path.name, *([f"scrolls by {wide} px"] if wide else []), *tab.errors(), sep=", ")


if __name__ == "__main__":
    main(*sys.argv[1:])
