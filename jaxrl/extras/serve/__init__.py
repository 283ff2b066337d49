"""An endpoint over jaxrl's own engine: `jaxrl serve RUN_OR_FOLDER`.

`opening.py` makes the engine of a run or a folder, `engine.py` lets each request be drawn in its
own way, `worker.py` is the thread that owns it, `chats.py` builds prompts from the ids that were
sampled before, `fields.py` reads bodies, `answers.py` keeps answers for those who ask again,
`completions.py`, `generate.py` and `messages.py` are the dialects, `server.py` is HTTP.
"""
