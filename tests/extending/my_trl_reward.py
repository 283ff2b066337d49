import asyncio
import re


def economy(completions, completion_ids, **kwargs):
    """Return 1 for an empty completion and less for longer ones."""
    return [20 / (20 + len(ids)) for ids in completion_ids]


async def grounded(prompts, completions, answers, **kwargs):
    """Return whether a search result contains an accepted answer; None without results."""

    async def score(completion, accepted):
        await asyncio.sleep(0)  # stands in for a server call
        results = re.findall(r"<information>(.*?)</information>", completion, re.DOTALL)
        if not results:
            return None
        return float(any(answer in result for answer in accepted for result in results))

    return await asyncio.gather(*map(score, completions, answers))
