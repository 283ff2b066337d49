import asyncio
import re


def economy(completions, completion_ids, **kwargs):
    """1 for nothing, toward 0 for long completions."""
    return [20 / (20 + len(ids)) for ids in completion_ids]


async def grounded(prompts, completions, answers, **kwargs):
    """Whether a result holds an accepted answer; None for completions without a result."""

    async def score(completion, accepted):
        await asyncio.sleep(0)  # in place of a call of a server
        results = re.findall(r"<information>(.*?)</information>", completion, re.DOTALL)
        if not results:
            return None
        return float(any(answer in result for answer in accepted for result in results))

    return await asyncio.gather(*map(score, completions, answers))
