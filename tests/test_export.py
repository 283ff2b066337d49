"""The device programs lower for accelerators, without one, and have the operations they should."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax import export

from jaxrl.models.attention.reference import XLA
from tests.helpers import ROOT
from tests.programs import (
    CONFIG,
    CUSTOM_CALLS,
    equations,
    lower_for,
    products,
    sampler_programs,
    trainer_programs,
    v6e_chip,
)

LAYERS = pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])


@cache
def programs(kernels, scan_layers):
    """Return the programs with these kernels, which several tests lower."""
    settings = {"kernels": kernels, "scan_layers": scan_layers}
    return sampler_programs(**settings) | trainer_programs(**settings)


@pytest.mark.parametrize("name", ["decode", "prefill", "update"])
@pytest.mark.parametrize(
    ("kernels", "scan_layers"),
    # Without kernels, tests on a CPU compile unrolled layers.
    [("xla", True), ("triton", False), ("triton", True), ("mosaic", False), ("mosaic", True)],
)
def test_lowers_for(name, kernels, scan_layers):
    platforms = {"xla": ("cuda", "tpu"), "triton": ("cuda",), "mosaic": ("tpu",)}[kernels]
    function, arguments = programs(kernels, scan_layers)[name]
    lower = export.export(jax.jit(function), platforms=platforms, disabled_checks=CUSTOM_CALLS)
    exported = lower(*arguments)
    assert exported.platforms == platforms
    text = exported.mlir_module()
    assert "dot_general" in text
    assert ("triton" in text) == (kernels == "triton")
    assert ("tpu_custom_call" in text) == (kernels == "mosaic")


def test_the_optimizer_lowers_without_products():
    function, arguments = programs("xla", True)["optimizer"]
    exported = export.export(jax.jit(function), platforms=("cuda", "tpu"))(*arguments)
    assert "dot_general" not in exported.mlir_module()


@pytest.mark.parametrize(
    ("name", "kernels"),
    # Not of the update's splash attention, which is JAX's own and multiplies in float32.
    [(name, kernels) for name in ("decode", "prefill") for kernels in ("xla", "triton", "mosaic")]
    + [("update", "xla"), ("update", "triton")],
)
@LAYERS
def test_products_take_bfloat16_and_outside_of_layers_give_float32(name, kernels, scan_layers):
    function, arguments = programs(kernels, scan_layers)[name]
    equations_of_products = products(jax.make_jaxpr(function)(*arguments).jaxpr)
    for equation in equations_of_products:
        inputs = {operand.aval.dtype for operand in equation.invars}
        assert inputs == {jnp.dtype("bfloat16")}, equation
    dtypes = [str(equation.outvars[0].aval.dtype) for equation in equations_of_products]
    assert set(dtypes) == {"bfloat16", "float32"}
    # A layer has seven products with weights; the others are scores, averages and logits.
    num_layers = 1 if scan_layers else 2
    if name == "update":
        assert dtypes.count("bfloat16") >= num_layers * 7 * 3
        # Forward, again for the gradient, and that; the output layer has four.
        in_layer = 2 + 2 + {"xla": 5, "triton": 3 + 4}[kernels]
        assert dtypes.count("float32") == num_layers * in_layer + 4
    else:
        assert dtypes.count("bfloat16") == num_layers * 7


@pytest.mark.parametrize(
    ("kind", "scan_layers"), [("greedy", True), ("full", False), ("top_p", True)]
)
def test_no_operation_of_a_decoding_step_depends_on_data_outside_of_kernels(kind, scan_layers):
    def branches(kernels):
        settings = {"kernels": kernels, "kind": kind, "scan_layers": scan_layers}
        function, arguments = sampler_programs(**settings)["decode"]
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
        names = [equation.primitive.name for equation in equations(jaxpr, in_kernels=False)]
        return [name for name in names if name in ("cond", "while")]

    assert branches("triton") == branches("mosaic") == []
    # For comparison: XLA's attention has a loop as long as the longest row.
    assert branches("xla") == ["while"] * (1 if scan_layers else 2)
    # On a CPU the host chooses the program by the length of the past.
    assert "cond" not in branches(XLA)


@pytest.mark.slow(instead="sampling/test_layers.py::test_the_cache_is_written_where_it_lies")
@pytest.mark.skipif(
    not (importlib.util.find_spec("libtpu") or os.environ.get("LIBTPU_DIR")),
    reason="libtpu is not installed; LIBTPU_DIR may name a folder of `pip install --target`",
)
def test_all_compile_for_a_v6e_without_copies_of_pages_or_whole_scores():
    command = [sys.executable, "-m", "tests.test_export"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr[-3000:]
    temporary_bytes = json.loads(result.stdout.splitlines()[-1])
    for name in ("decode", "prefill"):
        for how in ("unrolled", "scanned"):
            # The cache is 128 MiB: not one layer's keys are copied.
            assert temporary_bytes[f"{name}, {how}"] < 4 * 2**20
    # Scores of 4,096 tokens by 4,096 in one head alone would be 64 MiB.
    assert temporary_bytes["update"] < 32 * 2**20


def main():
    """Print the temporary bytes of all programs, from the TPU compiler."""
    chip = v6e_chip()
    wide = replace(
        CONFIG, width=256, mlp_width=512, head_dim=128, vocab_size=4096, max_positions=2**16
    )
    temporary_bytes = {}

    def measure(label, function, arguments):
        program = lower_for(chip, function, arguments, donate_argnums=1).compile()
        temporary_bytes[label] = program.memory_analysis().temp_size_in_bytes

    on_chip = {"device": chip, "kernels": "mosaic"}
    for how in ("unrolled", "scanned"):
        sampler = sampler_programs(wide, **on_chip, num_pages=512, scan_layers=how == "scanned")
        for name, program in sampler.items():
            measure(f"{name}, {how}", *program)
    settings = {"rows": 1, "row_tokens": 4096, "logits_chunk_tokens": 1024}
    measure("update", *trainer_programs(wide, **on_chip, **settings)["update"])
    print(json.dumps(temporary_bytes))


if __name__ == "__main__":
    main()
