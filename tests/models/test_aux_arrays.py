"""Arrays by token that an architecture declares, and what it does not leave."""

import subprocess
import sys
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.aux_arrays import TokenArray
from jaxrl.models.qwen import QwenConfig
from tests.toys import SMALL, Player, toy_tokenizer

BYTES = np.dtype(np.uint8)


@pytest.mark.parametrize("fill", [-1, 256])
def test_a_fill_that_no_value_can_have_is_refused(fill):
    with pytest.raises(ValueError, match=f"uint8 has fill {fill}; expected 0 to 255"):
        TokenArray(shape=(2,), dtype=BYTES, fill=fill)


@pytest.mark.parametrize("wrong", ["dtype=np.uint8, shape=(2,)", "dtype=np.dtype('u1'), shape=2"])
def test_declarations_of_other_types_are_refused_where_no_test_checks_them(wrong):
    code = "import numpy as np; from jaxrl.models.aux_arrays import TokenArray as T; "
    code += f"T(fill=0, {wrong})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "expected a tuple and a np.dtype" in done.stderr.splitlines()[-1]


@dataclass(frozen=True, kw_only=True)
class Leaving(QwenConfig):
    """Declares two bytes a token, and leaves what `left` makes for M tokens."""

    left: object = None

    @property
    def recorded(self):
        return {"pair": TokenArray(shape=(2,), dtype=BYTES, fill=0)}

    def begin_layers(self, beside, num_tokens):
        return jnp.zeros(num_tokens)

    def end_layers(self, beside, carried):
        beside.recorded.update(self.left(len(carried)))


def engine_of(left):
    config = Leaving(**vars(SMALL), left=left)
    return Player(config, toy_tokenizer(), ("a",), num_rows=2, records=True).engine


@pytest.mark.parametrize(
    ("left", "why"),
    [
        (lambda m: {}, "Leaving does not leave 'pair', which it declares"),
        (lambda m: {"pairs": jnp.zeros((m, 2), jnp.uint8)}, "does not leave 'pair'"),
        (
            lambda m: {"pair": jnp.zeros((m, 2), jnp.int32)},
            r"over \d+ tokens leaves int32 \[\d+, 2",
        ),
        (lambda m: {"pair": jnp.zeros((m, 3), jnp.uint8)}, r"'pair' as uint8 \[2\] .*, 3\]; mend"),
        (lambda m: {"pair": jnp.zeros((m - 1, 2), jnp.uint8)}, "tokens leaves uint8"),
        (lambda m: {"pair": jnp.zeros((), jnp.uint8)}, r"leaves uint8 \[\]"),
    ],
)
def test_what_is_not_left_as_declared_is_refused_before_anything_is_compiled(left, why):
    engine = engine_of(left)
    with pytest.raises(ValueError, match=why):
        engine.check()


def test_what_is_left_as_declared_passes():
    engine = engine_of(lambda m: {"pair": jnp.zeros((m, 2), jnp.uint8)})
    engine.check()
    assert engine.num_compilations == 0
