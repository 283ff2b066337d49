"""Qwen3.5: Qwen3's decoder with gated delta nets in place of attention in most layers.

The parameter tree is that of `qwen`, except that `blocks/attention` contains only the layers with
attention, and the n other layers have a gated delta net with N value heads and G key heads:

    blocks/delta/qkv/kernel         [n, D, 2 * G * K + N * V]
    blocks/delta/conv/kernel        [n, W, 1, 2 * G * K + N * V]
    blocks/delta/decay/kernel       [n, D, N]                       (HF: in_proj_a)
    blocks/delta/decay/{bias,log_rate}  [n, N]                      (HF: dt_bias, A_log)
    blocks/delta/beta/kernel        [n, D, N]                       (HF: in_proj_b)
    blocks/delta/gate/kernel        [n, D, N * V]                   (HF: in_proj_z)
    blocks/delta/norm/scale         [n, V]
    blocks/delta/o/kernel           [n, N * V, D]

Attention has an output gate. Its weights are stored in `q`: for each head, H query columns, then H
gate columns. Rotary embeddings rotate part of each head. All norms except `delta/norm` multiply by
`1 + scale`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.extras.delta_net.delta_rule import delta_rule
from jaxrl.models.architecture import MemoryTerms
from jaxrl.models.decoder import (
    SCALE_AXES,
    Angles,
    Attention,
    apply_rope,
    linear,
    make_linear_axes,
    read_positive_int,
    reject_unsupported_features,
    rms_norm,
)
from jaxrl.models.defaults import fill_hf_defaults
from jaxrl.models.layers import Mixer, Stacks
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.recurrence import State, StateSpecs
from jaxrl.types import Params
from jaxrl.utils.json_io import drop_nulls

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
"""`model_type` of a model with a vision tower, of which only the text part is used, and of a text
model."""

NORM_EPSILON = 1e-6
"""Added to the squared length of queries and keys."""

_LAYER = "model.layers.{}.linear_attn."
HF_NAMES = {
    "blocks/delta/qkv/kernel": _LAYER + "in_proj_qkv.weight",
    "blocks/delta/conv/kernel": _LAYER + "conv1d.weight",
    "blocks/delta/decay/kernel": _LAYER + "in_proj_a.weight",
    "blocks/delta/decay/bias": _LAYER + "dt_bias",
    "blocks/delta/decay/log_rate": _LAYER + "A_log",
    "blocks/delta/beta/kernel": _LAYER + "in_proj_b.weight",
    "blocks/delta/gate/kernel": _LAYER + "in_proj_z.weight",
    "blocks/delta/norm/scale": _LAYER + "norm.weight",
    "blocks/delta/o/kernel": _LAYER + "out_proj.weight",
}
"""HF names in addition to those of `qwen`."""


class DecayLinear(nnx.Linear):
    """Linear layer that computes each head's decay at each token, scaled by a learned rate."""

    def __init__(self, inputs: int, num_heads: int, *, rngs: nnx.Rngs):
        super().__init__(inputs, num_heads, rngs=rngs)
        self.bias = nnx.Param(jnp.ones(num_heads))
        rates = jax.random.uniform(rngs.params(), (num_heads,), minval=0.01, maxval=16.0)
        self.log_rate = nnx.Param(jnp.log(rates))


class DeltaNet(nnx.Module):
    """Gated delta net weights."""

    def __init__(self, config: Qwen35Config, *, rngs: nnx.Rngs):
        D, channels = config.width, config.delta_channels
        inner = config.num_value_heads * config.value_dim
        self.qkv = nnx.Linear(D, channels, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(
            channels,
            channels,
            config.conv_width,
            feature_group_count=channels,
            use_bias=False,
            rngs=rngs,
        )
        self.decay = DecayLinear(D, config.num_value_heads, rngs=rngs)
        self.beta = nnx.Linear(D, config.num_value_heads, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(D, inner, use_bias=False, rngs=rngs)
        self.norm = nnx.RMSNorm(config.value_dim, rngs=rngs)
        self.o = nnx.Linear(inner, D, use_bias=False, rngs=rngs)


class GatedAttention(Attention):
    """Grouped-query attention weights, with an output gate."""

    def __init__(self, config: Qwen35Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        outputs = 2 * config.num_heads * config.head_dim
        self.q = nnx.Linear(config.width, outputs, use_bias=config.qkv_bias, rngs=rngs)


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(QwenConfig):
    """Config of the text part of a Qwen3.5 model, read from its `config.json`.

    Attributes:
        attention_layers: Sorted indices of the layers with attention.
        rotary_fraction: Fraction of each head's dimensions that rotary embeddings rotate.
        num_key_heads: Number of key heads of the delta nets, G.
        num_value_heads: Number of value heads of the delta nets, N; a multiple of G.
        key_dim: Size of a key head, K.
        value_dim: Size of a value head, V.
        conv_width: Number of tokens in the window of the convolution, W.
        has_tower: True if the checkpoint contains a vision tower, which this class ignores.
    """

    attention_layers: tuple[int, ...]
    rotary_fraction: float
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    has_tower: bool = False
    recurrent_module: str = "delta"

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> Qwen35Config:
        """Build the config from the `config.json` of a model with or without a vision tower.

        Raises:
            ValueError: See `QwenConfig.from_dict`, or the sizes of the delta nets are inconsistent.
        """
        model_type = fields.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(
                f"{source}: model_type {model_type!r:.80} is not supported; expected "
                f"{' or '.join(map(repr, MODEL_TYPES))}."
            )
        if model_type == "qwen3_5":
            text = fields.get("text_config")
            if not isinstance(text, dict):
                raise ValueError(f"{source} lacks the field 'text_config', an object.")
            tied = fields.get("tie_word_embeddings", text.get("tie_word_embeddings"))
            fields = {**text, "tie_word_embeddings": tied}
        if fields.get("full_attention_interval") is not None:
            read_positive_int(fields, "full_attention_interval", source)
        fields = drop_nulls(fill_hf_defaults(fields, "qwen3_5_text", source=source))

        # The decoder is Qwen3's, except that rotary embeddings rotate only part of a head.
        rope_name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
        rope = dict(fields.get(rope_name) or {})
        for name in ("mrope_section", "mrope_interleaved"):  # equal positions in a text
            rope.pop(name, None)
        fraction = rope.pop("partial_rotary_factor", fields.pop("partial_rotary_factor", 0.25))
        fields.pop("partial_rotary_factor", None)
        layer_types = _read_layer_types(fields, source)
        reject_unsupported_features(
            {"no attn_output_gate": fields.get("attn_output_gate", True) is not True}, source
        )
        dense = QwenConfig.from_dict(
            {**fields, rope_name: rope or None, "layer_types": None, "model_type": "qwen3"},
            source=source,
        )
        is_fraction = type(fraction) in (int, float) and 0 < fraction <= 1
        rotary_dim = int(dense.head_dim * fraction) if is_fraction else 0
        num_key_heads, num_value_heads, key_dim, value_dim, conv_width = (
            read_positive_int(fields, f"linear_{name}", source)
            for name in (
                *("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"),
                "conv_kernel_dim",
            )
        )
        if num_value_heads % num_key_heads or rotary_dim % 2 or rotary_dim == 0:
            raise ValueError(
                f"{source}: 'linear_num_key_heads' is {num_key_heads}, 'linear_num_value_heads' "
                f"{num_value_heads} and 'partial_rotary_factor' {fraction!r:.80}; expected a "
                "number of value heads that is a multiple of the number of key heads, and a factor "
                f"that rotates an even number of the {dense.head_dim} dimensions of a head."
            )
        return cls(
            **vars(dense),
            attention_layers=tuple(
                layer for layer, kind in enumerate(layer_types) if kind == "full_attention"
            ),
            rotary_fraction=float(fraction),
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_width=conv_width,
            has_tower=model_type == "qwen3_5",
        )

    def to_hf_config(self) -> dict[str, Any]:
        """Return the `config.json` fields of a text model; the inverse of `from_dict`."""
        fields = super().to_hf_config()
        kinds = ("linear_attention", "full_attention")
        rope = {**fields["rope_parameters"], "partial_rotary_factor": self.rotary_fraction}
        return {
            **fields,
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "rope_parameters": rope,
            "layer_types": [
                kinds[layer in self.attention_layers] for layer in range(self.num_layers)
            ],
            "linear_num_key_heads": self.num_key_heads,
            "linear_num_value_heads": self.num_value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.conv_width,
        }

    @property
    def partial_layer_indices(self) -> Stacks:
        """Indices of the layers with attention and of those with a delta net."""
        delta = tuple(
            layer for layer in range(self.num_layers) if layer not in self.attention_layers
        )
        return {"attention": self.attention_layers, "delta": delta}

    @property
    def rotary_dim(self) -> int:
        """See `Decoder.rotary_dim`."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def delta_channels(self) -> int:
        """Number of channels of a delta net's queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_specs(self) -> StateSpecs:
        """Specs of the state of each value head, and of the convolution's last inputs."""
        window = (self.conv_width - 1, self.key_dim)
        shapes = {
            "memory": (self.num_value_heads, self.key_dim, self.value_dim),
            "q_window": (self.num_key_heads, *window),
            "k_window": (self.num_key_heads, *window),
            "v_window": (self.num_value_heads, self.conv_width - 1, self.value_dim),
        }
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def declare_mixers(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """Declare gated attention and a delta net."""
        return {
            "attention": GatedAttention(self, rngs=rngs),
            "delta": DeltaNet(self, rngs=rngs),
        }

    def get_mixer_axes(self) -> dict[str, Any]:
        """Return the axis names; `tensor` splits attention and delta nets by heads."""
        heads = ("layer", "heads")
        delta = {
            "qkv": make_linear_axes("width", "heads"),
            "conv": {"kernel": ("layer", None, None, "heads")},
            "decay": {"kernel": ("layer", "width", "heads"), "bias": heads, "log_rate": heads},
            "beta": make_linear_axes("width", "heads"),
            "gate": make_linear_axes("width", "heads"),
            "norm": SCALE_AXES,
            "o": make_linear_axes("heads", "width"),
        }
        return {**super().get_mixer_axes(), "delta": delta}

    def get_mixer_hf_names(self) -> dict[str, str]:
        """Return the HF names of the delta net's parameters."""
        return HF_NAMES

    def get_hf_prefix_map(self) -> dict[str, str]:
        """Map the text prefix of checkpoints with a vision tower to that of `get_hf_names`."""
        return {"model.language_model.": "model."}

    def get_hf_module_prefixes(self) -> dict[str, str]:
        """Return {} for a text model, whose modules have the same prefix in transformers."""
        return super().get_hf_module_prefixes() if self.has_tower else {}

    def get_hf_passthrough_prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of the unused vision tower and multi-token prediction layer."""
        return ("model.visual.", "mtp.")

    def norm(self, x: Float[Array, "... D"], scale: Float[Array, " D"]) -> Float[Array, "... D"]:
        """Apply RMSNorm with a scale of `1 + scale`."""
        return rms_norm(x, 1 + scale.astype(jnp.float32), self.rms_norm_eps)

    def mix_tokens(
        self, layer: Params, x: Float[Array, "M D"], angles: Angles, mixer: Mixer
    ) -> Float[Array, "M D"]:
        """Compute the residual of a layer's delta net or gated attention."""
        if "delta" in layer:
            return self._run_delta_net(layer["delta"], x, mixer)
        weights = layer["attention"]
        q, k, v = (checkpoint_name(linear(weights[name], x), name) for name in "qkv")
        q, gate = jnp.split(q.reshape(len(x), self.num_heads, -1), 2, axis=-1)
        k, v = (x.reshape(len(x), -1, self.head_dim) for x in (k, v))
        q = self._rotate(self.norm(q, weights["q_norm"]["scale"]), angles)
        k = self._rotate(self.norm(k, weights["k_norm"]["scale"]), angles)
        with jax.named_scope("attention"):
            attended = mixer(q, k, v) * jax.nn.sigmoid(gate)
        return linear(weights["o"], attended.reshape(len(x), -1))

    def _rotate(self, x: Float[Array, "M heads H"], angles: Angles) -> Float[Array, "M heads H"]:
        rotated, rest = jnp.split(x, [self.rotary_dim], axis=-1)
        return jnp.concatenate([apply_rope(rotated, angles), rest], axis=-1)

    @jax.named_scope("delta_net")
    def _run_delta_net(
        self, weights: Params, x: Float[Array, "M D"], run_recurrence: Mixer
    ) -> Float[Array, "M D"]:
        qkv, gate, beta, step = self.project_delta_net(weights, x)
        decay = weights["decay"]
        rate = jnp.exp(decay["log_rate"].astype(jnp.float32))
        step = jax.nn.softplus(step.astype(jnp.float32) + decay["bias"].astype(jnp.float32))
        inputs = {
            "qkv": qkv,
            "log_decay": -rate * step,
            "beta": jax.nn.sigmoid(beta.astype(jnp.float32)),
        }
        out = run_recurrence(self._make_advance(weights["conv"]["kernel"][:, 0]), inputs)
        # The norm comes before the gate and has a plain scale.
        out = rms_norm(out.astype(x.dtype), weights["norm"]["scale"], self.rms_norm_eps)
        gate = gate.reshape(out.shape).astype(jnp.float32)
        out = (out.astype(jnp.float32) * jax.nn.silu(gate)).astype(x.dtype)
        return linear(weights["o"], out.reshape(len(x), -1))

    def project_delta_net(
        self, weights: Params, x: Float[Array, "M D"]
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Compute a delta net's `qkv`, `gate`, `beta` and `decay` before their activations."""
        names = ("qkv", "gate", "beta")
        qkv, gate, beta = (checkpoint_name(linear(weights[name], x), name) for name in names)
        decay = weights["decay"]
        step = linear({name: decay[name] for name in decay if name not in ("bias", "log_rate")}, x)
        return qkv, gate, beta, step

    def _make_advance(self, kernel: Float[Array, "W channels"]) -> Any:
        """Return the function that advances a delta net by a chunk; see `recurrence.Advance`."""
        sizes = {
            "q": (self.num_key_heads, self.key_dim),
            "k": (self.num_key_heads, self.key_dim),
            "v": (self.num_value_heads, self.value_dim),
        }
        repeats = self.num_value_heads // self.num_key_heads

        def advance(
            state: State, inputs: Any, starts: Int[Array, "b C"], counts: Int[Array, " b"]
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            # Convolve each channel over the last tokens of the context.
            convolved, new_state, first = {}, {}, 0
            for name, (heads, size) in sizes.items():
                channels = slice(first, first := first + heads * size)
                values = inputs["qkv"][..., channels].astype(jnp.float32)
                values = values.reshape(*starts.shape, heads, size)
                taps = kernel[:, channels].astype(jnp.float32).reshape(-1, heads, size)
                window = state[f"{name}_window"].swapaxes(1, 2)
                out, window = causal_conv(values, window, taps, starts, counts)
                convolved[name] = jax.nn.silu(out)
                new_state[f"{name}_window"] = window.swapaxes(1, 2)

            q, k = (_normalize_l2(convolved[name]) for name in "qk")
            q, k = (jnp.repeat(x, repeats, axis=2) for x in (q * self.key_dim**-0.5, k))
            is_token = (jnp.arange(starts.shape[1]) < counts[:, None])[..., None]
            log_decay, beta = (
                jnp.where(is_token, inputs[name], 0.0) for name in ("log_decay", "beta")
            )
            out, new_state["memory"] = delta_rule(
                state["memory"], q, k, convolved["v"], log_decay, beta, starts
            )
            return out, new_state

        return advance

    def prepare_training_weights(self, params: Params, dtype: DTypeLike) -> Params:
        """Cast all weights except the decay rates, which are exponents."""
        return _with_decay_rates(super().prepare_training_weights(params, dtype), params)

    def prepare_decoding_weights(self, params: Params, dtype: DTypeLike) -> Params:
        """Cast all weights except decay rates and biases, as in training."""
        return _with_decay_rates(super().prepare_decoding_weights(params, dtype), params)

    def estimate_layer_memory(self, tensor: int) -> MemoryTerms:
        """Estimate the memory of an attention layer or a delta net layer, whichever is larger."""
        dense, inner = super().estimate_layer_memory(tensor), -(-self.mlp_width // tensor)
        attention_width = self.num_heads // tensor * self.head_dim  # also the width of the gates
        # A delta net's inputs are its queries, keys and values, and its gates.
        value_width = self.num_value_heads * self.value_dim // tensor
        inputs = self.delta_channels // tensor + value_width
        mlp = max(4 * inner + 4 * self.width, 2 * inner + 8 * self.width)
        saved = self.width + 2 * inner + inputs
        return replace(
            dense,
            activations=max(
                dense.activations + 2 * attention_width, mlp + 7 * (inputs + value_width)
            ),
            saved_activations={
                "none": max(
                    dense.saved_activations["none"] + 2 * attention_width,
                    6 * inner + 6 * self.width + 6 * (inputs + value_width),
                ),
                "dots": max(dense.saved_activations["dots"] + attention_width, saved + value_width),
                "names": max(dense.saved_activations["names"] + attention_width, saved),
            },
            prefill_activations=max(
                dense.prefill_activations + attention_width,
                inner + 3 * self.width + 2 * (inputs + value_width),
            ),
        )


def causal_conv(
    x: Float[Array, "b C heads size"],
    window: Float[Array, "b W1 heads size"],
    taps: Float[Array, "W heads size"],
    starts: Int[Array, "b C"],
    counts: Int[Array, " b"],
) -> tuple[Float[Array, "b C heads size"], Float[Array, "b W1 heads size"]]:
    """Apply a causal convolution of width W to each channel, within each token's context.

    Args:
        x: Values of a chunk of C tokens.
        window: Values of the W - 1 tokens before the chunk; 0 before the start of their context.
        taps: Weight of each token in the window; the last weight is for the token itself.
        starts: See `delta_rule`.
        counts: Number of valid tokens at the start of the chunk.

    Returns:
        The results, and the window after the valid tokens.
    """
    C, lookback = x.shape[1], window.shape[1]
    padded = jnp.concatenate([window, x], axis=1)
    index = jnp.arange(C)

    def get_previous(distance: int) -> jax.Array:
        """Return each token's value from `distance` tokens earlier; 0 outside its context."""
        values = padded[:, lookback - distance : lookback - distance + C]
        return jnp.where((index - distance >= starts)[..., None, None], values, 0.0)

    # `starts` is -1 if the context began earlier; its window is 0 before that.
    starts = jnp.where(starts < 0, -lookback, starts)
    out = taps[lookback] * x
    for distance in range(1, lookback + 1):
        out = out + taps[lookback - distance] * get_previous(distance)

    # The window after the chunk, without tokens before the last token's context.
    last_starts = jnp.take_along_axis(starts, jnp.maximum(counts[:, None] - 1, 0), axis=1)
    last_starts = jnp.where(counts[:, None] > 0, last_starts, -lookback)
    sources = counts[:, None] + jnp.arange(lookback)
    new_window = jnp.take_along_axis(padded, sources[..., None, None], axis=1)
    is_in_context = (sources - lookback >= last_starts)[..., None, None]
    return out, jnp.where(is_in_context, new_window, 0.0)


def _normalize_l2(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPSILON)


def _with_decay_rates(weights: Params, params: Params) -> Params:
    """Return the weights with the uncast decay rates and biases of `params`."""
    delta, original = weights["blocks"]["delta"], params["blocks"]["delta"]["decay"]
    decay = {**delta["decay"], **{name: original[name] for name in ("bias", "log_rate")}}
    return {**weights, "blocks": {**weights["blocks"], "delta": {**delta, "decay": decay}}}


def _read_layer_types(fields: dict[str, Any], source: str) -> list[str]:
    """Return the type of each layer.

    Raises:
        ValueError: The types are unknown, do not match the number of layers, or are all equal.
    """
    num_layers = read_positive_int(fields, "num_hidden_layers", source)
    if "layer_types" in fields:
        layer_types = fields["layer_types"]
    else:
        interval = fields.get("full_attention_interval", 4)
        kinds = ("linear_attention", "full_attention")
        layer_types = [kinds[(layer + 1) % interval == 0] for layer in range(num_layers)]
    expected = {"linear_attention", "full_attention"}
    if len(layer_types) != num_layers or {*layer_types} != expected:
        raise ValueError(
            f"{source}: 'layer_types' is {layer_types!s:.80}; expected 'linear_attention' or "
            f"'full_attention' for each of the {num_layers} layers, and both at least once."
        )
    return list(layer_types)
