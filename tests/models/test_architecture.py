"""Resolution of a model's architecture, and auxiliary arrays of architectures."""

import json
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.aux_arrays import TokenArraySpec
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.registry import ARCHITECTURES, TOWERS, read_architecture, resolve_architecture
from tests.toys import SMALL, Player, toy_tokenizer


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_model_type_selects_the_architecture_unless_the_config_names_one(name):
    architecture = resolve_architecture({"model_type": name}, "", "config.json")
    # A tower's extra derives an architecture with images.
    names = [f"{base.__module__}.{base.__name__}" for base in architecture.__mro__]
    assert ARCHITECTURES[name] in (names if name in TOWERS else names[:1])
    dotted = "jaxrl.models.qwen.QwenConfig"
    assert resolve_architecture({"model_type": "other"}, dotted, "config.json") is QwenConfig


def test_an_unknown_model_type_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    expected = "model_type 'mamba' is not supported; expected 'qwen2' or .*model.architecture"
    with pytest.raises(ValueError, match=expected):
        read_architecture(tmp_path)


def test_a_class_that_is_no_architecture_is_refused():
    message = r"config\.model\.architecture .* is not a subclass of .*Architecture"
    with pytest.raises(ValueError, match=message):
        resolve_architecture({"model_type": "qwen3"}, "jaxrl.models.qwen.MLP", "config.json")


@dataclass(frozen=True, kw_only=True)
class Recording(QwenConfig):
    """Architecture that declares two bytes per token and stores the result of `store`."""

    store: object = None

    @property
    def recorded_specs(self):
        return {"pair": TokenArraySpec(shape=(2,), dtype=np.dtype(np.uint8), fill=0)}

    def init_extra_state(self, aux, num_tokens):
        return jnp.zeros(num_tokens)

    def store_extra_state(self, aux, extra_state):
        aux.recorded.update(self.store(len(extra_state)))


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (lambda m: {"pair": jnp.zeros((m, 2), jnp.uint8)}, None),
        (lambda m: {}, "stores nothing as 'pair'"),
        (
            lambda m: {"pair": jnp.zeros((m, 3), jnp.uint8)},
            r"stores uint8 \[\d+, 3\] as 'pair' .* expected uint8 \[\d+, 2",
        ),
    ],
)
def test_recorded_arrays_are_checked_before_anything_is_compiled(store, message):
    config = Recording(**vars(SMALL), store=store)
    engine = Player(config, toy_tokenizer(), ("a",), num_rows=2, records=True).engine
    if message:
        with pytest.raises(ValueError, match=message):
            engine.check_recorded_arrays()
    else:
        engine.check_recorded_arrays()
    assert engine.num_compilations == 0
