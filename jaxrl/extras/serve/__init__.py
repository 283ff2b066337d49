"""HTTP endpoint for jaxrl's engine: `jaxrl serve RUN_OR_FOLDER`.

A request passes through `server.py` (HTTP and authentication), `schemas.py` (bodies of all
dialects), `chats.py` (prompts from stored token ids), `generation.py` (completions and their
cache), `worker.py` (the engine's thread) and `engine.py` (sampling settings per request).
`completions.py` and `messages.py` implement the dialects, and `loading.py` loads a run or a model
folder.
"""
