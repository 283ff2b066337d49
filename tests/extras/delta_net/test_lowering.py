"""The delta rule and a hybrid's programs, compiled for a TPU that is absent."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import export

from jaxrl.extras.delta_net.delta_rule import delta_rule
from tests.extras.delta_net.models import TINY_HYBRID
from tests.helpers import ROOT
from tests.programs import CUSTOM_CALLS, lower_for, sampler_programs, trainer_programs, v6e_chip

HYBRID = replace(TINY_HYBRID, num_layers=3, attention_layers=(1,))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_programs_lower(platform):
    kernels = {"cuda": "triton", "tpu": "mosaic"}[platform]
    functions = sampler_programs(HYBRID, kernels=kernels) | trainer_programs(
        HYBRID, kernels=kernels, scan_layers=True
    )
    for name in ("decode", "prefill", "update"):
        function, arguments = functions[name]
        lower = export.export(jax.jit(function), platforms=[platform], disabled_checks=CUSTOM_CALLS)
        assert "dot_general" in lower(*arguments).mlir_module()


@pytest.mark.slow(instead="extras/delta_net/test_lowering.py::test_programs_lower")
@pytest.mark.skipif(
    not (importlib.util.find_spec("libtpu") or os.environ.get("LIBTPU_DIR")),
    reason="libtpu is not installed; LIBTPU_DIR may name a folder of `pip install --target`",
)
def test_all_compile_for_a_v6e():
    command = [sys.executable, "-m", "tests.extras.delta_net.test_lowering"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr[-3000:]
    temporary_bytes = json.loads(result.stdout.splitlines()[-1])
    assert temporary_bytes.keys() == {"rule of 2048", "rule of 4096", "decode", "prefill", "update"}


def main():
    """Print the temporary bytes of all programs, from the TPU compiler."""
    chip = v6e_chip()
    wide = replace(
        HYBRID, width=256, mlp_width=512, head_dim=128, vocab_size=4096, max_positions=2**16,
        key_dim=128, value_dim=128, rotary_fraction=0.5,
    )  # fmt: skip
    temporary_bytes = {}

    def measure(label, function, arguments, **settings):
        program = lower_for(chip, function, arguments, **settings).compile()
        temporary_bytes[label] = program.memory_analysis().temp_size_in_bytes

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def rule_gradient(*arguments):
        starts = arguments[-1]

        def total(state, q, k, v, log_decay, beta):
            @jax.checkpoint
            def step(state, chunk):
                out, state = delta_rule(state, *chunk, starts)
                return state, out.sum()

            return jax.lax.scan(step, state, (q, k, v, log_decay, beta))[1].sum()

        return jax.grad(total, argnums=(1, 2, 3, 4, 5))(*arguments[:-1])

    for length in (2048, 4096):
        chunks = [shape(length // 64, 1, 64, 8, 128)] * 3 + [shape(length // 64, 1, 64, 8)] * 2
        starts = shape(1, 64, dtype=jnp.int32)
        arguments = (shape(1, 8, 128, 128), *chunks, starts)
        measure(f"rule of {length}", rule_gradient, arguments)
    on_chip = {"device": chip, "kernels": "mosaic"}
    for name, program in sampler_programs(wide, **on_chip).items():
        measure(name, *program, donate_argnums=1)
    settings = {"rows": 1, "row_tokens": 1024, "logits_chunk_tokens": 1024, "scan_layers": True}
    update = trainer_programs(wide, **on_chip, **settings)["update"]
    measure("update", *update, donate_argnums=1)
    print(json.dumps(temporary_bytes))


if __name__ == "__main__":
    main()
