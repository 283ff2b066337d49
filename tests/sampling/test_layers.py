"""The sampler's loop over layers compiles one layer for all and never copies the cache."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxrl.sampling import decode
from tests.programs import CONFIG, sampler_programs

NUM_PAGES = 4096


def compile_program(name, num_layers, *, scan_layers=True):
    function, arguments = sampler_programs(
        replace(CONFIG, num_layers=num_layers), num_pages=NUM_PAGES, dtype=jnp.float32,
        scan_layers=scan_layers,
    )[name]  # fmt: skip
    return jax.jit(function, donate_argnums=1).lower(*arguments).compile()


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_program_size_does_not_grow_with_the_number_of_layers(name):
    few, many = (compile_program(name, num_layers).as_text().count(" = ") for num_layers in (4, 16))
    assert few > 100
    assert many < 1.05 * few


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["decode", "prefill"])
@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_the_cache_is_written_where_it_lies(name, scan_layers):
    sizes = compile_program(name, 2, scan_layers=scan_layers).memory_analysis()
    # Keys and values of 2 layers: 2 heads of 16, 16 tokens a page, 4 bytes.
    cache = 2 * 2 * NUM_PAGES * 2 * 16 * 16 * 4
    assert sizes.alias_size_in_bytes >= cache
    assert sizes.temp_size_in_bytes < cache / 50  # less than the keys of one layer


def test_layers_are_scanned_only_where_that_saves_copies_of_weights():
    scanned = {
        (platform, has_adapter)
        for platform in ("cpu", "gpu", "tpu")
        for has_adapter in (False, True)
        if decode.should_scan_layers(True, platform, has_adapter=has_adapter)
    }
    assert scanned == {("gpu", True), ("tpu", False), ("tpu", True)}
    assert not decode.should_scan_layers(False, "tpu", has_adapter=True)
