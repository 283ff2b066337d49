"""Play tasks with jaxrl/extras/serve/agents/verifiers.py, in the interpreter of verifiers.

Reads a JSON object: `module` (path of that file), `tasks`, `calls` (arguments of `play` by task),
and `deadline_s`. Writes an object with `results` (rewards or error messages), `num_checked`
(answers that verifiers has accepted), and `num_open` (clients of the model that are not closed).
"""

import asyncio
import gc
import importlib.util
import json
import sys

import renderers.client
from verifiers.v1.clients.train import TrainClient

job = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("played", job["module"])
played = importlib.util.module_from_spec(spec)
spec.loader.exec_module(played)
counts = {"num_checked": 0}
check = renderers.client._parse_completion_logprobs


def count_checks(choice, completion_ids):
    logprobs = check(choice, completion_ids)
    counts["num_checked"] += 1
    return logprobs


renderers.client._parse_completion_logprobs = count_checks


async def main():
    async def play(task, call):
        try:
            return await asyncio.wait_for(played.play(task, **call), job["deadline_s"])
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    results = await asyncio.gather(*map(play, job["tasks"], job["calls"]))
    gc.collect()
    clients = [item.client for item in gc.get_objects() if isinstance(item, TrainClient)]
    return {"results": results, "num_open": sum(not client.is_closed() for client in clients)}


print(json.dumps(asyncio.run(main()) | counts))
