"""Programs that the sampler compiles for the shipped configurations, and the pages they read."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.builders.components import list_sampling_methods
from jaxrl.extras.kernels.attention_gpu import count_live_pages
from jaxrl.models.attention.kernels import PAGE_TOKENS
from jaxrl.sampling import engine
from jaxrl.sampling.buckets import list_prefill_buckets, list_row_buckets
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
    """Make engines choose their sizes for a platform."""
    for sizes in (list_row_buckets, list_prefill_buckets):
        bound = partial(sizes, request.param)
        monkeypatch.setattr(engine, sizes.__name__, lambda _, *rest, bound=bound: bound(*rest))
    return request.param


@pytest.mark.parametrize(
    ("platform", "dtype", "has_matmul", "sizes"),
    [
        ("cpu", "float32", True, [1, 4, 8, 16]),
        ("cpu", "bfloat16", True, [2, 4, 8, 16]),  # weights would be copied for a single row
        ("cpu", "bfloat16", False, [1, 4, 8, 16]),  # weights are copied for any number
        ("gpu", "bfloat16", True, [1, 4, 16]),
    ],
)
def test_a_cpu_decodes_at_least_two_rows_in_bfloat16(
    platform, dtype, has_matmul, sizes, monkeypatch
):
    monkeypatch.setattr("jaxrl.sampling.buckets.CPU_HAS_BFLOAT16_MATMUL", has_matmul)
    assert list_row_buckets(platform, 16, dtype) == sizes
    assert list_row_buckets(platform, 1, dtype) == [1]


def build_engine(model, *, num_rows=256, max_total_tokens=4096, **settings):
    return Engine(
        MODELS[model], one_device_mesh(), StopAutomaton([b"a"], ()), num_tokens=1, eos_ids=(),
        num_rows=num_rows, max_total_tokens=max_total_tokens,
        chunk_tokens=8, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_need_at_most_ten_programs(path, platform):
    names = {}
    exec(path.read_text(encoding="utf-8"), names)
    config = resolved(names["get_config"]())
    for model in MODELS:
        sampler = build_engine(
            model,
            num_rows=config.rollout.max_num_seqs,
            max_total_tokens=config.rollout.max_total_tokens,
            max_units=config.max_image_tokens,
            kinds=list_sampling_methods(config),
        )
        programs = {function.name: function.variants for function in sampler.jitted_functions}
        assert {pages for _, _, pages in programs["decode"]} == {*sampler.past_sizes}
        programs["decode"] = {(rows, kind) for rows, kind, _ in programs["decode"]}
        assert programs.keys() == {"prefill", "decode", "copy", "swap", "embed"}
        needed = programs.keys() - ({"embed"} if model == "text" else {})
        assert {name for name, variants in programs.items() if variants} == needed
        assert sum(map(len, programs.values())) <= 10
        # A chunk may need all rows, for every kind of draw.
        largest = {(config.rollout.max_num_seqs, kind) for kind in list_sampling_methods(config)}
        assert programs["decode"] >= largest


def test_a_gpu_kernel_fetches_only_live_pages():
    page, rng = PAGE_TOKENS["triton"], np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(900), 0.4, 64), 1, 4095).astype(int)
    limits = np.where(rng.random(64) < 0.8, lengths, 0)  # the others wait or have stopped
    # A program has the queries of one key head, padded to 16 rows that read nothing.
    padded = np.pad(limits[:, None], ((0, 0), (0, 15)))
    num_fetched = page * sum(int(count_live_pages(jnp.array(row), page)) for row in padded)
    assert limits.sum() <= num_fetched <= 1.15 * limits.sum() + page * len(limits)
