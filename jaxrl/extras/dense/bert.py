"""BERT encoders, which read a text in both directions: post-norm blocks on plain nested dicts.

The parameter tree, with the leading layer axis L of stacked blocks:

    embed/{words,places,kinds}/embedding        [V | P | 2, D]
    embed/norm/{scale,bias}                     [D]
    blocks/attention/{q,k,v,o}/{kernel,bias}    [L, D, D]
    blocks/attention_norm/{scale,bias}          [L, D]
    blocks/mlp/{up,down}/{kernel,bias}          [L, D, F], [L, F, D]
    blocks/mlp_norm/{scale,bias}                [L, D]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jaxtyping import Array, Bool, Float, Int

from jaxrl.models.attention.reference import LOWEST
from jaxrl.models.decoder import layer_norm, whole_number
from jaxrl.models.defaults import completed
from jaxrl.models.layers import Stacks
from jaxrl.types import Params

ACTIVATIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
"""Activations by `hidden_act` of `config.json`."""

_LAYER = "encoder.layer.{}."
HF_NAMES = {
    "embed/words/embedding": "embeddings.word_embeddings.weight",
    "embed/places/embedding": "embeddings.position_embeddings.weight",
    "embed/kinds/embedding": "embeddings.token_type_embeddings.weight",
    "embed/norm/scale": "embeddings.LayerNorm.weight",
    "embed/norm/bias": "embeddings.LayerNorm.bias",
    **{
        f"blocks/{ours}/{part}": f"{_LAYER}{theirs}.{their_part}"
        for ours, theirs, first in (
            ("attention/q", "attention.self.query", "kernel"),
            ("attention/k", "attention.self.key", "kernel"),
            ("attention/v", "attention.self.value", "kernel"),
            ("attention/o", "attention.output.dense", "kernel"),
            ("attention_norm", "attention.output.LayerNorm", "scale"),
            ("mlp/up", "intermediate.dense", "kernel"),
            ("mlp/down", "output.dense", "kernel"),
            ("mlp_norm", "output.LayerNorm", "scale"),
        )
        for part, their_part in ((first, "weight"), ("bias", "bias"))
    },
}
"""Parameter to HF tensor, `{}` the layer. A `kernel` is [in, out] here and [out, in] there."""


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Every field of a BERT `config.json` that changes the arithmetic."""

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    max_positions: int
    num_kinds: int
    epsilon: float
    activation: str

    @property
    def stacks(self) -> Stacks:
        """No layer differs from the others."""
        return {}

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> BertConfig:
        """Reads the fields of a `config.json`.

        Raises:
            ValueError: one is missing, of another kind, or asks for what is not computed here.
        """
        fields = completed(fields, "bert", source=source)
        activation = fields["hidden_act"]
        places = fields.get("position_embedding_type", "absolute")
        refused = {
            f"hidden_act {activation!r:.80}": activation not in [*ACTIVATIONS],
            f"position_embedding_type {places!r:.80}": places != "absolute",
            "a decoder (is_decoder)": bool(fields.get("is_decoder")),
        }
        for feature, is_asked_for in refused.items():
            if is_asked_for:
                raise ValueError(f"{source}: {feature} is not supported; no parity test covers it.")

        size = partial(whole_number, fields, source=source)
        width, num_heads = size("hidden_size"), size("num_attention_heads")
        if width % num_heads:
            raise ValueError(
                f"{source}: 'num_attention_heads' is {num_heads}; expected a divisor of "
                f"'hidden_size', {width}."
            )
        return cls(
            vocab_size=size("vocab_size"),
            width=width,
            mlp_width=size("intermediate_size"),
            num_layers=size("num_hidden_layers"),
            num_heads=num_heads,
            max_positions=size("max_position_embeddings"),
            num_kinds=size("type_vocab_size"),
            epsilon=float(fields["layer_norm_eps"]),
            activation=activation,
        )

    def hf_names(self) -> dict[str, str]:
        """Path of each parameter to its HF tensor."""
        return HF_NAMES

    def abstract_params(self) -> Params:
        """The parameters as `jax.ShapeDtypeStruct`s."""
        tables = {"words": self.vocab_size, "places": self.max_positions, "kinds": self.num_kinds}
        outputs = {"attention/q": self.width, "mlp/up": self.mlp_width}
        shapes = {}
        for name in HF_NAMES:
            where, _, part = name.rpartition("/")
            layer = where.removeprefix("blocks/")
            last = outputs.get(layer, self.width)
            shape: tuple[int, ...] = (last,)
            if part == "embedding":
                shape = (tables[where.removeprefix("embed/")], self.width)
            elif part == "kernel":
                shape = (self.mlp_width if layer == "mlp/down" else self.width, last)
            stack = (self.num_layers,) if layer != where else ()
            shapes[name] = jax.ShapeDtypeStruct((*stack, *shape), jnp.float32)
        return unflatten_dict(shapes, sep="/")

    def hidden_states(
        self, params: Params, token_ids: Int[Array, "B T"], is_there: Bool[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Last hidden states of texts; of padding, where `is_there` is False, they mean nothing."""
        embed = params["embed"]
        x = embed["words"]["embedding"][token_ids]
        x = x + embed["places"]["embedding"][: token_ids.shape[1]]
        x = x + embed["kinds"]["embedding"][0]
        x = layer_norm(x, embed["norm"], self.epsilon)

        def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
            attention, mlp = weights["attention"], weights["mlp"]
            heads = (*x.shape[:2], self.num_heads, -1)
            q, k, v = (_linear(attention[name], x).reshape(heads) for name in "qkv")
            scores = jnp.einsum("bqnh,bknh->bnqk", q, k, preferred_element_type=jnp.float32)
            scores = jnp.where(is_there[:, None, None], scores / q.shape[-1] ** 0.5, LOWEST)
            shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
            attended = jnp.einsum("bnqk,bknh->bqnh", shares, v).reshape(x.shape)
            x = x + _linear(attention["o"], attended)
            x = layer_norm(x, weights["attention_norm"], self.epsilon)
            inner = ACTIVATIONS[self.activation](_linear(mlp["up"], x))
            x = x + _linear(mlp["down"], inner)
            return layer_norm(x, weights["mlp_norm"], self.epsilon), None

        return jax.lax.scan(layer, x, params["blocks"])[0]


def _linear(layer: Params, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]
