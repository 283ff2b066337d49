"""Plays tasks by jaxrl/extras/serve/agents/verifiers.py, in the interpreter of verifiers.

The standard input is one JSON object: `module` (path of the file), `tasks`, `calls` (arguments of
`play` by task), and `count` (whether verifiers' checks of answers are counted). Written is an
object with `results` (what came back, or the error's text), `num_checked`, `num_refused`, and
`num_clients` (model clients that are left open).
"""

import asyncio
import gc
import importlib.util
import json
import os
import sys

given = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("played", given["module"])
played = importlib.util.module_from_spec(spec)
spec.loader.exec_module(played)

import renderers.client  # noqa: E402
from verifiers.v1.clients.train import TrainClient  # noqa: E402

counts = {"num_checked": 0, "num_refused": 0}
check = renderers.client._parse_completion_logprobs


def counted(choice, completion_ids):
    counts["num_checked"] += 1
    try:
        return check(choice, completion_ids)
    except Exception:
        counts["num_refused"] += 1
        raise


renderers.client._parse_completion_logprobs = counted


async def main():
    limit = asyncio.Semaphore(given.get("max_concurrent", 16))

    async def one(task, call):
        async with limit:
            try:
                return await played.play(task, **call)
            except Exception as error:
                return f"{type(error).__name__}: {error}"

    return await asyncio.gather(
        *(one(*pair) for pair in zip(given["tasks"], given["calls"], strict=True))
    )


results = asyncio.run(main())
gc.collect()
open_clients = [
    one
    for one in gc.get_objects()
    if isinstance(one, TrainClient) and not one.client.is_closed()
]
num_files = len(os.listdir("/proc/self/fd"))
print(
    json.dumps(
        {"results": results, **counts, "num_clients": len(open_clients), "num_files": num_files}
    )
)
