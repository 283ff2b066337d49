"""An architecture of one's own: attention only, with an embedding for each position.

Chosen by `config.model.architecture = "tests.extending.my_architecture.Pocket"`.
"""

from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp

from jaxrl.models.architecture import Architecture, MemoryTerms
from jaxrl.models.attention import reference


@dataclass(frozen=True, kw_only=True)
class Pocket(Architecture):
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    head_dim: int
    max_positions: int
    tie_embeddings: bool = True

    @property
    def num_kv_heads(self):
        return self.num_heads

    @classmethod
    def from_dict(cls, fields, *, source="config.json"):
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})

    def to_hf_config(self):
        return {"model_type": "pocket", **asdict(self)}

    # Parameters: shapes, names of axes, names in safetensors.

    def make_abstract_params(self):
        inner = self.num_heads * self.head_dim
        shapes = {
            "embed": {"embedding": (self.vocab_size, self.width)},
            "position": {"embedding": (self.max_positions, self.width)},
            "blocks": {
                **{name: {"kernel": (self.num_layers, self.width, inner)} for name in "qkv"},
                "o": {"kernel": (self.num_layers, inner, self.width)},
            },
        }
        make = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))

    def get_logical_axes(self):
        return {
            "embed": {"embedding": ("vocab", "width")},
            "position": {"embedding": (None, "width")},
            "blocks": {
                **{name: {"kernel": ("layer", "width", "heads")} for name in "qkv"},
                "o": {"kernel": ("layer", "heads", "width")},
            },
        }

    def get_hf_names(self):
        return {
            "embed/embedding": "tokens.weight",
            "position/embedding": "positions.weight",
            **{f"blocks/{name}/kernel": f"layers.{{}}.{name}.weight" for name in "qkvo"},
        }

    def prepare_training_weights(self, params, dtype):
        return jax.tree.map(lambda x: x.astype(dtype), params)

    def prepare_decoding_weights(self, params, dtype):
        return self.prepare_training_weights(params, dtype)

    # Two ways through the same layer, which differ in what attends to what.

    def _embed(self, weights, token_ids, positions):
        return (
            weights["embed"]["embedding"][token_ids] + weights["position"]["embedding"][positions]
        )

    def _layer(self, layer, x, attend):
        def split(name):
            heads = (*x.shape[:-1], self.num_heads, self.head_dim)
            return (x @ layer[name]["kernel"]).reshape(heads)

        attended = attend(split("q"), split("k"), split("v"))
        return x + attended.reshape(*x.shape[:-1], -1) @ layer["o"]["kernel"]

    def compute_hidden_states(self, params, token_ids, positions, attend, layer_scan):
        x = self._embed(params, token_ids.reshape(-1), positions.reshape(-1))
        x = layer_scan(lambda x, layer: self._layer(layer, x, attend), x, params["blocks"])
        return x.reshape(*token_ids.shape, self.width)

    def unembed(self, params, hidden, *, num_tokens):
        table = params["embed"]["embedding"]
        logits = jnp.matmul(hidden, table.T, preferred_element_type=jnp.float32)
        return jnp.where(jnp.arange(self.vocab_size) < num_tokens, logits, reference.MASK_VALUE)

    def compute_sampler_hidden_states(self, weights, token_ids, positions, layer_scan):
        x = self._embed(weights, token_ids, positions)
        return layer_scan(
            lambda x, layer, attend: self._layer(layer, x, attend), x, weights["blocks"]
        )

    def estimate_layer_memory(self, tensor):
        inner = self.num_heads // tensor * self.head_dim
        return MemoryTerms(
            activations=4 * inner + 2 * self.width,
            saved_activations={
                "none": 4 * inner + self.width,
                "dots": 3 * inner + self.width,
                "names": inner,  # attention's result, which is named where it is made
            },
            prefill_activations=2 * inner + 2 * self.width,
        )
