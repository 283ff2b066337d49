"""Plays tasks by jaxrl/extras/serve/agents/verifiers.py, in the interpreter of verifiers.

Read is one JSON object: `module` (path of that file), `tasks`, `calls` (arguments of `play` by
task), and `deadline_s`. Written is an object with `results` (what came back, or the error's text),
`num_checked` and `num_refused` (answers that verifiers has checked, and that it has refused), and
`num_open` (clients of the model that are not closed).
"""

import asyncio
import gc
import importlib.util
import json
import sys

import renderers.client
from verifiers.v1.clients.train import TrainClient

given = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("played", given["module"])
played = importlib.util.module_from_spec(spec)
spec.loader.exec_module(played)
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
    async def one(task, call):
        try:
            return await asyncio.wait_for(played.play(task, **call), given["deadline_s"])
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    results = await asyncio.gather(*map(one, given["tasks"], given["calls"]))
    gc.collect()
    clients = [one.client for one in gc.get_objects() if isinstance(one, TrainClient)]
    return {"results": results, "num_open": sum(not one.is_closed() for one in clients)}


print(json.dumps(asyncio.run(main()) | counts))
