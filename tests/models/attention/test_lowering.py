"""The kernels for accelerators are lowered as there, on a machine that has none."""

import importlib.util
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxrl.models.attention import gpu, tpu
from tests.helpers import ROOT

SHAPES = [
    # R, T, N, K, H, dtype
    (2, 4096, 16, 8, 128, "bfloat16"),
    (1, 300, 14, 2, 64, "float32"),
    (1, 512, 4, 4, 80, "bfloat16"),
    (1, 200, 4, 1, 96, "float32"),
    (1, 200, 4, 2, 256, "bfloat16"),
]


def forward_and_backward(train):
    def run(q, k, v, segment_ids, gradient):
        out, back = jax.vjp(lambda q, k, v: train(q, k, v, segment_ids), q, k, v)
        return out, back(gradient)

    return jax.jit(run)


def inputs(R, T, N, K, H, dtype, **settings):
    make = jax.ShapeDtypeStruct
    q, kv = (make((R, T, heads, H), jnp.dtype(dtype), **settings) for heads in (N, K))
    return q, kv, kv, make((R, T), jnp.int32, **settings), q


@pytest.mark.parametrize("shape", SHAPES)
def test_three_kernels_are_lowered_for_a_gpu(shape):
    calls = ("triton_kernel_call", "__gpu$xla.gpu.triton")
    program = jax.export.export(
        forward_and_backward(gpu.train),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in calls],
    )(*inputs(*shape)).mlir_module()
    assert len(re.findall(r"custom_call @\S*triton", program)) == 3


@pytest.mark.slow
@pytest.mark.skipif(
    not (importlib.util.find_spec("libtpu") or os.environ.get("LIBTPU_DIR")),
    reason="libtpu is not installed; LIBTPU_DIR may name a folder of `pip install --target`",
)
def test_splash_attention_compiles_for_a_v6e_with_temporaries_linear_in_tokens():
    command = [sys.executable, "-m", "tests.models.attention.test_lowering"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    short, long = map(int, result.stdout.split()[-2:])
    assert long < 2.5 * short


def main():
    """Bytes of temporaries of 4,096 and 8,192 tokens, by TPU's own compiler."""
    folder = os.environ.get("LIBTPU_DIR")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    if folder:
        sys.path.insert(0, folder)
        os.environ["TPU_LIBRARY_PATH"] = f"{folder}/libtpu/libtpu.so"
    from jax.experimental import topologies

    chips = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
    on_chip = jax.sharding.SingleDeviceSharding(chips[0])
    for length in (4096, 8192):
        shape = inputs(2, length, 16, 8, 128, "bfloat16", sharding=on_chip)
        program = forward_and_backward(tpu.train).lower(*shape).compile()
        print(program.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    main()
