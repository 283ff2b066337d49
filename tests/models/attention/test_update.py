"""What the gradient of packed rows costs with this attention: memory, and precision of products."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.types import Batch
from tests.compiled_memory import compiled_bytes
from tests.helpers import NUM_TOKENS, ROOT, TINY
from tests.programs import CONFIG, lower_for, products, trainer_programs, v6e_chip
from tests.toys import one_device_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")


def gradient_of(row_tokens, **settings):
    """The gradient of a row's log-probabilities, and the shapes of what it is taken of."""
    model = Model(TINY, one_device_mesh(), XLA, num_tokens=NUM_TOKENS, **settings)
    ints, floats = (
        jax.ShapeDtypeStruct((1, row_tokens), kind) for kind in (jnp.int32, jnp.float32)
    )
    batch = Batch(
        token_ids=ints,
        segment_ids=ints,
        positions=ints,
        loss_mask=jax.ShapeDtypeStruct((1, row_tokens), jnp.bool_),
        token_weights=floats,
        advantages=floats,
        rollout_logprobs=floats,
    )

    def loss(params, batch):
        logprobs, entropies = model.token_logprobs(
            params, batch, temperature=1.0, entropy_gradient=True
        )
        return (logprobs * batch.advantages + entropies).sum()

    return jax.jit(jax.grad(loss)), TINY.abstract_params(), batch


@pytest.mark.minutes
def test_temporaries_of_the_whole_update_grow_with_tokens_and_with_the_ids_of_a_chunk():
    def temporaries(row_tokens, vocab_size=64):
        config = replace(CONFIG, vocab_size=vocab_size, max_positions=2**16)
        settings = {"row_tokens": row_tokens, "dtype": jnp.float32, "logits_chunk_tokens": 256}
        function, arguments = trainer_programs(config, rows=1, **settings)["update"]
        program = jax.jit(function, donate_argnums=1).lower(*arguments).compile()
        return program.memory_analysis().temp_size_in_bytes

    short, long = temporaries(4096), temporaries(32_768)
    assert long / 32_768 < 1.1 * short / 4096
    # More ids cost the same whatever the number of tokens: a chunk's logits, and the tables.
    assert temporaries(32_768, 8192) - long < 1.1 * (temporaries(4096, 8192) - short)


CHUNK, IDS, MORE_IDS, WIDTH = 1024, 4096, 32_768, 1024


@pytest.mark.slow(
    instead="models/attention/test_update.py"
    "::test_temporaries_of_the_whole_update_grow_with_tokens_and_with_the_ids_of_a_chunk"
)
@pytest.mark.skipif(
    not (importlib.util.find_spec("libtpu") or os.environ.get("LIBTPU_DIR")),
    reason="libtpu is not installed; LIBTPU_DIR may name a folder of `pip install --target`",
)
def test_on_a_v6e_too():
    command = [sys.executable, "-m", "tests.models.attention.test_update"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr[-3000:]
    short, long, many_ids = json.loads(result.stdout.splitlines()[-1])
    assert long / 32_768 < 1.1 * short / 4096
    # Logits of a chunk and their gradient in float32; a table in bfloat16, its gradient in float32.
    per_id = 2 * 4 * CHUNK + (2 + 4) * WIDTH
    assert many_ids - long < 1.1 * per_id * (MORE_IDS - IDS)


def test_no_product_of_the_bfloat16_gradient_takes_float32():
    # Without exception: where results add up over many tokens, the product itself gives float32.
    gradient, *shapes = gradient_of(200, dtype=jnp.bfloat16)
    found = products(jax.make_jaxpr(gradient)(*shapes).jaxpr)
    assert len(found) > 40
    for equation in found:
        assert {operand.aval.dtype for operand in equation.invars} == {jnp.dtype("bfloat16")}, (
            equation
        )
    heads = [one for one in found if one.invars[0].aval.ndim == 4]
    assert len(heads) == 2 * (2 + 2) + 2 * 5  # forward, again for the gradient, and that
    assert {str(one.outvars[0].aval.dtype) for one in heads} == {"float32"}


def main():
    """Bytes of temporaries for 4,096 tokens, for 32,768, and for these with more ids.

    The model is as wide as one that is trained: of a narrower one most temporaries of 4,096 tokens
    stay in the memory on the chip, 128 MiB, where they are not counted.
    """
    chip, found = v6e_chip(), []
    for row_tokens, vocab_size in ((4096, IDS), (32_768, IDS), (32_768, MORE_IDS)):
        config = replace(
            CONFIG, vocab_size=vocab_size, width=WIDTH, mlp_width=3 * WIDTH, num_heads=8,
            num_kv_heads=4, head_dim=128, max_positions=2**16,
        )  # fmt: skip
        settings = {"rows": 1, "row_tokens": row_tokens, "logits_chunk_tokens": CHUNK}
        made = trainer_programs(config, device=chip, kernels="mosaic", **settings)
        function, arguments = made["update"]
        program = lower_for(chip, function, arguments, donate_argnums=1)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments))
        found.append(compiled_bytes(program, "tpu") - held)
        print(row_tokens, vocab_size, found[-1], flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
