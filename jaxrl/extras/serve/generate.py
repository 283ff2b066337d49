"""`POST /inference/v1/generate`: ids in, ids out, as the training client of verifiers asks.

Rendering and the reading of calls are the client's. Every id that was sampled is given back, the
one that stops the answer included, since the next turn's prompt is made of them.
"""

from __future__ import annotations

from typing import Any

from jaxrl.extras.serve.answers import Answer, Limits, Question, joined, read_question
from jaxrl.extras.serve.completions import SAMPLED
from jaxrl.extras.serve.fields import Fields, RefusedError


def read(fields: Fields, limits: Limits) -> Question:
    """Reads a body.

    Raises:
        RefusedError: names what is wrong, or cannot be done.
    """
    fields.text("model", "")
    fields.only({"features": ({},), "content_parts": ([],), "stream": (False,)})
    sampling = fields.inner("sampling_params")
    sampling.only(SAMPLED)
    if sampling.whole("n", 1, 1) != 1:
        raise sampling.refuse("n", "1")
    limits.check(fields.items("token_ids"))
    prompt_ids = fields.ids("token_ids", limits.num_tokens, limits.max_total_tokens)
    if not prompt_ids:
        raise RefusedError(400, "token_ids is empty; expected at least one id.", param="token_ids")
    has_budget = "max_tokens" in sampling.values
    budget = sampling.whole("max_tokens", 1, 1) if has_budget else None
    return read_question(sampling, prompt_ids, limits, budget)


def finished(answer: Answer) -> dict[str, Any]:
    """The whole answer."""
    piece = joined(answer.samples[0].pieces)
    num_prompt, num_sampled = len(answer.question.prompt_ids), len(piece.token_ids)
    return {
        "request_id": f"gen-{answer.id}",
        "choices": [
            {
                "index": 0,
                "token_ids": list(piece.token_ids),
                "finish_reason": piece.end,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{id}", "logprob": logprob}
                        for id, logprob in zip(piece.token_ids, piece.logprobs, strict=True)
                    ]
                },
            }
        ],
        "prompt_token_ids": list(answer.question.prompt_ids),
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
            "prompt_tokens_details": {"cached_tokens": piece.num_cached},
        },
    }
