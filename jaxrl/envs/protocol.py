"""The tags a searching model writes: how they are parsed, defused and rendered.

The grammar is Search-R1's (https://arxiv.org/abs/2503.09516): the model thinks in
`<think>..</think>`, asks in `<search>..</search>`, reads the result in
`<information>..</information>` and closes with `<answer>..</answer>`.
"""

from __future__ import annotations

import re

from jaxrl.envs.base import Observation

TAGS = ("think", "search", "information", "answer")

STOP_STRINGS = ("</search>", "</answer>")
"""A turn of the model ends where one of these ends."""

_ANY_TAG = re.compile(rf"<(\s*(?:/\s*)?(?:{'|'.join(TAGS)})\s*(?:/\s*)?)>", re.IGNORECASE)


def last_query(turn: str) -> str | None:
    """What a turn that ends with `</search>` asks for, stripped; it may be blank.

    The query is the text after the last `<search>`. None when the turn ends otherwise or opens
    no search.
    """
    if not turn.endswith("</search>"):
        return None
    _, opener, query = turn.removesuffix("</search>").rpartition("<search>")
    return query.strip() if opener else None


def final_answer(response: str) -> str:
    """The last answer of a response, stripped.

    Without any `</answer>`, as when the budget ran out, it is the partial text after the last
    `<answer>`; without an opener it is "".
    """
    before_close, close, _ = response.rpartition("</answer>")
    _, opener, answer = (before_close if close else response).rpartition("<answer>")
    return answer.strip() if opener else ""


def sanitize(text: str) -> str:
    """Foreign text with the angle brackets of every protocol tag replaced by ‹ and ›.

    Opening, closing and self-closing tags count, in any case and with blanks inside the brackets.
    Lone surrogates, which JSON can carry and UTF-8 cannot, become "?".
    """
    return _ANY_TAG.sub(r"‹\1›", text).encode("utf-8", "replace").decode("utf-8")


def render_observation(body: str) -> Observation:
    """The block that answers a search. Nothing else writes `<information>`."""
    return Observation(prefix="\n\n<information>", body=sanitize(body), suffix="</information>\n\n")
