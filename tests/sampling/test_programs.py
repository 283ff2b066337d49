"""What the sampler compiles for the configurations here, and what its kernels read."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.builders.components import draw_kinds
from jaxrl.extras.kernels import attention_gpu as gpu
from jaxrl.extras.kernels.attention_gpu import num_live
from jaxrl.extras.kernels.attention_tpu import Steps
from jaxrl.models.attention.kernels import PAGE_TOKENS
from jaxrl.sampling import engine, next_token
from jaxrl.sampling.buckets import append_sizes, row_sizes
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.stop_strings import StopAutomaton
from tests.helpers import ROOT, resolved
from tests.programs import equations
from tests.toys import SMALL, Player, one_device_mesh, toy_tokenizer
from tests.vision import golden

CONFIGS = [
    path
    for path in sorted((ROOT / "configs").glob("*.py"))
    if "def get_config" in path.read_text(encoding="utf-8")
]


MODELS = {"text": SMALL, "images": golden()[0]}


@pytest.fixture(params=["gpu", "cpu"])
def platform(request, monkeypatch):
    """For which engines take their sizes, wherever they are."""
    for sizes in (row_sizes, append_sizes):
        chosen = partial(sizes, request.param)
        monkeypatch.setattr(engine, sizes.__name__, lambda _, *rest, chosen=chosen: chosen(*rest))
    return request.param


@pytest.mark.parametrize(
    ("platform", "dtype", "is_multiplied", "sizes"),
    [
        ("cpu", "float32", True, [1, 4, 8, 16]),
        ("cpu", "bfloat16", True, [2, 4, 8, 16]),  # one row would be multiplied from copies
        ("cpu", "bfloat16", False, [1, 4, 8, 16]),  # all are
        ("gpu", "bfloat16", True, [1, 4, 16]),
    ],
)
def test_a_cpu_decodes_two_rows_at_least_in_bfloat16(
    platform, dtype, is_multiplied, sizes, monkeypatch
):
    monkeypatch.setattr("jaxrl.sampling.buckets.MULTIPLIES_BFLOAT16", is_multiplied)
    assert row_sizes(platform, 16, dtype) == sizes
    assert row_sizes(platform, 1, dtype) == [1]


def engine_of(model, *, num_rows=256, max_total_tokens=4096, **settings):
    return Engine(
        MODELS[model], one_device_mesh(), StopAutomaton([b"a"], ()), num_tokens=1, eos_ids=(),
        num_rows=num_rows, max_prompt_tokens=16, max_total_tokens=max_total_tokens,
        chunk_tokens=8, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_ten_programs_at_most(path, platform):
    names = {}
    exec(path.read_text(encoding="utf-8"), names)
    config = resolved(names["get_config"]())
    for model in MODELS:
        made = engine_of(
            model,
            num_rows=config.rollout.num_rows,
            max_total_tokens=config.rollout.max_total_tokens,
            max_units=config.image_tokens,
            kinds=draw_kinds(config),
        )
        programs = {function.name: function.variants for function in made.functions}
        assert {pages for _, _, pages in programs["decode"]} == {*made.past_sizes}
        programs["decode"] = {(rows, kind) for rows, kind, _ in programs["decode"]}
        assert programs.keys() == {"append", "decode", "copy", "swap", "see"}
        needed = programs.keys() - ({"see"} if model == "text" else {})
        assert {name for name, variants in programs.items() if variants} == needed
        assert sum(map(len, programs.values())) <= 10
        # What a chunk may need: all rows, in every way to draw.
        largest = {(config.rollout.num_rows, kind) for kind in draw_kinds(config)}
        assert programs["decode"] >= largest


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_ways_to_draw_share_what_is_left_of_ten(model, count, platform):
    kinds = next_token.KINDS[:count]
    made = engine_of(model, kinds=kinds)
    sizes = {kind: [] for kind in kinds}
    variants = next(f for f in made.functions if f.name == "decode").variants
    for rows, kind in sorted({(rows, kind) for rows, kind, _ in variants}):
        sizes[kind].append(rows)
    assert list(sizes.values()) == ROWS[platform, model][count - 1]


ROWS = {
    ("gpu", "text"): [
        [[16, 64, 256]],
        [[16, 64, 256], [16, 256]],
        [[16, 64, 256], [256], [256]],
    ],
    ("gpu", "images"): [
        [[16, 64, 256]],
        [[16, 64, 256], [256]],
        [[16, 256], [256], [256]],
    ],
    ("cpu", "text"): [
        [[16, 64, 128, 256]],
        [[16, 64, 128, 256], [64, 256]],
        [[16, 64, 128, 256], [256], [256]],
    ],
    ("cpu", "images"): [
        [[16, 64, 128, 256]],
        [[16, 64, 256], [256]],
        [[64, 256], [256], [256]],
    ],
}
"""Of 256 rows those that the first, the second and the third way are compiled for."""


def lengths_of(name, rng, count):
    """Cached tokens of so many rows, at a random moment."""
    median, spread, most = {
        "search": (900, 0.4, 4095),
        "math": (1500, 0.8, 8191),
        "dapo": (4000, 0.9, 22527),
    }[name]
    return np.clip(rng.lognormal(np.log(median), spread, count), 1, most).astype(int)


def fetched_on_a_tpu(limits, page):
    """Tokens of the live pages of all steps of the kernel's grid; the others are not copied."""
    num_pages = -(-limits // page)
    tables = jnp.zeros((256, num_pages.max()), jnp.int32)
    steps, count = Steps.of(tables, jnp.array(num_pages), 4)
    index = np.arange(count)
    return page * sum(int(steps.page(index, i, 4)[1].sum()) for i in range(4))


def fetched_on_a_gpu(limits, page):
    """Tokens of the pages that each program's loop goes over, in which it loads each once."""
    # A program has the queries of one key head, in 16 rows at least; who pads them reads nothing.
    padded = np.pad(limits[:, None], ((0, 0), (0, 15)))
    return page * sum(int(num_live(jnp.array(of_row), page)) for of_row in padded)


@pytest.mark.parametrize("name", ["search", "math", "dapo"])
@pytest.mark.parametrize(
    ("kernel", "fetched"), [("mosaic", fetched_on_a_tpu), ("triton", fetched_on_a_gpu)]
)
def test_a_decoding_step_fetches_live_pages_and_no_others(kernel, fetched, name):
    page, rng = PAGE_TOKENS[kernel], np.random.default_rng(0)
    lengths = lengths_of(name, rng, 256)
    limits = np.where(rng.random(256) < 0.8, lengths, 0)  # the others wait or have stopped
    total = fetched(limits, page)
    assert limits.sum() <= total <= 1.15 * limits.sum() + page * len(limits)


def test_the_gpu_kernel_loads_keys_and_values_in_one_loop_of_so_many_turns():
    # What the figures above rest on: pages are read inside the kernel's only loop, nowhere else.
    inputs = (
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (
            ((4, 1, 8, 64), jnp.bfloat16),
            *[((32, 2, 64, 64), jnp.bfloat16)] * 2,
            ((4, 8), jnp.int32),
            ((4, 1), jnp.int32),
        )
    )
    [call] = [
        one
        for one in equations(jax.make_jaxpr(gpu.attend_pages)(*inputs).jaxpr)
        if one.primitive.name == "pallas_call"
    ]
    kernel = call.params["jaxpr"]
    _, keys, values, *_ = kernel.invars
    [loop] = [one for one in kernel.eqns if one.primitive.name == "while"]
    users = [one for one in kernel.eqns if keys in one.invars or values in one.invars]
    assert users == [loop]
    loads = [
        one
        for one in loop.params["body_jaxpr"].jaxpr.eqns
        if one.primitive.name == "get" and one.invars[0].aval.shape == keys.aval.shape
    ]
    assert [one.outvars[0].aval.shape for one in loads] == [(64, 64)] * 2


def test_a_chunk_on_a_cpu_makes_no_array_for_tokens_that_no_row_has():
    made = Player(
        SMALL, toy_tokenizer(), ("a",), num_rows=8, chunk_tokens=4, max_prompt_tokens=16,
        max_total_tokens=1024,
    ).engine  # fmt: skip
    sampler = made.programs
    weights = made._weights_of.abstract()
    cache = jax.eval_shape(lambda: sampler.empty_cache(made.num_pages, made.page_tokens))
    state = jax.eval_shape(sampler.empty_state)
    rows, _ = made._host_rows([[]], 8)
    largest = []
    for pages in made.past_sizes:
        jaxpr = jax.make_jaxpr(sampler.decode_chunk, static_argnums=(7, 8))(
            weights, cache, state, rows, made._stops, 1.0, 1.0, "plain", pages
        )
        made_of_rows = [
            out.aval.size
            for each in jaxpr.eqns
            for out in each.outvars
            if out.aval.ndim == 4 and out.aval.shape[0] == 8
        ]
        largest.append(max(made_of_rows))
    by_token = 8 * SMALL.num_kv_heads * SMALL.head_dim
    # Pieces of 64, 64, 128, 256 and 512 tokens: the last of each size is its largest.
    assert largest == [by_token * tokens for tokens in (64, 64, 128, 256, 512)]
