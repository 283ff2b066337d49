"""What the sampler compiles for the configurations here, and what its kernels read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.components import draw_kinds
from jaxrl.models.attention.kernels import PAGE_TOKENS
from jaxrl.models.attention.tpu import page_of_step
from jaxrl.sampling.engine import append_sizes, fractions
from tests.helpers import ROOT

CONFIGS = [
    path
    for path in sorted((ROOT / "configs").glob("*.py"))
    if "def get_config" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_ten_programs_at_most(path, tiny_world):
    names = {}
    exec(path.read_text(encoding="utf-8"), names)
    published = path.stem in ("search_r1", "search_r1_brief", "dapo", "bapo", "ares", "passk")
    config = names["get_config"]() if published else names["get_config"](str(tiny_world))
    rows = fractions(config.rollout.num_rows, (1, 4, 16))
    reads = append_sizes("gpu", config.rollout.max_total_tokens)
    assert len(rows) * len(draw_kinds(config)) + len(reads) + 2 <= 10


def lengths_of(name, rng, count):
    """Cached tokens of so many rows, at a random moment."""
    median, spread, most = {
        "search": (900, 0.4, 4095),
        "math": (1500, 0.8, 8191),
        "dapo": (4000, 0.9, 22527),
    }[name]
    return np.clip(rng.lognormal(np.log(median), spread, count), 1, most).astype(int)


@pytest.mark.parametrize("name", ["search", "math", "dapo"])
def test_a_decoding_step_fetches_live_pages_and_no_others(name):
    page, rng = PAGE_TOKENS["mosaic"], np.random.default_rng(0)
    lengths = lengths_of(name, rng, 256)
    limits = np.where(rng.random(256) < 0.8, lengths, 0)  # the others wait or have stopped
    num_pages = -(-limits // page)
    width = num_pages.max()
    tables = rng.permutation(256 * width).reshape(256, width)
    rows, steps = (x.ravel() for x in np.mgrid[:256, :width])
    pages = jax.vmap(lambda b, j: page_of_step(b, j, jnp.array(tables), jnp.array(num_pages))[0])(
        rows, steps
    )
    fetched = page * (1 + np.count_nonzero(np.diff(pages)))
    assert limits.sum() <= fetched <= 1.15 * limits.sum() + page * len(limits)
