"""What the sampler compiles for the configurations here, and what its kernels read."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.builders.components import select_sampling_kinds
from jaxrl.extras.kernels.attention_gpu import count_live_pages
from jaxrl.models.attention.kernels import PAGE_TOKENS
from jaxrl.sampling import engine, next_token
from jaxrl.sampling.buckets import prefill_sizes, row_sizes
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.stop_strings import StopAutomaton
from tests.helpers import ROOT, resolved
from tests.toys import SMALL, one_device_mesh
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
    for sizes in (row_sizes, prefill_sizes):
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
    monkeypatch.setattr("jaxrl.sampling.buckets.CPU_HAS_BFLOAT16_MATMUL", is_multiplied)
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
            num_rows=config.rollout.max_num_seqs,
            max_total_tokens=config.rollout.max_total_tokens,
            max_units=config.image_tokens,
            kinds=select_sampling_kinds(config),
        )
        programs = {function.name: function.variants for function in made.functions}
        assert {pages for _, _, pages in programs["decode"]} == {*made.past_sizes}
        programs["decode"] = {(rows, kind) for rows, kind, _ in programs["decode"]}
        assert programs.keys() == {"append", "decode", "copy", "swap", "embed"}
        needed = programs.keys() - ({"embed"} if model == "text" else {})
        assert {name for name, variants in programs.items() if variants} == needed
        assert sum(map(len, programs.values())) <= 10
        # What a chunk may need: all rows, in every way to draw.
        largest = {(config.rollout.max_num_seqs, kind) for kind in select_sampling_kinds(config)}
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


def fetched_on_a_gpu(limits, page):
    """Tokens of the pages that each program's loop goes over, in which it loads each once."""
    # A program has the queries of one key head, in 16 rows at least; who pads them reads nothing.
    padded = np.pad(limits[:, None], ((0, 0), (0, 15)))
    return page * sum(int(count_live_pages(jnp.array(of_row), page)) for of_row in padded)


@pytest.mark.parametrize("name", ["search", "math", "dapo"])
def test_a_decoding_step_fetches_live_pages_and_no_others(name):
    page, rng = PAGE_TOKENS["triton"], np.random.default_rng(0)
    lengths = lengths_of(name, rng, 256)
    limits = np.where(rng.random(256) < 0.8, lengths, 0)  # the others wait or have stopped
    total = fetched_on_a_gpu(limits, page)
    assert limits.sum() <= total <= 1.15 * limits.sum() + page * len(limits)
