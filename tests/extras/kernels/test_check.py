"""Kernels before a run: sound ones pass, broken ones of each kind give way to the next."""

import re
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.experts.choice import make_trial
from jaxrl.extras.experts.products import grouped_matmul, grouped_matmul_static
from jaxrl.extras.kernels import attention_gpu, attention_tpu, trials
from jaxrl.extras.kernels import check as kernel_check
from jaxrl.models.attention.reference import XLA
from jaxrl.models.kernel_check import select_kernel
from tests.extras.kernels import broken

pytestmark = pytest.mark.usefixtures("quick_compilation")

DEVICE = jax.devices("cpu")[0]


def trial(kind, dtype):
    if kind == "train":
        return trials.make_packed_trial(
            4, 2, 32, dtype, DEVICE, shares_prompts=True
        ), XLA.attend_packed
    if kind == "attend_pages":
        made = trials.make_paged_trial(8, 2, 32, dtype, DEVICE, page_tokens=16, num_queries=16)
        return made, XLA.attend_pages
    return make_trial(48, 32, dtype, DEVICE), grouped_matmul_static


def check(kind, dtype, line, **settings):
    made, reference = trial(kind, dtype)
    kernels = {name: partial(getattr, broken, f"{kind}_{name}") for name in line}
    return select_kernel(lambda _: [made], kernels, reference, **settings)


KINDS = ("train", "attend_pages", "product")


@pytest.mark.parametrize("kind", KINDS)
def test_each_broken_kernel_gives_way_to_the_sound_one_behind_it(kind):
    breaks = {name: finding for name, finding in broken.BREAKS.items()
              if kind != "attend_pages" or name != "gradient_is_off"}  # fmt: skip
    found = check(kind, jnp.bfloat16, [*breaks, "nothing_is_wrong"])
    assert found.name == "nothing_is_wrong"
    *failed, passed = found.kernel_checks
    assert [one.kernel for one in failed] == list(breaks)
    for one, finding in zip(failed, breaks.values(), strict=True):
        assert not one.is_sound
        assert re.search(finding, one.finding), one
    assert passed.is_sound
    assert re.match(r"off by outputs 0\.\d\d%, .*; compiled and run in \d+\.\d s$", passed.finding)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_hundredth_is_no_rounding_of_float32(kind):
    found = check(kind, jnp.float32, ["off_by_a_hundredth", "nothing_is_wrong"])
    assert [one.is_sound for one in found.kernel_checks] == [False, True]
    assert re.search(
        r"outputs: off by 1\.00%; rounding explains at most 0\.10%", found.kernel_checks[0].finding
    )


def test_behind_all_stands_xla():
    found = check("attend_pages", jnp.float32, ["off_by_a_hundredth"])
    assert (found.name, found.function) == ("xla", XLA.attend_pages)
    assert [one.is_sound for one in found.kernel_checks] == [False]


def test_a_kernel_that_the_user_named_has_to_pass():
    with pytest.raises(
        ValueError,
        match=r"config\.model\.attention is 'off_by_a_hundredth', which fails its check before the "
        r"run: attention of the sampler, reading: outputs: off by 1\.0\d%.* Set it to 'auto'",
    ):
        check(
            "attend_pages", jnp.float32, ["off_by_a_hundredth"], config_key="config.model.attention"
        )
    found = check("attend_pages", jnp.float32, ["nothing_is_wrong"], config_key="key")
    assert found.kernel_checks[0].is_sound


def test_a_kernel_whose_library_is_not_installed_gives_way():
    def load():
        raise ImportError("tokamax is not installed; install jaxrl[cuda]")

    made, reference = trial("product", jnp.float32)
    found = select_kernel(lambda _: [made], {"tokamax": load}, reference)
    assert found.name == "xla"
    assert found.kernel_checks[0].finding == (
        "ImportError: tokamax is not installed; install jaxrl[cuda]"
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernels_of_accelerators_pass_in_the_interpreter(dtype):
    """So their own rounding is not taken for a fault."""
    line = {"triton": lambda: partial(attention_gpu.attend_pages, interpret=True),
            "mosaic": lambda: partial(attention_tpu.attend_pages, interpret=True)}  # fmt: skip
    made, reference = trial("attend_pages", dtype)
    for name, load in line.items():
        found = select_kernel(lambda _: [made], {name: load}, reference)
        assert found.name == name, found.kernel_checks


def test_a_kernel_that_hangs_is_reported(monkeypatch, capsys):
    def slow(*arguments):
        def wait(out):
            time.sleep(0.6)
            return out

        out, lse = XLA.attend_pages(*arguments)
        return jax.pure_callback(wait, jax.typeof(out), out), lse

    monkeypatch.setattr(kernel_check, "SLOW_CHECK_S", 0.3)
    made, reference = trial("attend_pages", jnp.float32)
    select_kernel(lambda _: [made], {"slow": lambda: slow}, reference)
    assert capsys.readouterr().err.startswith(
        "warning: attention of the sampler, reading: the check of slow is still running after 0 s."
    )
    monkeypatch.setattr(kernel_check, "SLOW_CHECK_S", 100.0)
    select_kernel(lambda _: [made], {"slow": lambda: slow}, reference)
    assert not capsys.readouterr().err


def test_a_kernel_whose_outputs_have_another_shape_gives_way():
    def short(*arguments):
        out, lse = XLA.attend_pages(*arguments)
        return out[..., :1], lse

    made, reference = trial("attend_pages", jnp.float32)
    found = select_kernel(lambda _: [made], {"short": lambda: short}, reference)
    assert found.name == "xla"
    assert found.kernel_checks[0].finding == (
        "outputs: shape (8, 16, 8, 1); XLA's is (8, 16, 8, 32)"
    )


# Factors of outputs, and what is added to the log-sum-exp, by how many keys a query reads.
FEW = {
    "outputs behind the first page": lambda limits: (jnp.where(limits > 16, 1.01, 1), 0),
    "the weight of a single key": lambda limits: (1, jnp.where(limits == 1, 1.0, 0)),
    "weights up to a page": lambda limits: (1, jnp.where(limits <= 16, 0.02, 0)),
}


@pytest.mark.parametrize("name", FEW)
def test_what_is_wrong_with_some_queries_alone_is_found(name):
    def attend(*arguments):
        out, lse = XLA.attend_pages(*arguments)
        factor, added = FEW[name](arguments[-1][:, :, None])
        return out * jnp.asarray(factor)[..., None], lse + added

    for num_queries in (1, 16):
        made = trials.make_paged_trial(
            8, 2, 32, jnp.bfloat16, DEVICE, page_tokens=16, num_queries=num_queries
        )
        found = select_kernel(lambda _, one=made: [one], {"bad": lambda: attend}, XLA.attend_pages)
        assert [one.is_sound for one in found.kernel_checks] == [False], found.kernel_checks


ONE_HEAD = (..., slice(3, 4), slice(None))
# Keys of the shortest gradients: few queries read them.
LATE, LATEST = ((slice(None), slice(start, None)) for start in (900, 950))


def scaled(array, part, factor):
    return array.at[part].set((array[part].astype(jnp.float32) * factor).astype(array.dtype))


def with_gradient(part, factor):
    """The identity, whose gradient is scaled in a part."""
    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, g: (scaled(g, part, factor),))
    return same


def attend_with_one_head_off(*arguments):
    out, lse = XLA.attend_pages(*arguments)
    return scaled(out, ONE_HEAD, 1.01), lse


def attend_with_the_weights_of_one_head_off(*arguments):
    out, lse = XLA.attend_pages(*arguments)
    return out, lse.at[..., 3].add(0.01)


def weigh_with_one_expert_off(rows, weights, sizes):
    return grouped_matmul_static(rows, scaled(weights, 3, 1.01), sizes)


PARTS = {
    "a head in decoding": ("decode", attend_with_one_head_off, r"outputs\[:, :, 3:4\]"),
    "a head in reading": ("read", attend_with_one_head_off, r"outputs\[:, :, 3:4\]"),
    "weights of a head": (
        "read", attend_with_the_weights_of_one_head_off, r"means of weights\[:, :, 3:4\]"
    ),
    "gradients of a head": (
        "train", lambda q, *rest: XLA.attend_packed(with_gradient(ONE_HEAD, 1.01)(q), *rest),
        r"gradient of queries\[:, :, 3:4\]",
    ),
    "gradients of late keys": (
        "train", lambda q, k, *rest: XLA.attend_packed(q, with_gradient(LATE, 1.01)(k), *rest),
        r"gradient of keys\[:, 938:1000\]",
    ),
    "gradients of the last keys, more": (
        "train", lambda q, k, *rest: XLA.attend_packed(q, with_gradient(LATEST, 1.02)(k), *rest),
        r"gradient of keys\[:, 938:1000\]",
    ),
    "an expert": ("product", weigh_with_one_expert_off, r"outputs\[155:186\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_what_is_wrong_with_a_part_alone_is_found(name):
    """Over the whole array it is no more than rounding."""
    kind, kernel, piece = PARTS[name]
    heads = 10, 2, 32, jnp.bfloat16, DEVICE
    made = {
        "decode": partial(trials.make_paged_trial, *heads, page_tokens=16, num_queries=1),
        "read": partial(trials.make_paged_trial, *heads, page_tokens=16, num_queries=16),
        "train": partial(trials.make_packed_trial, *heads, shares_prompts=True),
        "product": lambda: trial("product", jnp.bfloat16)[0],
    }[kind]()
    found = select_kernel(lambda _: [made], {"bad": lambda: kernel}, made.reference)
    assert found.name == "xla", found.kernel_checks
    finding = found.kernel_checks[0].finding
    assert re.match(rf"{piece}: off by 1\.\d\d%; rounding explains at most", finding), finding


def test_products_of_either_loop_pass():
    made, reference = trial("product", jnp.bfloat16)
    found = select_kernel(lambda _: [made], {"loop": lambda: grouped_matmul}, reference)
    assert found.name == "loop", found.kernel_checks


def test_the_trial_has_what_kernels_go_wrong_at():
    """Rows that are empty, end at a page's edge and share pages; prompts that segments share."""
    *_, tables, limits = trials.make_paged_trial(
        8, 2, 32, jnp.float32, DEVICE, page_tokens=16, num_queries=1
    ).arrays
    assert {0, 1, 15, 16, 17} <= set(limits.reshape(-1).tolist())
    live = [set(row[: -(-end // 16)]) for row, end in zip(tables, limits[:, 0], strict=True)]
    assert any(a & b for i, a in enumerate(live) for b in live[:i])
    *_, reads, _, is_there = trials.make_packed_trial(
        4, 2, 32, jnp.float32, DEVICE, shares_prompts=True
    ).arrays
    assert (reads[:, 2] > 0).sum() == 200 + 3 + 260
    assert not is_there.all()
    *_, reads, _, _ = trials.make_packed_trial(
        4, 2, 32, jnp.float32, DEVICE, shares_prompts=False
    ).arrays
    assert not np.asarray(reads[:, 2]).any()
