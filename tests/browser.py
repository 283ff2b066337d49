"""Headless Chromium, controlled through a pipe by the DevTools protocol."""

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
    """Mark a test that needs a browser; it is skipped without one."""
    missing = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
    return pytest.mark.minutes(missing(test))


class Browser:
    """Browser with one page.

    Attributes:
        requests: Addresses that the page requested.
        errors: Exceptions of its scripts, and violations of its security policy.
    """

    def __init__(self, folder, *, width=1280, height=860):
        """Start it with a profile in `folder` and a page of this size in pixels."""
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
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **parameters):
        """Return the result of a method of the protocol, collecting events meanwhile."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send_end, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._message()
            if reply.get("id") == number:
                assert "error" not in reply, reply["error"]
                return reply["result"]
            event, details = reply.get("method"), reply.get("params", {})
            if event == "Network.requestWillBeSent":
                self.requests.append(details["request"]["url"])
            elif event == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(details["exceptionDetails"])[:500])
            elif event == "Log.entryAdded" and details["entry"]["level"] == "error":
                self.errors.append(details["entry"]["text"])

    def evaluate(self, expression):
        """Return the value of an expression in the page, or of its promise."""
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, expression, *, seconds=20):
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} is not true: {self.errors}"
            time.sleep(0.01)
        return value

    def open(self, address, view=""):
        """Open an address and wait until its view is drawn."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait(f"document.documentElement?.dataset.ready === {json.dumps(view)}")

    def go(self, view, query=""):
        """Go to another view of the open page."""
        self.evaluate("delete document.documentElement.dataset.ready")
        self.evaluate(f"location.hash = {json.dumps(view + ('?' + query if query else ''))}")
        self.wait(f"document.documentElement?.dataset.ready === {json.dumps(view)}")

    def text(self, selector="body"):
        """Return the text of an element."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")
