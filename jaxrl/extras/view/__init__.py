"""A local page about runs: curves as they grow, trajectories token by token, questions over steps.

`python -m jaxrl.extras.view RUN [RUN ...]`, or `jaxrl view`. It reads what a run writes and changes
nothing in it: `index.py` knows trajectories by their place in their files, `curves.py` follows
`metrics.jsonl`, `evaluations.py` reads `eval/`, `tokens.py` makes numbers and texts of a
trajectory's tokens, `pages.py` answers what the page asks, `server.py` is HTTP.
"""
