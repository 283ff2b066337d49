"""Decoder shared by all model families, with a training pass and a sampler pass.

The parameter tree, with a leading layer axis L of stacked blocks:

    embed/embedding                                 [V, D]
    blocks/input_norm/scale                         [L, D]
    blocks/attention/{q,k,v}/kernel (and bias)      [L, D, heads * H]
    blocks/attention/{q_norm,k_norm}/scale          [L, H]            (qk-norm only)
    blocks/attention/o/kernel (and bias)            [L, heads * H, D]
    blocks/post_attention_norm/scale                [L, D]
    norm/scale                                      [D]
    lm_head/kernel                                  [D, V]            (untied only)

A family adds its feed-forward parameters to `blocks`. Weights are declared once in NNX; all
computation is on plain nested dicts.

Two passes share the same block. `compute_hidden_states` runs packed rows with the weights of
`prepare_training_weights`. `compute_sampler_hidden_states` runs tokens of many rows with the
weights of `prepare_decoding_weights` and a KV cache.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.models.architecture import Architecture, Attend
from jaxrl.models.attention import reference
from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.layers import LayerScan, Mixer, SamplerLayerScan
from jaxrl.models.rope_scaling import ROPE_SCALINGS, RopeScaling
from jaxrl.types import Params


def check_model_type(fields: Mapping[str, Any], supported: Collection[str], source: str) -> str:
    """Return the `model_type` in `fields`. Raise a ValueError if it is not in `supported`."""
    model_type: Any = fields.get("model_type")
    if model_type not in supported:
        raise ValueError(
            f"{source}: model_type {model_type!r:.80} is not supported; expected "
            f"{' or '.join(map(repr, supported))}."
        )
    return model_type


def read_positive_int(fields: Mapping[str, Any], name: str, source: str = "config.json") -> int:
    """Read a positive integer field.

    Raises:
        ValueError: The field is missing or is not a positive integer.
    """
    value = fields.get(name)
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"{source}: {name!r} is {value!r:.80}; expected a whole number above 0.")
    return value


def read_positive_float(fields: Mapping[str, Any], name: str, source: str = "config.json") -> float:
    """Read a positive, finite number.

    Raises:
        ValueError: The field is missing or is not a positive, finite number.
    """
    value: Any = fields.get(name)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{source}: {name!r} is {value!r:.80}; expected a number above 0.")
    return float(value)


def _get_rope_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE settings, stored under the names of transformers 5 or of older versions."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    rope_type = str(rope.get("rope_type", rope.get("type", "default")))
    return {"rope_theta": fields.get("rope_theta"), **rope, "rope_type": rope_type}


def check_supported(fields: dict[str, Any], source: str) -> None:
    """Raise a ValueError if a field requires an unsupported feature."""
    rope = _get_rope_fields(fields)
    activation = fields.get("hidden_act", "silu")
    unsupported = {
        f"RoPE scaling {rope['rope_type']!r:.80}": rope["rope_type"]
        not in ("default", *ROPE_SCALINGS),
        "RoPE by layer type": any(isinstance(value, dict) for value in rope.values()),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0
        or fields.get("partial_rotary_factor", 1.0) != 1.0,
        "sliding-window attention": bool(fields.get("use_sliding_window"))
        or "sliding_attention" in fields.get("layer_types", []),
        f"hidden_act {activation!r:.80}": activation != "silu",
        "weight quantization (quantization_config)": "quantization_config" in fields,
    }
    reject_unsupported_features(unsupported, source)


def reject_unsupported_features(features: dict[str, bool], source: str) -> None:
    """Raise a ValueError for the first unsupported feature that is present."""
    for feature, is_present in features.items():
        if is_present:
            raise ValueError(f"{source}: {feature} is not supported; no parity test covers it.")


def parse_common_fields(fields: dict[str, Any], *, source: str = "config.json") -> dict[str, Any]:
    """Parse the `Decoder` fields whose `config.json` names are the same in all families.

    Args:
        fields: Fields of the file after `fill_hf_defaults`, without nulls.
        source: File name for error messages.

    Raises:
        ValueError: A size is missing, or sizes or RoPE settings are inconsistent.
    """
    vocab_size, num_layers, max_positions, width, num_heads = (
        read_positive_int(fields, name, source)
        for name in (
            *("vocab_size", "num_hidden_layers", "max_position_embeddings"),
            *("hidden_size", "num_attention_heads"),
        )
    )
    # By default, attention is multi-head and heads divide the width evenly.
    defaults = {"num_key_value_heads": num_heads, "head_dim": width // num_heads}
    num_kv_heads, head_dim = (
        read_positive_int(defaults | fields, name, source) for name in defaults
    )
    rope = _get_rope_fields(fields)
    theta, kind = rope["rope_theta"], ROPE_SCALINGS.get(rope["rope_type"])
    if (
        head_dim % 2
        or num_heads % num_kv_heads
        or type(theta) not in (int, float)
        or not 1 < theta < math.inf
    ):
        raise ValueError(
            f"{source}: 'head_dim' is {head_dim}, 'num_attention_heads' {num_heads}, "
            f"'num_key_value_heads' {num_kv_heads} and 'rope_theta' {theta!r:.80}; expected an "
            "even size, a divisor of the number of heads, and a base above 1."
        )
    # RoPE scaling also changes the maximum sequence length.
    scaling = None
    if kind is not None:
        name = "original_max_position_embeddings"  # at the top level it takes precedence
        override = {name: fields[name]} if name in fields else {}
        scaling = kind.from_fields(rope | override, max_positions=max_positions, source=source)
    return {
        "vocab_size": vocab_size,
        "width": width,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rope_theta": float(theta),
        "rms_norm_eps": read_positive_float(fields, "rms_norm_eps", source),
        "tie_embeddings": bool(fields["tie_word_embeddings"]),
        "max_positions": scaling.compute_max_positions(max_positions) if scaling else max_positions,
        "rope_scaling": scaling,
    }


class Attention(nnx.Module):
    """Grouped-query attention weights."""

    def __init__(self, config: Decoder, *, rngs: nnx.Rngs):
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = nnx.Linear(config.width, heads, use_bias=config.qkv_bias, rngs=rngs)
        self.k = nnx.Linear(config.width, kv_heads, use_bias=config.qkv_bias, rngs=rngs)
        self.v = nnx.Linear(config.width, kv_heads, use_bias=config.qkv_bias, rngs=rngs)
        self.o = nnx.Linear(heads, config.width, use_bias=config.output_bias, rngs=rngs)
        if config.qk_norm:
            self.q_norm = nnx.RMSNorm(config.head_dim, rngs=rngs)
            self.k_norm = nnx.RMSNorm(config.head_dim, rngs=rngs)


class Block(nnx.Module):
    """Weights of one decoder layer."""

    def __init__(self, config: Decoder, *, rngs: nnx.Rngs):
        self.input_norm = nnx.RMSNorm(config.width, rngs=rngs)
        for name, module in config.declare_mixers(rngs).items():
            setattr(self, name, module)
        self.post_attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        for name, module in config.declare_feed_forward(rngs).items():
            setattr(self, name, module)


class DecoderModule(nnx.Module):
    """NNX module that declares the weights used by `Decoder`."""

    def __init__(self, config: Decoder, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def init_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.embed = nnx.Embed(config.vocab_size, config.width, rngs=rngs)
        self.blocks = init_blocks(rngs)
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        if not config.tie_embeddings:
            self.lm_head = nnx.Linear(config.width, config.vocab_size, use_bias=False, rngs=rngs)


def init_params(config: Decoder, seed: int) -> Params:
    """Initialize random float32 parameters, for tests and benchmarks."""
    return _trim_stacks(config, DecoderModule(config, rngs=nnx.Rngs(seed)))


def _trim_stacks(config: Decoder, module: DecoderModule) -> Params:
    """Return the parameters, with each stack cut to its layers in `partial_layer_indices`."""
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    for name, layers in config.partial_layer_indices.items():
        selected = jax.tree.map(
            lambda leaf, count=len(layers): leaf[:count], params["blocks"][name]
        )
        params["blocks"][name] = selected
    return params


@cache
def _make_abstract_params(config: Decoder) -> Params:
    # Cached because tracing takes a quarter of a second, and a run calls this dozens of times.
    return jax.eval_shape(lambda: _trim_stacks(config, DecoderModule(config, rngs=nnx.Rngs(0))))


def cast_params(params: Params, dtype: DTypeLike) -> Params:
    """Cast all parameters to `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


@jax.named_scope("norm")
def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], epsilon: float
) -> Float[Array, "... D"]:
    """Apply RMSNorm (https://arxiv.org/abs/1910.07467) in float32; the result has x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: Float[Array, "*M D"], weights: Params, epsilon: float) -> Float[Array, "*M D"]:
    """Apply LayerNorm (https://arxiv.org/abs/1607.06450) in float32; the result has x's dtype."""
    x32 = x.astype(jnp.float32)
    centered = x32 - x32.mean(axis=-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + epsilon)
    scale, bias = (weights[name].astype(jnp.float32) for name in ("scale", "bias"))
    return (normed * scale + bias).astype(x.dtype)


Angles = tuple[jax.Array, jax.Array]
"""Cosines `[M, 1, 1, H / 2]` and sines `[M, 1, 2, H / 2]` of rotary angles, float32.

The sines for the first half are negative.
"""


def compute_rope_angles(positions: Int[Array, "*M"], config: Decoder) -> Angles:
    """Compute rotary angles from positions `[M]`, or from one position per pair `[M, H / 2]`."""
    half, scaling = config.rotary_dim // 2, config.rope_scaling
    if scaling is None:
        frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    else:
        frequency = jnp.asarray(scaling.compute_frequencies(config.rotary_dim, config.rope_theta))
    angle = positions.reshape(len(positions), 1, -1).astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling is not None:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos[:, :, None], jnp.stack([-sin, sin], axis=2)


@jax.named_scope("rope")
def apply_rope(x: Float[Array, "M heads H"], angles: Angles) -> Float[Array, "M heads H"]:
    """Apply rotary embeddings (https://arxiv.org/abs/2104.09864) to HF's pairs (i, i + H/2)."""
    cos, sin = angles
    halves = x.reshape(*x.shape[:-1], 2, -1).astype(jnp.float32)
    # Swap the halves by reversing an axis, which is faster on a CPU than concatenating slices.
    rotated = halves * cos + halves[..., ::-1, :] * sin
    return rotated.reshape(x.shape).astype(x.dtype)


@jax.named_scope("linear")
def linear(layer: Params, x: Float[Array, "M I"]) -> Float[Array, "M O"]:
    """Multiply by `kernel` [I, O] and add `bias` [O] if present.

    An int8 kernel has `kernel_scale` [O]; integers up to 127 are exact in any float dtype. A layer
    with an adapter has `kernel_a` [I, r] and `kernel_b` [r, O]; their product is added to `kernel`.
    """
    out = x @ layer["kernel"].astype(x.dtype)
    if "kernel_scale" in layer:
        out = (out.astype(jnp.float32) * layer["kernel_scale"]).astype(x.dtype)
    if "kernel_a" in layer:
        out = out + (x @ layer["kernel_a"]) @ layer["kernel_b"]
    if "bias" not in layer:
        return out
    # Cast after broadcasting, so that the gradient is summed over tokens in the bias's dtype.
    return out + jnp.broadcast_to(layer["bias"], out.shape).astype(out.dtype)


@jax.custom_vjp
def embedding_lookup(table: jax.Array, master: jax.Array, ids: jax.Array) -> jax.Array:
    """Look up rows of a table. The gradient goes to `master`, summed in the dtype of `master`."""
    return table[ids]


def _embedding_lookup_forward(
    table: jax.Array, master: jax.Array, ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return table[ids], (master, ids)


def _embedding_lookup_backward(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[None, jax.Array, None]:
    master, ids = saved
    [summed] = jax.linear_transpose(lambda table: table[ids], master)(gradient.astype(master.dtype))
    return None, summed, None


embedding_lookup.defvjp(_embedding_lookup_forward, _embedding_lookup_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def project(
    axes: str,
    hidden: jax.Array,
    table: jax.Array,
    master: jax.Array,
    precision: jax.lax.Precision | None = None,
) -> jax.Array:
    """Multiply hidden states by a table in float32. The gradient goes to `master`, not `table`.

    Forward and backward matmuls take operands in the dtype of `hidden` and accumulate in float32,
    so gradients are summed over chunks of tokens in float32.

    Args:
        axes: Axis order of the table: "vd" or "dv".
        hidden: Hidden states `[..., D]`.
        table: Table in the dtype of `hidden`.
        master: The same table in float32.
        precision: Precision of all three matmuls; None is the platform's default.
    """
    product = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    return product(f"...d,{axes}->...v", hidden, table)


def _project_forward(
    axes: str,
    hidden: jax.Array,
    table: jax.Array,
    master: jax.Array,
    precision: jax.lax.Precision | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return project(axes, hidden, table, master, precision), (hidden, table)


def _project_backward(
    axes: str,
    precision: jax.lax.Precision | None,
    saved: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, None, jax.Array]:
    hidden, table = saved
    gradient = gradient.astype(table.dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    dhidden = product(f"...v,{axes}->...d", gradient, table).astype(hidden.dtype)
    # Keep the table's axis order, because the CPU compiler cannot transpose this matmul's result.
    order = "...v,...d->vd" if axes == "vd" else "...d,...v->dv"
    operands = (gradient, hidden) if axes == "vd" else (hidden, gradient)
    return dhidden, None, product(order, *operands)


project.defvjp(_project_forward, _project_backward)


FIRST_HF_NAMES = {
    "embed/embedding": "model.embed_tokens.weight",
    "blocks/input_norm/scale": "model.layers.{}.input_layernorm.weight",
    "blocks/attention/q/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "blocks/attention/q/bias": "model.layers.{}.self_attn.q_proj.bias",
    "blocks/attention/k/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "blocks/attention/k/bias": "model.layers.{}.self_attn.k_proj.bias",
    "blocks/attention/v/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "blocks/attention/v/bias": "model.layers.{}.self_attn.v_proj.bias",
    "blocks/attention/o/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "blocks/attention/o/bias": "model.layers.{}.self_attn.o_proj.bias",
    "blocks/attention/q_norm/scale": "model.layers.{}.self_attn.q_norm.weight",
    "blocks/attention/k_norm/scale": "model.layers.{}.self_attn.k_norm.weight",
    "blocks/post_attention_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
}
"""HF tensor name of each parameter up to the second norm; `{}` is the layer index."""

LAST_HF_NAMES = {"norm/scale": "model.norm.weight", "lm_head/kernel": "lm_head.weight"}

OUTPUT_AXES = {"lm_head": {"kernel": ("width", "vocab")}}

SCALE_AXES = {"scale": ("layer", None)}


def make_linear_axes(inputs: str, outputs: str, has_bias: bool = False) -> dict[str, Any]:
    """Return the axis names of a stacked linear layer."""
    kernel = {"kernel": ("layer", inputs, outputs)}
    return {**kernel, "bias": ("layer", outputs)} if has_bias else kernel


Carry = tuple[tuple[jax.Array, Any], jax.Array | None]
"""Carry of the loop over layers: hidden states, a family's extra state, layer index or None."""


def init_layer_index(features: jax.Array | None) -> jax.Array | None:
    """Return layer index 0 for `add_deepstack`, or None without DeepStack features."""
    return None if features is None else jnp.zeros((), jnp.int32)


def add_deepstack(
    x: Float[Array, "M D"], layer_index: jax.Array | None, features: Float[Array, "n M D"] | None
) -> tuple[Float[Array, "M D"], jax.Array | None]:
    """Add `features[layer_index]` to x in the first n layers; also return the next layer index.

    This is DeepStack (https://arxiv.org/abs/2406.04334).
    """
    if features is None or layer_index is None:
        return x, None
    # The index is clamped to the last feature.
    selected = jax.lax.dynamic_index_in_dim(features, layer_index, keepdims=False)
    return x + jnp.where(layer_index < len(features), selected, 0), layer_index + 1


@dataclass(frozen=True, kw_only=True)
class Decoder(Architecture):
    """Decoder with attention and a family-specific feed-forward part."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    max_positions: int
    rope_scaling: RopeScaling | None = None
    head_dtype: str = ""  # dtype of the output layer's matmul; "": the compute dtype

    @property
    def rotary_dim(self) -> int:
        """Return the number of leading values of a head that rotary embeddings rotate."""
        return self.head_dim

    def declare_mixers(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """Return the modules of a layer that mix tokens, keyed by parameter name."""
        return {"attention": Attention(self, rngs=rngs)}

    @abstractmethod
    def declare_feed_forward(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """Return the feed-forward modules of a layer, keyed by parameter name."""

    @abstractmethod
    def apply_feed_forward(self, layer: Params, x: Float[Array, "M D"]) -> Float[Array, "M D"]:
        """Compute a layer's feed-forward residual from the normalized states of M tokens."""

    @abstractmethod
    def get_feed_forward_axes(self) -> dict[str, Any]:
        """Return the logical axes of the parameters that `declare_feed_forward` declares."""

    def get_mixer_hf_names(self) -> dict[str, str]:
        """Return the HF names of the non-attention parameters that `declare_mixers` declares."""
        return {}

    @abstractmethod
    def get_feed_forward_hf_names(self) -> dict[str, str]:
        """Return the HF names of the parameters that `declare_feed_forward` declares."""

    @property
    def output_module(self) -> str:
        """See `Architecture.output_module`."""
        return "embed" if self.tie_embeddings else "lm_head"

    def with_head_dtype(self, dtype: str) -> Decoder:
        """See `Architecture.with_head_dtype`."""
        return replace(self, head_dtype=dtype)

    def format_common_fields(self) -> dict[str, Any]:
        """Return the `config.json` fields of all families; inverts `parse_common_fields`."""
        rope = {"rope_type": "default"}
        if self.rope_scaling is not None:
            rope = {"rope_type": self.rope_scaling.rope_type, **asdict(self.rope_scaling)}
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "rope_theta": self.rope_theta,
            # Field name before transformers 5, which other programs still read.
            **({"rope_scaling": rope} if self.rope_scaling is not None else {}),
            "tie_word_embeddings": self.tie_embeddings,
            "use_sliding_window": False,
            "torch_dtype": "float32",
        }

    def make_abstract_params(self) -> Params:
        """Return a copy of the cached abstract parameters."""
        return jax.tree.map(lambda leaf: leaf, _make_abstract_params(self))

    def get_logical_axes(self) -> dict[str, Any]:
        """Return the axis names of each parameter; `sharding.LOGICAL_AXIS_RULES` resolves them."""
        axes = {
            "embed": {"embedding": ("vocab", "width")},
            "blocks": {
                "input_norm": SCALE_AXES,
                **self.get_mixer_axes(),
                "post_attention_norm": SCALE_AXES,
                **self.get_feed_forward_axes(),
            },
            "norm": {"scale": (None,)},
        }
        return axes if self.tie_embeddings else {**axes, **OUTPUT_AXES}

    def get_mixer_axes(self) -> dict[str, Any]:
        """Return the logical axes of the parameters that `declare_mixers` declares."""
        attention = {
            "q": make_linear_axes("width", "heads", self.qkv_bias),
            "k": make_linear_axes("width", "heads", self.qkv_bias),
            "v": make_linear_axes("width", "heads", self.qkv_bias),
            "o": make_linear_axes("heads", "width", self.output_bias),
            **({"q_norm": SCALE_AXES, "k_norm": SCALE_AXES} if self.qk_norm else {}),
        }
        return {"attention": attention}

    def init_extra_state(self, aux: AuxArrays, num_tokens: int) -> Any:
        """Return the initial extra state that the layers update, or None."""
        return None

    def apply_feed_forward_with_aux(
        self, layer: Params, x: Float[Array, "M D"], extra_state: Any, aux: AuxArrays
    ) -> tuple[Float[Array, "M D"], Any]:
        """Apply `apply_feed_forward`; also return the extra state after this layer."""
        return self.apply_feed_forward(layer, x), extra_state

    def store_extra_state(self, aux: AuxArrays, extra_state: Any) -> None:
        """Store the final extra state in `aux`."""

    def _apply_block(
        self,
        layer: Params,
        carry: tuple[Float[Array, "M D"], Any],
        angles: Angles,
        mixer: Mixer,
        aux: AuxArrays,
    ) -> tuple[Float[Array, "M D"], Any]:
        """Compute one layer for M tokens of concatenated rows.

        The matmuls are 2-D by 2-D, because 3-D by 2-D matmuls are several times slower on a CPU.
        """
        x, extra_state = carry
        normed = self.norm(x, layer["input_norm"]["scale"])
        x = x + checkpoint_name(self.mix_tokens(layer, normed, angles, mixer), "o")
        normed = self.norm(x, layer["post_attention_norm"]["scale"])
        with jax.named_scope("mlp"):
            residual, extra_state = self.apply_feed_forward_with_aux(
                layer, normed, extra_state, aux
            )
        return x + residual, extra_state

    def norm(self, x: Float[Array, "... D"], scale: Float[Array, " D"]) -> Float[Array, "... D"]:
        """Apply RMSNorm."""
        return rms_norm(x, scale, self.rms_norm_eps)

    def mix_tokens(
        self, layer: Params, x: Float[Array, "M D"], angles: Angles, attend: Mixer
    ) -> Float[Array, "M D"]:
        """Compute a layer's attention residual from the normalized states of M tokens."""
        weights = layer["attention"]
        q, k, v = (checkpoint_name(linear(weights[name], x), name) for name in "qkv")
        q, k, v = (x.reshape(x.shape[0], -1, self.head_dim) for x in (q, k, v))
        if self.qk_norm:
            q = self.norm(q, weights["q_norm"]["scale"])
            k = self.norm(k, weights["k_norm"]["scale"])
        q, k = apply_rope(q, angles), apply_rope(k, angles)
        with jax.named_scope("attention"):
            attended = attend(q, k, v).reshape(x.shape[0], self.num_heads * self.head_dim)
        return linear(weights["o"], attended)

    def prepare_training_weights(self, params: Params, dtype: DTypeLike) -> Params:
        """Cast all weights except biases to `dtype`.

        Biases stay float32 and are cast where they are added, so that their gradients are summed
        over tokens in float32. The embedding and the output layer also get `master`, a float32
        table of the same shape that receives their gradient. The values of `master` are used only
        if `head_dtype` is set. Other kernels get their gradient from one matmul, which accumulates
        in float32 and rounds once.
        """
        weights = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if path[-1].key == "bias" else leaf.astype(dtype), params
        )
        if jnp.dtype(dtype) != jnp.float32:
            for name in ("embed", "lm_head"):
                if name not in params:
                    continue
                [table] = params[name].values()
                if name == self.output_module and self.head_dtype:
                    table = table.astype(self.head_dtype)  # a frozen table may have another dtype
                weights[name] = {**weights[name], "master": table}
        return weights

    def prepare_decoding_weights(self, params: Params, dtype: DTypeLike) -> Params:
        """Cast the weights. On a CPU or with `head_dtype`, a tied model gets its own `lm_head`."""
        weights = cast_params(params, dtype)
        [table] = cast_params(params[self.output_module], self.head_dtype or dtype).values()
        if not self.tie_embeddings:
            weights["lm_head"] = {"kernel": table}
        elif self.head_dtype or jax.default_backend() == "cpu":
            # A matmul with a transposed matrix takes up to twice as long on a CPU. Elsewhere it
            # costs nothing, and a copy in the same dtype would cost memory.
            weights["lm_head"] = {"kernel": table.T}
        return weights

    def compute_hidden_states(
        self,
        params: Params,
        token_ids: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        attend: Attend,
        layer_scan: LayerScan,
    ) -> Float[Array, "R T D"]:
        """Compute the final hidden states of packed rows, after the last norm."""
        x = self._embed_tokens(params["embed"], token_ids.reshape(-1))
        hidden = self._run_full_pass(params, x, positions.reshape(-1), attend, layer_scan)
        return hidden.reshape(*token_ids.shape, -1)

    @jax.named_scope("embed")
    def _embed_tokens(self, table: Params, ids: Int[Array, " M"]) -> Float[Array, "M D"]:
        if "master" in table:
            return embedding_lookup(table["embedding"], table["master"], ids)
        return table["embedding"][ids]

    def _run_full_pass(
        self,
        params: Params,
        x: Float[Array, "M D"],
        positions: Int[Array, "*M"],
        attend: Attend,
        layer_scan: LayerScan,
        features: Float[Array, "n M D"] | None = None,
    ) -> Float[Array, "M D"]:
        """Compute the final hidden states from embeddings, adding DeepStack features."""
        angles, aux = compute_rope_angles(positions, self), layer_scan.aux

        def apply_layer(carry: Carry, weights: Params) -> Carry:
            state, layer_index = carry
            is_recurrent = self.recurrent_module in weights
            mixer: Any = layer_scan.run_recurrence if is_recurrent else attend
            x, extra_state = self._apply_block(weights, state, angles, mixer, aux)
            x, layer_index = add_deepstack(x, layer_index, features)
            return (x, extra_state), layer_index

        carry = (x, self.init_extra_state(aux, len(x))), init_layer_index(features)
        (x, extra_state), _ = layer_scan(
            apply_layer, carry, params["blocks"], self.partial_layer_indices
        )
        self.store_extra_state(aux, extra_state)
        return self.norm(x, params["norm"]["scale"])

    @jax.named_scope("head")
    def unembed(
        self, params: Params, hidden: Float[Array, "... D"], *, num_tokens: int
    ) -> Float[Array, "... V"]:
        """Compute float32 logits; ids >= `num_tokens` get `MASK_VALUE`.

        These ids pad a checkpoint's vocabulary. Masking them here gives the sampler and the trainer
        the same distribution.
        """
        is_tied = "lm_head" not in params
        table = params["embed" if is_tied else "lm_head"]
        axes, weights = ("vd", table["embedding"]) if is_tied else ("dv", table["kernel"])
        weights = jnp.asarray(weights)
        master = table.get("master", weights)
        if self.head_dtype:
            # By default a GPU rounds float32 operands to 10 bits (TF32), a TPU to bfloat16's 7.
            hidden, highest = hidden.astype(self.head_dtype), jax.lax.Precision.HIGHEST
            logits = project(axes, hidden, master, master, highest)
        else:
            logits = project(axes, hidden, weights, master)
        if num_tokens >= self.vocab_size:
            return logits
        return jnp.where(jnp.arange(self.vocab_size) < num_tokens, logits, reference.MASK_VALUE)

    def compute_sampler_hidden_states(
        self,
        weights: Params,
        token_ids: Int[Array, " M"],
        positions: Int[Array, " M"],
        layer_scan: SamplerLayerScan,
    ) -> Float[Array, "M D"]:
        """Compute the final hidden states in the sampler, after the last norm."""
        x = self._embed_tokens(weights["embed"], token_ids)
        return self._run_sampler_pass(weights, x, positions, layer_scan)

    def _run_sampler_pass(
        self,
        weights: Params,
        x: Float[Array, "M D"],
        positions: Int[Array, "*M"],
        layer_scan: SamplerLayerScan,
        features: Float[Array, "n M D"] | None = None,
    ) -> Float[Array, "M D"]:
        angles, aux = compute_rope_angles(positions, self), layer_scan.aux

        def apply_layer(carry: Carry, weights: Params, mixer: Mixer) -> Carry:
            state, layer_index = carry
            x, extra_state = self._apply_block(weights, state, angles, mixer, aux)
            x, layer_index = add_deepstack(x, layer_index, features)
            return (x, extra_state), layer_index

        carry = (x, self.init_extra_state(aux, len(x))), init_layer_index(features)
        (x, extra_state), _ = layer_scan(apply_layer, carry, weights["blocks"])
        self.store_extra_state(aux, extra_state)
        return self.norm(x, weights["norm"]["scale"])

    def get_decoding_axes(self) -> dict[str, Any]:
        """Return the axis names of `prepare_decoding_weights`, which may add an `lm_head`."""
        return {**super().get_decoding_axes(), **OUTPUT_AXES}

    def get_hf_names(self) -> dict[str, str]:
        """Return the HF tensor names, in the order of computation."""
        params = flatten_dict(self.make_abstract_params(), sep="/")
        names = {
            **FIRST_HF_NAMES,
            **self.get_mixer_hf_names(),
            **self.get_feed_forward_hf_names(),
            **LAST_HF_NAMES,
        }
        return {name: tensor for name, tensor in names.items() if name in params}

    def list_linear_layers(self) -> tuple[str, ...]:
        """Return the paths of all layers with a kernel [L, in, out]."""
        params = flatten_dict(self.make_abstract_params()["blocks"], sep="/")
        matrices = {name for name, leaf in params.items() if leaf.ndim == 3}
        names = (name.removeprefix("blocks/") for name in self.get_hf_names())
        kernels = (n for n in names if n in matrices and n.endswith("/kernel"))
        return tuple(f"blocks/{name.removesuffix('/kernel')}" for name in kernels)

    def get_hf_tied_names(self) -> dict[str, str]:
        """Map the output layer to the embedding if they are tied; older exports contain both."""
        return (
            {"lm_head.weight": self.get_hf_names()["embed/embedding"]}
            if self.tie_embeddings
            else {}
        )
