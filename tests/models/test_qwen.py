"""Properties of the decoder with random parameters; `test_parity` compares with transformers."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import decoder, kv_cache
from jaxrl.models.attention.reference import MASK_VALUE
from tests.helpers import TINY, full_pass, read_tokens, relative_distance, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

PARAMS = tiny_params()
WEIGHTS = TINY.prepare_decoding_weights(PARAMS, jnp.float32)
GARBAGE = 1e3  # must not be read: large enough to show, finite as in a real cache

compute_hidden_states = jax.jit(full_pass, static_argnums=0, static_argnames=("remat", "scan"))
read = jax.jit(partial(read_tokens, TINY))


def full(token_ids, positions=None, segment_ids=None, *, remat="none", scan=True):
    """Return hidden states of up to 3 rows of up to 20 tokens, padded to compile once."""
    R, T = token_ids.shape
    positions = np.arange(T) if positions is None else positions
    segment_ids = 1 if segment_ids is None else segment_ids
    padded = np.zeros((3, 3, 20), np.int32)
    padded[0, :R, :T], padded[1, :R, :T], padded[2, :R, :T] = token_ids, positions, segment_ids
    return np.asarray(compute_hidden_states(TINY, PARAMS, *padded, remat=remat, scan=scan))[:R, :T]


def random_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 250, shape).astype(np.int32)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=0)


def test_prefill_and_decode_at_different_positions_equal_the_full_pass():
    # Three rows: prompts of 3, 9 and 6 tokens, then 4, 2 and 5 tokens of an observation, then three
    # single tokens of two of them. Padding and stale pages are garbage.
    token_ids = random_ids(3, 17)
    expected = full(token_ids)
    empty = kv_cache.allocate_pages(TINY, 15, 4, jnp.float32)
    cache = jax.tree.map(lambda x: jnp.full_like(x, GARBAGE), empty)
    tables = jnp.asarray(np.random.default_rng(3).permutation(15).reshape(3, 5))
    start = np.zeros(3, np.int32)

    def append(rows, lengths, width):
        nonlocal cache
        chunk = np.full((len(rows), width), 7, np.int32)  # padding is an ordinary token
        for index, row in enumerate(rows):
            chunk[index, : lengths[index]] = token_ids[
                row, start[row] : start[row] + lengths[index]
            ]
        counts = jnp.asarray(lengths)
        hidden, cache = read(WEIGHTS, cache, tables[rows], jnp.asarray(start[rows]), counts, chunk)
        for index, row in enumerate(rows):
            end = start[row] + lengths[index]
            assert_close(hidden[index, : lengths[index]], expected[row, start[row] : end])
        start[rows] += lengths

    append(np.arange(3), np.array([3, 9, 6]), 10)
    append(np.arange(3), np.array([4, 2, 5]), 6)
    for _ in range(3):
        append(np.array([2, 0]), np.ones(2, int), 1)


def test_a_token_reads_only_earlier_tokens_of_its_segment():
    token_ids = random_ids(1, 12)
    alone = full(token_ids)
    changed = token_ids.copy()
    changed[0, 8] += 1
    actual = full(changed)
    np.testing.assert_array_equal(actual[0, :8], alone[0, :8])
    assert (np.abs(actual[0, 8:] - alone[0, 8:]).max(axis=-1) > 1e-3).all()

    # After another sequence and before padding.
    before = random_ids(1, 5, seed=1)
    row = np.concatenate([before, token_ids, np.zeros((1, 3), np.int32)], axis=1)
    positions = np.concatenate([np.arange(5), np.arange(12), np.zeros(3, int)])[None]
    segment_ids = np.repeat([2, 1, 0], [5, 12, 3])[None]
    packed = full(row, positions, segment_ids)
    assert_close(packed[:, 5:17], alone)
    assert_close(packed[:, :5], full(before))
    assert np.isfinite(packed).all()


def gradient_and_residuals(remat, scan):
    """Return the gradient of all parameters and the number of values saved for it."""
    T = 48
    row = jnp.asarray(random_ids(1, T)), jnp.arange(T)[None], jnp.ones((1, T), jnp.int32)
    loss = lambda p: (full_pass(TINY, p, *row, remat=remat, scan=scan) ** 3).sum()  # noqa: E731
    residuals = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], PARAMS)
    size = sum(leaf.size for leaf in jax.tree.leaves(residuals))
    return jax.jit(jax.grad(loss))(PARAMS), size


def test_remat_and_unrolled_layers_change_no_gradient():
    expected, size = gradient_and_residuals("none", True)
    sizes = {"none": size}
    for remat in ("dots", "names", "full", "offload"):
        gradient, sizes[remat] = gradient_and_residuals(remat, True)
        assert relative_distance(gradient, expected) < 1e-6
    for remat in ("none", "names", "offload"):
        gradient, _ = gradient_and_residuals(remat, False)
        assert relative_distance(gradient, expected) < 1e-6
    # Per layer and token: q, k, v, o and the MLP's inner products; `names` adds attention's result
    # and its log-sum-exp.
    layers = {name: (size - sizes["full"]) / 2 / 48 for name, size in sizes.items()}
    shared = 64 + 2 * 32 + 64 + 2 * 96
    assert layers["names"] == pytest.approx(shared + 64 + 4, rel=0.01)
    assert layers["dots"] == pytest.approx(shared, rel=0.01)
    assert layers["none"] > layers["names"] + 4 * 48
    assert layers["offload"] == 64 + 4  # besides the layer's input


@pytest.mark.parametrize(("scan", "times"), [(True, 1), (False, 2)])
def test_offloaded_values_move_to_the_host_and_back(scan, times):
    # The layer's input, attention's result and its log-sum-exp, for two layers.
    row = jnp.zeros((1, 48), jnp.int32), jnp.arange(48)[None], jnp.ones((1, 48), jnp.int32)

    def placements(remat):
        loss = lambda p: full_pass(TINY, p, *row, remat=remat, scan=scan).sum()  # noqa: E731
        program = jax.jit(jax.grad(loss)).trace(PARAMS).lower(lowering_platforms=("cuda",))
        return sorted(re.findall(r'_xla_buffer_placement = "(\w+)"', program.as_text()))

    assert placements("offload") == ["device"] * 3 * times + ["pinned_host"] * 3 * times
    assert placements("full") == []


@pytest.mark.parametrize("tied", [False, True])
def test_ids_beyond_the_tokenizer_get_the_lowest_logit(tied):
    config = dataclasses.replace(TINY, tie_embeddings=tied)
    params = tiny_params(config)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(3, TINY.width)), jnp.float32)
    kernel = params["embed"]["embedding"].T if tied else params["lm_head"]["kernel"]
    whole = config.unembed(params, hidden, num_tokens=254)
    assert_close(whole, np.asarray(hidden) @ np.asarray(kernel))
    masked = np.asarray(config.unembed(params, hidden, num_tokens=250))
    np.testing.assert_array_equal(masked[:, :250], whole[:, :250])
    np.testing.assert_array_equal(masked[:, 250:], np.float32(MASK_VALUE))
    # The sampler's weights give the same.
    weights = config.prepare_decoding_weights(params, jnp.float32)
    assert_close(config.unembed(weights, hidden, num_tokens=250)[:, :250], masked[:, :250])


@pytest.mark.parametrize(
    "settings",
    [
        {"tie_embeddings": True, "qk_norm": False},
        {"qkv_bias": False, "output_bias": True, "num_layers": 3},
    ],
)
def test_every_parameter_is_declared_with_its_axes(settings):
    config = dataclasses.replace(TINY, **settings)
    params, abstract = decoder.init_params(config, 0), config.make_abstract_params()
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, abstract)
    axes = config.get_logical_axes()
    ranks = jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple))
    assert ranks == jax.tree.map(jnp.ndim, params)

    sizes = {
        "layer": config.num_layers,
        "vocab": config.vocab_size,
        "width": config.width,
        "mlp": config.mlp_width,
    }

    def agrees(names, leaf):
        for name, size in zip(names, leaf.shape, strict=True):
            assert name in (None, "heads") or sizes[name] == size

    jax.tree.map(agrees, axes, params, is_leaf=lambda x: isinstance(x, tuple))


def test_rms_norm_by_hand():
    # The root mean square of 3, 4 is sqrt(12.5).
    x = jnp.array([3.0, 4.0])
    actual = decoder.rms_norm(x, jnp.array([1.0, 2.0]), 0.0)
    np.testing.assert_allclose(actual, np.array([3.0, 8.0]) / np.sqrt(12.5), rtol=1e-6)
    # In bfloat16 the square of 300 and the sum would lose digits; the norm is computed in float32.
    half = jnp.full(256, 300.0, jnp.bfloat16)
    assert decoder.rms_norm(half, jnp.ones(256, jnp.bfloat16), 1e-6).dtype == jnp.bfloat16
    np.testing.assert_array_equal(decoder.rms_norm(half, jnp.ones(256, jnp.bfloat16), 1e-6), 1.0)


def test_rope_by_hand():
    # One pair of dimensions at base 1 rotates by one radian per position.
    config = dataclasses.replace(TINY, head_dim=2, rope_theta=1.0)
    positions = jnp.arange(3)
    turned = decoder.apply_rope(
        jnp.ones((3, 1, 1)) * jnp.array([1.0, 0.0]), decoder.compute_rope_angles(positions, config)
    )
    expected = np.stack([np.cos(positions), np.sin(positions)], axis=-1)[:, None]
    np.testing.assert_allclose(turned, expected, atol=1e-6)
