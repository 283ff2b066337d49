"""Memory planning.

`memory` computes the plan, `advice` searches for settings that fit, and `display` formats both.
`command` implements `--plan`, `fitting` sizes micro-batches at startup, and `host` measures free
host memory. Without this folder, `--plan` raises an error, and the config must set the micro-batch
size and, on an accelerator, the cache size.
"""
