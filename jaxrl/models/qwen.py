"""Qwen2.5 and Qwen3 dense decoders: declared once in NNX, computed on plain nested dicts.

The parameter tree, with the leading layer axis L of stacked blocks:

    embed/embedding                                 [V, D]
    blocks/input_norm/scale                         [L, D]
    blocks/attention/{q,k,v}/kernel (and bias)      [L, D, heads * H]
    blocks/attention/{q_norm,k_norm}/scale          [L, H]            (qk-norm only)
    blocks/attention/o/kernel (and bias)            [L, heads * H, D]
    blocks/post_attention_norm/scale                [L, D]
    blocks/mlp/{gate,up}/kernel                     [L, D, F]
    blocks/mlp/down/kernel                          [L, F, D]
    norm/scale                                      [D]
    lm_head/kernel                                  [D, V]            (untied only)

Three ways through the same block: `hidden_states` over packed rows (training, scanned over the
stacked layers), `extend` over a chunk of tokens after a cache, `decode` over one token a row. The
first reads `train_weights`. The last two read `decode_weights`, whose layers are separate: a scan
would copy each layer's cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl.models import attention
from jaxrl.types import Params

Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""Keys and values of each layer, `[rows, K, S, H]`."""


@dataclass(frozen=True, kw_only=True)
class QwenConfig:
    """Every field of a Qwen `config.json` that changes the arithmetic."""

    vocab_size: int
    width: int
    mlp_width: int
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

    @classmethod
    def from_hf(cls, path: str | Path) -> QwenConfig:
        """Reads `config.json` of an HF folder, in its old and its new spelling.

        Raises:
            FileNotFoundError: there is no such folder or no `config.json` in it.
            ValueError: the file names an architecture or a feature without a parity test here.
        """
        file = Path(path) / "config.json"
        if not Path(path).is_dir():
            raise FileNotFoundError(
                f"model folder {str(path)!r} does not exist; set config.model.path to a local "
                "folder in Hugging Face format (config.json, *.safetensors, tokenizer.json)."
            )
        if not file.is_file():
            raise FileNotFoundError(
                f"{str(path)!r} holds no config.json; config.model.path must be a folder in "
                "Hugging Face format."
            )
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{file} holds a {type(fields).__name__}, expected a JSON object.")
        return cls.from_dict(fields, source=str(file))

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> QwenConfig:
        """The same from the parsed JSON, where null is as absent; `source` is named in errors."""
        fields = _without_nulls(fields)
        _check_kinds(fields, source)
        _refuse_unsupported(fields, source)
        is_qwen3 = fields["model_type"] == "qwen3"
        try:
            num_heads = fields["num_attention_heads"]
            return cls(
                vocab_size=fields["vocab_size"],
                width=fields["hidden_size"],
                mlp_width=fields["intermediate_size"],
                num_layers=fields["num_hidden_layers"],
                num_heads=num_heads,
                num_kv_heads=fields.get("num_key_value_heads") or num_heads,
                head_dim=fields.get("head_dim")
                or (128 if is_qwen3 else fields["hidden_size"] // num_heads),
                rope_theta=float(_rope_theta(fields)),
                rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
                tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
                qkv_bias=bool(fields.get("attention_bias", False)) if is_qwen3 else True,
                output_bias=bool(fields.get("attention_bias", False)) if is_qwen3 else False,
                qk_norm=is_qwen3,
                max_positions=fields.get("max_position_embeddings", 32768),
            )
        except KeyError as error:
            raise ValueError(f"{source} lacks the field {error.args[0]!r}.") from error


_KINDS = {
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, "an object")),
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), (Real, "a number")),
    **dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ),
        (int, "a whole number"),
    ),
}


def _check_kinds(fields: dict[str, Any], source: str) -> None:
    """Refuses a field that holds something of another kind than it should."""
    for name, (kind, expected) in _KINDS.items():
        if name in fields and not isinstance(fields[name], kind):
            raise ValueError(f"{source}: {name!r} is {fields[name]!r:.80}; expected {expected}.")


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that hold something, also inside of others."""
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }


def _rope_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The RoPE settings: `rope_parameters` since transformers 5, unless `rope_scaling` is there."""
    return fields.get("rope_scaling") or fields.get("rope_parameters") or {}


def _rope_theta(fields: dict[str, Any]) -> float:
    """The RoPE base: among the RoPE settings since transformers 5, `rope_theta` before."""
    return _rope_fields(fields).get("rope_theta", fields.get("rope_theta", 10_000.0))


def _refuse_unsupported(fields: dict[str, Any], source: str) -> None:
    """Refuses by name what no parity test covers."""
    model_type = fields.get("model_type")
    if model_type not in ("qwen2", "qwen3"):
        raise ValueError(
            f"{source}: model_type {model_type!r} is not supported; expected 'qwen2' (Qwen2.5) or "
            "'qwen3', dense text models."
        )
    rope = _rope_fields(fields)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    layer_types = set(fields.get("layer_types") or ())
    refused = {
        f"RoPE scaling {rope_type!r}": rope_type != "default",
        "RoPE by layer type": any(isinstance(value, dict) for value in rope.values()),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0
        or fields.get("partial_rotary_factor", 1.0) != 1.0,
        "sliding-window attention": bool(fields.get("use_sliding_window"))
        or "sliding_attention" in layer_types,
        f"hidden_act {fields.get('hidden_act')!r}": fields.get("hidden_act", "silu") != "silu",
        "weight quantisation (quantization_config)": "quantization_config" in fields,
    }
    for feature, present in refused.items():
        if present:
            raise ValueError(f"{source}: {feature} is not supported; no parity test covers it.")


class Attention(nnx.Module):
    """Declares grouped-query attention weights."""

    def __init__(self, config: QwenConfig, *, rngs: nnx.Rngs):
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = nnx.Linear(config.width, heads, use_bias=config.qkv_bias, rngs=rngs)
        self.k = nnx.Linear(config.width, kv_heads, use_bias=config.qkv_bias, rngs=rngs)
        self.v = nnx.Linear(config.width, kv_heads, use_bias=config.qkv_bias, rngs=rngs)
        self.o = nnx.Linear(heads, config.width, use_bias=config.output_bias, rngs=rngs)
        if config.qk_norm:
            self.q_norm = nnx.RMSNorm(config.head_dim, rngs=rngs)
            self.k_norm = nnx.RMSNorm(config.head_dim, rngs=rngs)


class MLP(nnx.Module):
    """Declares SwiGLU weights."""

    def __init__(self, config: QwenConfig, *, rngs: nnx.Rngs):
        self.gate = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(config.mlp_width, config.width, use_bias=False, rngs=rngs)


class Block(nnx.Module):
    """Declares one decoder layer."""

    def __init__(self, config: QwenConfig, *, rngs: nnx.Rngs):
        self.input_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.post_attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)


class Qwen(nnx.Module):
    """Declares the decoder's weights; the functions below compute with them."""

    def __init__(self, config: QwenConfig, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.embed = nnx.Embed(config.vocab_size, config.width, rngs=rngs)
        self.blocks = stacked(rngs)
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        if not config.tie_embeddings:
            self.lm_head = nnx.Linear(config.width, config.vocab_size, use_bias=False, rngs=rngs)


def init_params(config: QwenConfig, seed: int) -> Params:
    """Random float32 parameters, for tests and benchmarks."""
    return nnx.to_pure_dict(nnx.state(Qwen(config, rngs=nnx.Rngs(seed)), nnx.Param))


def abstract_params(config: QwenConfig) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct`s, without making any weight."""
    return jax.tree.map(lambda leaf: leaf, _traced_params(config))  # a tree that is the caller's


@cache
def _traced_params(config: QwenConfig) -> Params:
    # Asked for dozens of times a run, and a quarter of a second to trace.
    return nnx.to_pure_dict(
        nnx.state(nnx.eval_shape(lambda: Qwen(config, rngs=nnx.Rngs(0))), nnx.Param)
    )


def logical_axes(config: QwenConfig) -> dict[str, Any]:
    """Names of each parameter's axes, in the shape of the parameter tree; see `sharding`."""

    def linear(inputs: str, outputs: str, has_bias: bool = False) -> dict[str, Any]:
        kernel = {"kernel": ("layer", inputs, outputs)}
        return {**kernel, "bias": ("layer", outputs)} if has_bias else kernel

    qk_norm = {"scale": ("layer", None)}
    attention_axes = {
        "q": linear("width", "heads", config.qkv_bias),
        "k": linear("width", "heads", config.qkv_bias),
        "v": linear("width", "heads", config.qkv_bias),
        "o": linear("heads", "width", config.output_bias),
        **({"q_norm": qk_norm, "k_norm": qk_norm} if config.qk_norm else {}),
    }
    axes = {
        "embed": {"embedding": ("vocab", "width")},
        "blocks": {
            "input_norm": {"scale": ("layer", None)},
            "attention": attention_axes,
            "post_attention_norm": {"scale": ("layer", None)},
            "mlp": {
                "gate": linear("width", "mlp"),
                "up": linear("width", "mlp"),
                "down": linear("mlp", "width"),
            },
        },
        "norm": {"scale": (None,)},
    }
    return axes if config.tie_embeddings else {**axes, "lm_head": {"kernel": ("width", "vocab")}}


def cast(params: Params, dtype: DTypeLike) -> Params:
    """The parameters in the dtype that matrix products use."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def train_weights(params: Params, dtype: DTypeLike) -> Params:
    """Weights as `hidden_states` and `unembed` read them for a gradient: cast, but for two kinds.

    Sums over tokens are float32. Biases stay float32, and are cast where they are added. Beside
    embedding and output layer stands `master`, the float32 table of the same shape, to which their
    gradient goes; nothing reads its values. Other kernels get their gradient from one product,
    which sums in float32 and rounds once.
    """
    weights = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if path[-1].key == "bias" else leaf.astype(dtype), params
    )
    if jnp.dtype(dtype) != jnp.float32:
        for name in {"embed", "lm_head"} & params.keys():
            [table] = params[name].values()
            weights[name] = {**weights[name], "master": table}
    return weights


def decode_weights(params: Params, config: QwenConfig, dtype: DTypeLike) -> Params:
    """Weights as `extend` and `decode` read them: cast, `blocks` a tuple of layers.

    On a CPU a tied model gets an `lm_head` too.
    """
    params = cast(params, dtype)
    layers = tuple(
        jax.tree.map(lambda leaf, index=index: leaf[index], params["blocks"])
        for index in range(config.num_layers)
    )
    weights = {**params, "blocks": layers}
    if config.tie_embeddings and jax.default_backend() == "cpu":
        # A product with a transposed matrix takes a CPU up to twice as long. Elsewhere it costs
        # nothing, and the copy would cost memory.
        weights["lm_head"] = {"kernel": params["embed"]["embedding"].T}
    return weights


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], epsilon: float
) -> Float[Array, "... D"]:
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467) in float32, result in x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


Angles = tuple[jax.Array, jax.Array]
"""Cosines `[M, 1, 1, H / 2]` and sines `[M, 1, 2, H / 2]` of rotary angles, float32.

The sines that turn the first half are negative.
"""


def rope_angles(positions: Int[Array, " M"], config: QwenConfig) -> Angles:
    """The rotary angles of M positions, made once for all layers."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, None, None].astype(jnp.float32) * frequency
    sin = jnp.sin(angle)
    return jnp.cos(angle)[:, :, None], jnp.stack([-sin, sin], axis=2)


def rope(x: Float[Array, "M heads H"], angles: Angles) -> Float[Array, "M heads H"]:
    """Rotary embedding (https://arxiv.org/abs/2104.09864), pairs (i, i + H/2) as Qwen has them."""
    cos, sin = angles
    halves = x.reshape(*x.shape[:-1], 2, -1).astype(jnp.float32)
    # The halves are swapped by reversing an axis, which a CPU does faster than joining slices.
    rotated = halves * cos + halves[..., ::-1, :] * sin
    return rotated.reshape(x.shape).astype(x.dtype)


def _linear(layer: Params, x: jax.Array) -> jax.Array:
    out = x @ layer["kernel"]
    if "bias" not in layer:
        return out
    # Cast after it is repeated, so that its gradient is summed over tokens in its own dtype.
    return out + jnp.broadcast_to(layer["bias"], out.shape).astype(out.dtype)


@jax.custom_vjp
def _look_up(table: jax.Array, master: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table; the gradient goes to `master` alone and is summed in its dtype."""
    return table[ids]


def _look_up_forward(
    table: jax.Array, master: jax.Array, ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return table[ids], (master, ids)


def _look_up_backward(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[None, jax.Array, None]:
    master, ids = saved
    [summed] = jax.linear_transpose(lambda table: table[ids], master)(gradient.astype(master.dtype))
    return None, summed, None


_look_up.defvjp(_look_up_forward, _look_up_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(axes: str, hidden: jax.Array, table: jax.Array, master: jax.Array) -> jax.Array:
    """Float32 products of hidden states with a table; the gradient goes to `master`, not to it.

    Backwards too, products take both operands in the compute dtype and give float32. So what many
    chunks of tokens add to the gradient is summed in float32.

    Args:
        axes: of the table: "vd" or "dv".
        hidden: `[..., D]`.
        table: in the compute dtype.
        master: the same in float32.
    """
    return jnp.einsum(f"...d,{axes}->...v", hidden, table, preferred_element_type=jnp.float32)


def _project_forward(
    axes: str, hidden: jax.Array, table: jax.Array, master: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _project(axes, hidden, table, master), (hidden, table)


def _project_backward(
    axes: str, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None, jax.Array]:
    hidden, table = saved
    gradient = gradient.astype(table.dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    of_hidden = product(f"...v,{axes}->...d", gradient, table).astype(hidden.dtype)
    # In the table's own order of axes: a CPU's compiler cannot turn this product's result.
    order = "...v,...d->vd" if axes == "vd" else "...d,...v->dv"
    operands = (gradient, hidden) if axes == "vd" else (hidden, gradient)
    return of_hidden, None, product(order, *operands)


_project.defvjp(_project_forward, _project_backward)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Queries `[M, N, H]`, keys and values `[M, K, H]` of the new tokens to outputs `[M, N, H]`."""


def _block(
    layer: Params, config: QwenConfig, x: jax.Array, angles: Angles, attend: Attend
) -> jax.Array:
    """One decoder layer over M tokens `[M, D]`, rows already merged.

    The products are two-dimensional on purpose: on a CPU a 3-D by 2-D product is several times
    slower.
    """
    weights = layer["attention"]
    normed = rms_norm(x, layer["input_norm"]["scale"], config.rms_norm_eps)
    q = _linear(weights["q"], normed).reshape(-1, config.num_heads, config.head_dim)
    k = _linear(weights["k"], normed).reshape(-1, config.num_kv_heads, config.head_dim)
    v = _linear(weights["v"], normed).reshape(-1, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"]["scale"], config.rms_norm_eps)
        k = rms_norm(k, weights["k_norm"]["scale"], config.rms_norm_eps)
    q, k = rope(q, angles), rope(k, angles)
    attended = attend(q, k, v).reshape(x.shape[0], config.num_heads * config.head_dim)
    x = x + _linear(weights["o"], attended)
    normed = rms_norm(x, layer["post_attention_norm"]["scale"], config.rms_norm_eps)
    mlp = layer["mlp"]
    gated = jax.nn.silu(_linear(mlp["gate"], normed)) * _linear(mlp["up"], normed)
    return x + _linear(mlp["down"], gated)


def hidden_states(
    params: Params,
    config: QwenConfig,
    token_ids: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    remat: bool = True,
) -> Float[Array, "R T D"]:
    """Final normed hidden states of packed rows, the layers scanned.

    Args:
        params: stacked parameters, or their `train_weights`.
        config: of the model.
        token_ids: ids of the rows.
        positions: position of each token in its own sequence.
        segment_ids: a token attends to earlier tokens of the same segment in its row.
        remat: recompute each layer in the backward pass rather than keep its activations.
    """
    R, T = token_ids.shape
    angles = rope_angles(positions.reshape(-1), config)
    same_segment = attention.packed_mask(segment_ids)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (x.reshape(R, T, *x.shape[1:]) for x in (q, k, v))
        return attention.train(q, k, v, same_segment).reshape(R * T, *q.shape[2:])

    def step(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        return _block(layer, config, x, angles, attend), None

    table, ids = params["embed"], token_ids.reshape(-1)
    if "master" in table:
        x = _look_up(table["embedding"], table["master"], ids)
    else:
        x = table["embedding"][ids]
    x, _ = jax.lax.scan(jax.checkpoint(step) if remat else step, x, params["blocks"])
    return rms_norm(x, params["norm"]["scale"], config.rms_norm_eps).reshape(R, T, -1)


def unembed(
    params: Params, config: QwenConfig, hidden: Float[Array, "... D"], *, num_tokens: int
) -> Float[Array, "... V"]:
    """Float32 logits; ids from `num_tokens` on, which no tokenizer knows, get the lowest value.

    Checkpoints pad their vocabulary. Masking those ids here, in sampler and trainer alike, keeps
    both on one distribution.
    """
    is_tied = "lm_head" not in params
    table = params["embed" if is_tied else "lm_head"]
    if "master" in table:
        axes, weights = ("vd", table["embedding"]) if is_tied else ("dv", table["kernel"])
        logits = _project(axes, hidden, weights, table["master"])
    else:
        kernel = table["embedding"].T if is_tied else table["kernel"]
        logits = jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
    if num_tokens >= config.vocab_size:
        return logits
    return jnp.where(jnp.arange(config.vocab_size) < num_tokens, logits, attention.LOWEST)


def extend(
    weights: Params,
    config: QwenConfig,
    cache: Cache | None,
    token_ids: Int[Array, "R C"],
    start: Int[Array, " R"],
    lengths: Int[Array, " R"],
) -> tuple[Float[Array, "R D"], Cache]:
    """Reads a chunk of tokens after what the cache holds; prompts and observations alike.

    Args:
        weights: of `decode_weights`.
        config: of the model.
        cache: keys and values so far, `[R, K, S, H]` a layer; None when there are none.
        token_ids: the chunk, padded on the right.
        start: tokens each row's cache holds, which is the position of the chunk's first token.
        lengths: valid tokens of each row's chunk, at least 1.

    Returns:
        The normed hidden state of each row's last valid token, and the chunk's keys and values,
        `[R, K, C, H]` a layer, for the caller to write at `start`.
    """
    R, C = token_ids.shape
    angles = rope_angles((start[:, None] + jnp.arange(C)).reshape(-1), config)
    written = []
    x = weights["embed"]["embedding"][token_ids.reshape(-1)]
    for index, layer in enumerate(weights["blocks"]):

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, index: int = index) -> jax.Array:
            q, k, v = (x.reshape(R, C, *x.shape[1:]) for x in (q, k, v))
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
            written.append((k, v))
            past = cache[index] if cache is not None else None
            return attention.extend(q, k, v, past, start).reshape(R * C, *q.shape[2:])

        x = _block(layer, config, x, angles, attend)
    last = jnp.take_along_axis(x.reshape(R, C, -1), (lengths - 1)[:, None, None], axis=1)[:, 0]
    return rms_norm(last, weights["norm"]["scale"], config.rms_norm_eps), tuple(written)


def decode(
    weights: Params,
    config: QwenConfig,
    window: Cache,
    valid: Bool[Array, "B W"],
    index: Int[Array, ""],
    token_ids: Int[Array, " B"],
    positions: Int[Array, " B"],
) -> tuple[Float[Array, "B D"], Cache]:
    """Reads one token a row.

    Args:
        weights: of `decode_weights`.
        config: of the model.
        window: of `kv_cache.open_window`: keys `[B, K, H, W]` and values `[B, K, W, H]` a layer.
        valid: what each row may attend to, `index` included.
        index: where in the window all rows write this token.
        token_ids: the tokens to read.
        positions: their positions.

    Returns:
        The normed hidden state after each token, and the window with this step written.
    """
    written = []
    angles = rope_angles(positions, config)
    x = weights["embed"]["embedding"][token_ids]
    put = jax.lax.dynamic_update_slice_in_dim
    for layer, (old_keys, old_values) in zip(weights["blocks"], window, strict=True):

        def attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            old_keys: jax.Array = old_keys,
            old_values: jax.Array = old_values,
        ) -> jax.Array:
            keys = put(old_keys, k[..., None], index, axis=3)
            values = put(old_values, v[:, :, None], index, axis=2)
            written.append((keys, values))
            return attention.decode(q, keys, values, valid)

        x = _block(layer, config, x, angles, attend)
    return rms_norm(x, weights["norm"]["scale"], config.rms_norm_eps), tuple(written)
