"""Arrays by token that an architecture declares, and what it does not leave."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.aux_arrays import TokenArraySpec
from jaxrl.models.qwen import QwenConfig
from tests.toys import SMALL, Player, toy_tokenizer

BYTES = np.dtype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class Leaving(QwenConfig):
    """Declares two bytes a token, and leaves what `left` makes for M tokens."""

    left: object = None

    @property
    def recorded(self):
        return {"pair": TokenArraySpec(shape=(2,), dtype=BYTES, fill=0)}

    def init_extra_state(self, aux, num_tokens):
        return jnp.zeros(num_tokens)

    def store_extra_state(self, aux, extra_state):
        aux.recorded.update(self.left(len(extra_state)))


def engine_of(left):
    config = Leaving(**vars(SMALL), left=left)
    return Player(config, toy_tokenizer(), ("a",), num_rows=2, records=True).engine


@pytest.mark.parametrize(
    ("left", "why"),
    [
        (lambda m: {}, "stores nothing as 'pair'"),
        (
            lambda m: {"pair": jnp.zeros((m, 2), jnp.int32)},
            r"over \d+ tokens stores int32 \[\d+, 2",
        ),
        (
            lambda m: {"pair": jnp.zeros((m, 3), jnp.uint8)},
            r"stores uint8 \[\d+, 3\] as 'pair' .* expected uint8 \[\d+, 2",
        ),
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
