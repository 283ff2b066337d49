"""Memory plan of a run.

`memory` computes the plan, `advice` finds settings that fit, and `display` shows both. `command` is
`--plan`, `fitting` fits a run to its devices at startup, and `host` measures free host memory.
Without this folder `--plan` is refused, and a run must set the size of its micro-batches and, on an
accelerator, of its cache.
"""
