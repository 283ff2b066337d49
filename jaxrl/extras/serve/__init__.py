"""HTTP endpoint for jaxrl's engine: `jaxrl serve RUN_OR_FOLDER`.

A request passes through `server.py` (HTTP and authentication), `schemas.py` (request bodies),
`chats.py` (prompts from stored token ids), `generation.py` (completions and their cache),
`worker.py` (the engine's thread) and `engine.py` (sampling settings per request). `completions.py`
implements OpenAI's API, `messages.py` Anthropic's, and `loading.py` loads a run or a model folder.
"""
