"""BERT encoders: post-norm blocks with bidirectional attention.

The parameter tree, a nested dict with blocks stacked along the leading layer axis L:

    embed/{words,positions,types}/embedding     [V | P | 2, D]
    embed/norm/{scale,bias}                     [D]
    blocks/attention/{q,k,v,o}/{kernel,bias}    [L, D, D], [L, D]
    blocks/attention_norm/{scale,bias}          [L, D]
    blocks/mlp/{up,down}/{kernel,bias}          [L, D, F], [L, F, D], and [L, F], [L, D]
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

from jaxrl.models.attention.reference import MASK_VALUE
from jaxrl.models.decoder import layer_norm, read_positive_int
from jaxrl.models.defaults import fill_hf_defaults
from jaxrl.models.layers import Stacks
from jaxrl.types import Params

ACTIVATIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
"""Activation functions, by value of `hidden_act` in `config.json`."""


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Config of a BERT encoder: the fields of `config.json` that change the computation."""

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    max_positions: int
    num_token_types: int
    epsilon: float
    activation: str

    @property
    def partial_layer_indices(self) -> Stacks:
        """Always empty, since all layers have the same parameters."""
        return {}

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> BertConfig:
        """Validate the fields of a `config.json` and build the config.

        Raises:
            ValueError: A field is missing, or has the wrong type or an unsupported value.
        """
        fields = fill_hf_defaults(fields, "bert", source=source)
        supported: dict[str, list[Any]] = {"hidden_act": [*ACTIVATIONS], "is_decoder": [False]}
        supported["position_embedding_type"] = ["absolute"]
        for name, values in supported.items():
            if (value := fields.get(name, values[0])) not in values:
                raise ValueError(f"{source}: {name} {value!r:.80} is not supported.")

        size = partial(read_positive_int, fields, source=source)
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
            num_token_types=size("type_vocab_size"),
            epsilon=float(fields["layer_norm_eps"]),
            activation=fields["hidden_act"],
        )

    def _make_tensor_specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the HF tensor name (`{}` is the layer index) and the shape of each parameter.

        HF tensors store a `kernel` transposed, as [out, in].
        """
        D, F = self.width, self.mlp_width
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for param_name, hf_part, size in (
            ("words", "word", self.vocab_size),
            ("positions", "position", self.max_positions),
            ("types", "token_type", self.num_token_types),
        ):
            hf_name = f"embeddings.{hf_part}_embeddings.weight"
            tensors[f"embed/{param_name}/embedding"] = hf_name, (size, D)
        for param_name, hf_part in (("scale", "weight"), ("bias", "bias")):
            tensors[f"embed/norm/{param_name}"] = f"embeddings.LayerNorm.{hf_part}", (D,)
        for param_name, hf_part, shape in (
            ("attention/q", "attention.self.query", (D, D)),
            ("attention/k", "attention.self.key", (D, D)),
            ("attention/v", "attention.self.value", (D, D)),
            ("attention/o", "attention.output.dense", (D, D)),
            ("attention_norm", "attention.output.LayerNorm", (D,)),
            ("mlp/up", "intermediate.dense", (D, F)),
            ("mlp/down", "output.dense", (F, D)),
            ("mlp_norm", "output.LayerNorm", (D,)),
        ):
            leaf, hf_name = "kernel" if len(shape) == 2 else "scale", "encoder.layer.{}." + hf_part
            tensors[f"blocks/{param_name}/{leaf}"] = f"{hf_name}.weight", (self.num_layers, *shape)
            tensors[f"blocks/{param_name}/bias"] = f"{hf_name}.bias", (self.num_layers, shape[-1])
        return tensors

    def get_hf_names(self) -> dict[str, str]:
        """Return the HF tensor name of each parameter."""
        return {name: hf_name for name, (hf_name, _) in self._make_tensor_specs().items()}

    def make_abstract_params(self) -> Params:
        """Return the parameters as `jax.ShapeDtypeStruct`s."""
        shapes = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, (_, shape) in self._make_tensor_specs().items()
        }
        return unflatten_dict(shapes, sep="/")

    def compute_hidden_states(
        self, params: Params, token_ids: Int[Array, "B T"], padding_mask: Bool[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Compute the last layer's hidden states, which are undefined for padding.

        Args:
            params: Parameters in the compute dtype.
            token_ids: Token ids, one text per row.
            padding_mask: True for real tokens.
        """
        embed = params["embed"]
        x = embed["words"]["embedding"][token_ids]
        x = x + embed["positions"]["embedding"][: token_ids.shape[1]]
        x = x + embed["types"]["embedding"][0]
        x = layer_norm(x, embed["norm"], self.epsilon)

        def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
            attention, mlp = weights["attention"], weights["mlp"]
            heads = (*x.shape[:2], self.num_heads, -1)
            q, k, v = (_apply_linear(attention[name], x).reshape(heads) for name in "qkv")
            scores = jnp.einsum("bqnh,bknh->bnqk", q, k, preferred_element_type=jnp.float32)
            scores = jnp.where(padding_mask[:, None, None], scores / q.shape[-1] ** 0.5, MASK_VALUE)
            probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
            attended = jnp.einsum("bnqk,bknh->bqnh", probs, v).reshape(x.shape)
            x = x + _apply_linear(attention["o"], attended)
            x = layer_norm(x, weights["attention_norm"], self.epsilon)
            activated = ACTIVATIONS[self.activation](_apply_linear(mlp["up"], x))
            x = x + _apply_linear(mlp["down"], activated)
            return layer_norm(x, weights["mlp_norm"], self.epsilon), None

        return jax.lax.scan(layer, x, params["blocks"])[0]


def _apply_linear(layer: Params, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]
