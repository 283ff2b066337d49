"""Chromium without a window, driven through a pipe by its DevTools protocol."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

# The protocol's pipes are the descriptors 3 and 4.
_START = """
import fcntl, os, sys
receive, send = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(receive, 3)
os.dup2(send, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")


def needs_chromium(test):
    """A test in a browser, where there is one."""
    missing = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
    return pytest.mark.minutes(missing(test))


class Browser:
    """A browser with one page.

    Attributes:
        requests: addresses that the page asked for.
        errors: exceptions of its scripts, and what its policy refused.
    """

    def __init__(self, folder, *, width=1280, height=860):
        """Starts it.

        Args:
            folder: of its profile.
            width: of the page, pixels.
            height: likewise.
        """
        to_read, self._send_end = os.pipe()
        self._read_end, to_write = os.pipe()
        command = [sys.executable, "-c", _START, str(to_read), str(to_write), "chromium", *_FLAGS]
        command += ["--remote-debugging-pipe", f"--user-data-dir={Path(folder) / 'profile'}"]
        command += [f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest, self._numbers, self._session = b"", itertools.count(1), None
        self.requests, self.errors = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._send_end)
        os.close(self._read_end)

    def _message(self):
        while b"\0" not in self._rest:
            data = os.read(self._read_end, 2**16)
            if not data:
                raise RuntimeError("the browser has ended")
            self._rest += data
        found, self._rest = self._rest.split(b"\0", 1)
        return json.loads(found)

    def call(self, method, **parameters):
        """Result of a method of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send_end, json.dumps(message).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == number:
                assert "error" not in found, found["error"]
                return found["result"]
            event, told = found.get("method"), found.get("params", {})
            if event == "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            elif event == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["exceptionDetails"])[:500])
            elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
                self.errors.append(told["entry"]["text"])

    def evaluate(self, expression):
        """Value of an expression in the page; a promise is waited for."""
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, expression, *, seconds=20):
        """Value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} is not true: {self.errors}"
            time.sleep(0.01)
        return value

    def open(self, address, view=""):
        """Opens an address, and waits until its view is drawn."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait(f"document.documentElement?.dataset.ready === {json.dumps(view)}")

    def go(self, view, query=""):
        """Goes to another view of the page that is open."""
        self.evaluate("delete document.documentElement.dataset.ready")
        self.evaluate(f"location.hash = {json.dumps(view + ('?' + query if query else ''))}")
        self.wait(f"document.documentElement?.dataset.ready === {json.dumps(view)}")

    def text(self, selector="body"):
        """Text of an element."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def picture(self, path, *, is_dark=False):
        """Saves what the page looks like."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        data = self.call("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))
