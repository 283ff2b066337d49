"""The memory plan of a run: `memory` computes, `advice` looks for settings, `display` shows both.

`command` is what `--plan` does, `fitting` fits a run to the devices that it is started on, of which
`host` tells what is free. Without this folder `--plan` is refused,
and a run names its micro-batches and, on an accelerator, the size of its cache.
"""
