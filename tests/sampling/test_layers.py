"""The sampler's loop over layers: one layer is compiled for all, and the cache is never copied."""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxrl.sampling import decode
from tests.programs import CONFIG, sampler_programs

PAGES = 4096


def compiled(name, num_layers, *, scan_layers=True):
    function, arguments = sampler_programs(
        replace(CONFIG, num_layers=num_layers), num_pages=PAGES, dtype=jnp.float32,
        scan_layers=scan_layers,
    )[name]  # fmt: skip
    started = time.process_time()
    program = jax.jit(function, donate_argnums=1).lower(*arguments).compile()
    return program, time.process_time() - started


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["decode", "append"])
def test_64_layers_are_as_large_a_program_as_16(name):
    programs = [compiled(name, num_layers)[0].as_text() for num_layers in (16, 64)]
    instructions = [program.count(" = ") for program in programs]
    assert instructions[0] > 100
    assert instructions[1] < 1.05 * instructions[0]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["decode", "append"])
@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_the_cache_is_written_where_it_lies(name, scan_layers):
    program, _ = compiled(name, 4, scan_layers=scan_layers)
    sizes = program.memory_analysis()
    # Keys and values of 4 layers: 2 heads of 16, 16 tokens a page, 4 bytes.
    cache = 2 * 4 * PAGES * 2 * 16 * 16 * 4
    assert sizes.alias_size_in_bytes >= cache
    assert sizes.temp_size_in_bytes < cache / 50  # not even one layer's keys


def test_a_loop_over_layers_only_where_it_costs_no_copies_of_weights_or_spares_some():
    loops = {(platform, has): decode.should_scan_layers(True, platform, has_adapter=has)
             for platform in ("cpu", "gpu", "tpu") for has in (False, True)}  # fmt: skip
    assert {one for one, loop in loops.items() if loop} == {
        ("gpu", True), ("tpu", False), ("tpu", True)
    }  # fmt: skip
    assert not decode.should_scan_layers(False, "tpu", has_adapter=True)
