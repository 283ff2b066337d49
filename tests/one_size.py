"""One shape for each program of a run; `python -m tests.one_size MODULE ...` runs a module so."""

import runpy
import sys

import pytest


def take_the_largest(patch):
    """Restrict sampler and update to their largest shapes."""
    from jaxrl.sampling import engine  # after the hook of `conftest.py`
    from jaxrl.training import packing

    for name in ("list_row_buckets", "list_prefill_buckets"):
        sizes = getattr(engine, name)
        patch.setattr(engine, name, lambda *given, sizes=sizes: sizes(*given)[-1:])
    patch.setattr(packing, "LOGIT_CAPACITIES", packing.LOGIT_CAPACITIES[-1:])
    sizes = packing.list_micro_batch_sizes
    patch.setattr(packing, "list_micro_batch_sizes", lambda *given: sizes(*given)[:1])


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        take_the_largest(patch)
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
