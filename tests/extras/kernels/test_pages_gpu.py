"""Paged attention on Hopper: division of work, merging of parts, and pages read."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.kernels import pages_gpu
from jaxrl.extras.kernels.pages_gpu import NUM_PROGRAMS, get_next_span, partition_work
from jaxrl.models.attention.reference import EMPTY_LSE, XLA
from tests.models.attention.brute import assert_agrees, brute_force_pages, random_pages
from tests.programs import for_gpu, lowered_for_gpu, sampler_programs

pytestmark = pytest.mark.usefixtures("quick_compilation")

PAGE = 64
interpreted = pytest.mark.skipif(
    not hasattr(pages_gpu.plgpu, "InterpretGPUParams"),
    reason="the interpreter multiplies by transposed matrices since JAX 0.12",
)


def work_of(limits, num_heads):
    # A function anew, which JAX traces anew: a test may have set the number of programs.
    return jax.device_get(jax.jit(lambda x: partition_work(x, PAGE, num_heads))(limits))


def spans(work, num_heads):
    """Return all spans of each program, in the kernel's order."""
    found = []
    for program, (matrix, head, start, num_spans, num_pages, _) in enumerate(work.programs):
        place, own = (matrix, head, start, num_pages), []
        for _ in range(num_spans):
            span, place = get_next_span(place, program, work.pages, work.next_live, num_heads)
            own.append(type(span)(*map(int, span)))
        assert not num_spans or int(place[-1]) == 0
        found.append(own)
    return found


def test_three_rows_among_four_programs_by_hand(monkeypatch):
    # Two key heads: rows of 3, 0 and 2 pages have 8, 0 and 6 units, so shares are 3, 4, 3 and 4.
    monkeypatch.setattr(pages_gpu, "NUM_PROGRAMS", 4)
    work = work_of(np.array([130, 0, 128]), 2)
    assert work.pages.tolist() == [3, 0, 2]
    assert work.programs[:, 4].tolist() == [2, 3, 2, 3]
    # The second program's units end in a key head that the third has the end of, and so on.
    assert work.programs[:, 5].tolist() == [1, 2, 3, 3]
    first, second, third, fourth = spans(work, 2)
    # Slots 0 to 5 are those of whole key heads, 6 and 7 of the first program, 8 and 9 of the next.
    assert first == [(0, 0, 0, 2, 7)]
    assert second == [(0, 0, 2, 1, 8), (0, 1, 0, 2, 9)]
    assert third == [(0, 1, 2, 1, 10), (2, 0, 0, 1, 11)]
    assert fourth == [(2, 0, 1, 1, 12), (2, 1, 0, 2, 5)]


@pytest.mark.parametrize("seed", range(3))
def test_each_page_of_each_key_head_is_read_once_and_no_slot_is_written_twice(seed):
    rng = np.random.default_rng(seed)
    rows, num_heads = int(rng.integers(1, 20)), int(rng.integers(1, 9))
    limits = rng.integers(0, 40 * PAGE, rows) * (rng.random(rows) < 0.8)
    work = work_of(limits, num_heads)
    each = [span for own in spans(work, num_heads) for span in own]
    read = [(x.matrix, x.head, x.start + i) for x in each for i in range(x.num_pages)]
    expected = [(f, k, j) for f in range(rows) for k in range(num_heads)
              for j in range(-(-limits[f] // PAGE))]  # fmt: skip
    assert sorted(read) == expected
    assert len({span.slot for span in each}) == len(each)
    assert all(0 <= span.slot < rows * num_heads + 2 * NUM_PROGRAMS for span in each)
    parts = np.unique([x[:2] for x in each], axis=0, return_counts=True)[1] if each else [0]
    assert max(parts) <= pages_gpu.MAX_PARTS


def test_parts_are_merged_to_the_softmax_over_all(monkeypatch):
    """The test fills the slots that the kernel writes; the other slots are NaN."""
    monkeypatch.setattr(pages_gpu, "NUM_PROGRAMS", 7)
    arrays = random_pages(np.random.default_rng(3), 5, 1, 6, 3, 16, PAGE, 20)
    q, keys, values, tables, limits = arrays
    work = work_of(limits[:, 0], 3)
    out = np.full((5 * 3 + 14, 2, 16), np.nan)
    lse = np.full((5 * 3 + 14, 2), np.nan)
    for span in (span for own in spans(work, 3) for span in own):
        heads = slice(2 * span.head, 2 * span.head + 2)
        below = limits[span.matrix] - span.start * PAGE
        found = brute_force_pages(
            q[span.matrix, None, :, heads],
            *(x[:, span.head, None] for x in (keys, values)),
            tables[span.matrix, None, span.start :],
            np.minimum(below, span.num_pages * PAGE)[None],
        )
        out[span.slot], lse[span.slot] = (x[0, 0] for x in found)
    merged, merged_lse = jax.jit(lambda *x: pages_gpu._merge_partial_results(*x, 3))(out, lse, work)
    expected, expected_lse = brute_force_pages(*arrays)
    np.testing.assert_allclose(merged.reshape(expected[:, 0].shape), expected[:, 0], atol=1e-6)
    expected_lse = np.where(np.isfinite(expected_lse), expected_lse, EMPTY_LSE)
    np.testing.assert_allclose(merged_lse.reshape(5, 6), expected_lse[:, 0], rtol=1e-6)


def interpreted_pages(*arrays):
    return jax.jit(lambda *x: pages_gpu.attend_pages(*x, interpret=True))(*arrays)


CASES = [
    # B, Q, N, K, H, page, M, dtype
    (3, 1, 4, 2, 64, 64, 4, "float32"),
    (2, 16, 8, 2, 80, 64, 3, "bfloat16"),
    (1, 16, 7, 1, 96, 64, 2, "float32"),
    (2, 1, 16, 1, 256, 64, 9, "float32"),
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_against_brute_force(case, monkeypatch):
    monkeypatch.setattr(pages_gpu, "NUM_PROGRAMS", 5)
    *shape, dtype = case
    q, keys, values, tables, limits = random_pages(np.random.default_rng(0), *shape)
    given = [jnp.asarray(x, dtype) for x in (q, keys, values)]
    expected = brute_force_pages(*(np.asarray(x, np.float32) for x in given), tables, limits)
    actual = interpreted_pages(*given, tables, limits)
    assert_agrees(actual, expected, tolerance=2e-6 if dtype == "float32" else 0.02)


@interpreted
def test_limits_at_edges_of_pages_rows_that_read_nothing_and_pages_that_rows_share(monkeypatch):
    monkeypatch.setattr(pages_gpu, "NUM_PROGRAMS", 3)
    rng = np.random.default_rng(0)
    q, keys, values, _, _ = random_pages(rng, 6, 2, 2, 1, 16, PAGE, 3)
    tables = rng.permutation(18).reshape(6, 3).astype(np.int32)
    tables[1:3, :2] = tables[0, :2]
    limits = np.array([[128, 129], [127, 128], [1, 64], [0, 0], [0, 65], [192, 0]], np.int32)
    actual = interpreted_pages(q, keys, values, tables, limits)
    assert_agrees(actual, brute_force_pages(q, keys, values, tables, limits))
    nothing = interpreted_pages(q, keys, values, tables, 0 * limits)
    assert not nothing[0].any()
    assert (nothing[1] == EMPTY_LSE).all()


def shapes(B, Q, N, K, H, page, M, dtype):
    make = jax.ShapeDtypeStruct
    pages = make((B * M, K, page, H), dtype)
    return (
        make((B, Q, N, H), dtype), pages, pages, make((B, M), jnp.int32), make((B, Q), jnp.int32),
    )  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        (256, 1, 16, 8, 128, 64, 64, "bfloat16"),
        (64, 1, 14, 2, 64, 64, 32, "float16"),
        (16, 64, 28, 4, 96, 128, 8, "bfloat16"),
    ],
    ids=str,
)
def test_lowered_for_a_hopper_chip_without_what_is_deprecated(shape):
    program = lowered_for_gpu(jax.jit(for_gpu(pages_gpu.attend_pages)), *shapes(*shape))
    assert re.findall(r"custom_call @(\w*(?:mosaic|triton)\w*)", program) == ["mosaic_gpu_v2"]


def test_the_sampler_decodes_with_it():
    """In the sampler's mesh, JAX also assigns shardings to the kernel's operands."""
    kernels = replace(XLA, past=None, attend_pages=pages_gpu.attend_pages, page_tokens=PAGE)
    decode, arguments = sampler_programs(kernels=kernels, scan_layers=True)["decode"]
    program = lowered_for_gpu(jax.jit(decode), *arguments)
    assert re.findall(r"custom_call @(\w*(?:mosaic|triton)\w*)", program) == ["mosaic_gpu_v2"]


def test_what_the_matrix_units_do_not_take_is_refused():
    with pytest.raises(ValueError, match="head size of 72"):
        jax.eval_shape(pages_gpu.attend_pages, *shapes(2, 1, 4, 2, 72, 64, 2, "bfloat16"))
