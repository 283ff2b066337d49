"""Lowering of the accelerator kernels on a machine without an accelerator."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxrl.extras.kernels import attention_gpu as gpu
from jaxrl.extras.kernels import attention_tpu as tpu
from jaxrl.models.attention.choice import choose_prefill_block_tokens
from tests.helpers import ROOT
from tests.programs import for_gpu, lowered_for_gpu, v6e_chip

SHAPES = [
    # R, T, N, K, H, dtype
    (2, 4096, 16, 8, 128, "bfloat16"),
    (1, 200, 4, 1, 96, "float32"),
    (1, 200, 4, 2, 256, "bfloat16"),
]


def forward_and_backward(attend_packed):
    def run(q, k, v, key_ranges, gradient):
        out, back = jax.vjp(lambda q, k, v: attend_packed(q, k, v, key_ranges), q, k, v)
        return out, back(gradient)

    return jax.jit(run)


def inputs(R, T, N, K, H, dtype, **settings):
    make = jax.ShapeDtypeStruct
    q, kv = (make((R, T, heads, H), jnp.dtype(dtype), **settings) for heads in (N, K))
    return q, kv, kv, make((R, 3, T), jnp.int32, **settings), q


@pytest.mark.parametrize("shape", SHAPES)
def test_three_kernels_are_lowered_for_a_gpu(shape):
    program = lowered_for_gpu(forward_and_backward(for_gpu(gpu.attend_packed)), *inputs(*shape))
    assert len(re.findall(r"custom_call @\S*triton", program)) == 3


PAGES = [
    # B, Q, N, K, H, page, M, dtype
    (256, 1, 16, 8, 128, 64, 64, "bfloat16"),
    (64, 1, 14, 2, 64, 64, 32, "bfloat16"),
    (16, 16, 32, 8, 80, 64, 8, "float32"),
]


def page_inputs(B, Q, N, K, H, page, M, dtype, **settings):
    make, dtype = partial(jax.ShapeDtypeStruct, **settings), jnp.dtype(dtype)
    pages = make((B * M, K, page, H), dtype)
    tables, limits = make((B, M), jnp.int32), make((B, Q), jnp.int32)
    return make((B, Q, N, H), dtype), pages, pages, tables, limits


@pytest.mark.parametrize("shape", PAGES)
def test_attention_over_pages_is_lowered_for_a_gpu(shape):
    program = lowered_for_gpu(jax.jit(for_gpu(gpu.attend_pages)), *page_inputs(*shape))
    assert len(re.findall(r"custom_call @\S*triton", program)) == 1


HEADS = {
    # N, K, H
    "Qwen3-0.6B": (16, 8, 128),
    "Qwen2.5-7B": (28, 4, 128),
}
PROGRAMS = ("decode", "read")


def tpu_inputs(program, model, **settings):
    """Return inputs of 256 rows, or of blocks of 2,048 tokens."""
    block = choose_prefill_block_tokens("tpu", *HEADS[model][:2])
    sizes = (256, 1) if program == "decode" else (2048 // block, block)
    return page_inputs(*sizes, *HEADS[model], 128, 64, "bfloat16", **settings)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("model", HEADS)
def test_attention_over_pages_is_lowered_for_a_tpu(model, program):
    lower = jax.export.export(jax.jit(tpu.attend_pages), platforms=["tpu"])
    assert lower(*tpu_inputs(program, model)).mlir_module().count("@tpu_custom_call") == 1


@pytest.mark.slow(instead="test_export.py::test_lowers_for")
@pytest.mark.skipif(
    not (importlib.util.find_spec("libtpu") or os.environ.get("LIBTPU_DIR")),
    reason="libtpu is not installed; LIBTPU_DIR may name a folder of `pip install --target`",
)
def test_both_compile_for_a_v6e_splash_attention_with_temporaries_linear_in_tokens():
    command = [sys.executable, "-m", "tests.extras.kernels.test_lowering"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    short, long = map(int, result.stdout.split()[-2:])
    assert long < 2.5 * short


def main():
    """Print the temporary bytes that the TPU compiler reports for pages, and for 4,096 and 8,192
    tokens."""
    on_chip = jax.sharding.SingleDeviceSharding(v6e_chip())
    for shape in PAGES:
        jax.jit(tpu.attend_pages).lower(*page_inputs(*shape, sharding=on_chip)).compile()
    for name in itertools.product(PROGRAMS, HEADS):
        program = jax.jit(tpu.attend_pages).lower(*tpu_inputs(*name, sharding=on_chip))
        program = program.compile({"xla_msa_enable": "DISABLED"})  # what is on the chip counts too
        print(*name, program.memory_analysis().temp_size_in_bytes)
    for length in (4096, 8192):
        shape = inputs(2, length, 16, 8, 128, "bfloat16", sharding=on_chip)
        program = forward_and_backward(tpu.attend_packed).lower(*shape).compile()
        print(program.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    main()
