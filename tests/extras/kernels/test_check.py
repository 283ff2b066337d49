"""Self-tests: valid kernels pass, and broken kernels of each kind are skipped."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxrl.extras.experts.choice import make_grouped_matmul_trial
from jaxrl.extras.experts.products import grouped_matmul, grouped_matmul_static
from jaxrl.extras.kernels import attention_gpu, attention_tpu, trials
from jaxrl.models.attention.reference import XLA
from jaxrl.models.kernel_check import select_kernel
from tests.extras.kernels import broken

pytestmark = pytest.mark.usefixtures("quick_compilation")

DEVICE = jax.devices("cpu")[0]


def make_pages_trial(dtype, num_queries=16, num_heads=8):
    return trials.make_paged_trial(
        num_heads, 2, 32, dtype, DEVICE, page_tokens=16, num_queries=num_queries
    )


def make_product_trial(dtype):
    return make_grouped_matmul_trial(48, 32, dtype, DEVICE)


def select(trial, **kernels):
    """Return the selected kernel and the checks of all kernels that were tried."""
    candidates = {name: lambda kernel=kernel: kernel for name, kernel in kernels.items()}
    return select_kernel(lambda _: [trial], candidates, trial.reference)


def check_broken(trial, kind, names, **settings):
    candidates = {name: partial(getattr, broken, f"{kind}_{name}") for name in names}
    return select_kernel(lambda _: [trial], candidates, trial.reference, **settings)


def test_each_broken_kernel_gives_way_to_the_sound_one_behind_it():
    names = [*broken.BREAKS, "nothing_is_wrong"]
    selected = check_broken(make_product_trial(jnp.bfloat16), "product", names)
    assert selected.name == "nothing_is_wrong"
    *failed, passed = selected.kernel_checks
    assert [check.kernel for check in failed] == list(broken.BREAKS)
    for check, finding in zip(failed, broken.BREAKS.values(), strict=True):
        assert not check.is_sound
        assert re.search(finding, check.finding), check
    assert passed.is_sound


def test_behind_all_stands_xla():
    """In float32, an error of a hundredth cannot be rounding."""
    trial = make_pages_trial(jnp.float32)
    selected = check_broken(trial, "attend_pages", ["off_by_a_hundredth"])
    assert (selected.name, selected.function) == ("xla", XLA.attend_pages)
    [check] = selected.kernel_checks
    assert not check.is_sound
    assert "outputs: off by 1.00%; rounding explains at most 0.10%" in check.finding


def test_a_kernel_that_the_user_named_has_to_pass():
    trial = make_product_trial(jnp.float32)
    with pytest.raises(ValueError, match=r"config\.key is 'off_by_a_hundredth', which fails its"):
        check_broken(trial, "product", ["off_by_a_hundredth"], config_key="config.key")


def test_a_kernel_whose_library_is_not_installed_gives_way():
    def load():
        raise ImportError("tokamax is not installed")

    trial = make_product_trial(jnp.float32)
    selected = select_kernel(lambda _: [trial], {"tokamax": load}, trial.reference)
    assert selected.name == "xla"
    assert selected.kernel_checks[0].finding == "ImportError: tokamax is not installed"


@pytest.mark.parametrize("kernels", [attention_gpu, attention_tpu])
def test_the_kernels_of_accelerators_pass_in_the_interpreter(kernels):
    """Rounding in the kernels themselves is not an error."""
    kernel = partial(kernels.attend_pages, interpret=True)
    selected = select(make_pages_trial(jnp.bfloat16), kernel=kernel)
    assert selected.name == "kernel", selected.kernel_checks


def test_a_kernel_whose_outputs_have_another_shape_gives_way():
    def short(*arguments):
        out, lse = XLA.attend_pages(*arguments)
        return out[..., :1], lse

    selected = select(make_pages_trial(jnp.float32), short=short)
    assert selected.name == "xla"
    assert "outputs: shape (8, 16, 8, 1)" in selected.kernel_checks[0].finding


ONE_HEAD = (..., slice(3, 4), slice(None))
LATE = slice(None), slice(900, None)  # keys of the shortest gradients: few queries read them


def scaled(array, part, factor):
    return array.at[part].set((array[part].astype(jnp.float32) * factor).astype(array.dtype))


def with_gradient(part, factor):
    """Identity function whose gradient is scaled in a part of the array."""
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


def attend_with_gradients_of_late_keys_off(q, k, *rest):
    return XLA.attend_packed(q, with_gradient(LATE, 1.01)(k), *rest)


PARTS = [
    # Operation, kernel, and the part that the finding names.
    ("decode", attend_with_one_head_off, r"outputs\[:, :, 3:4\]"),
    ("read", attend_with_the_weights_of_one_head_off, r"means of weights\[:, :, 3:4\]"),
    ("train", attend_with_gradients_of_late_keys_off, r"gradient of keys\[:, 938:1000\]"),
    ("product", weigh_with_one_expert_off, r"outputs\[155:186\]"),
]


@pytest.mark.parametrize(("operation", "kernel", "part"), PARTS)
def test_what_is_wrong_with_a_part_alone_is_found(operation, kernel, part):
    """Over the whole array, the error is as small as rounding."""
    trial = {
        "decode": partial(make_pages_trial, num_queries=1, num_heads=10),
        "read": partial(make_pages_trial, num_heads=10),
        "train": lambda dtype: trials.make_packed_trial(
            10, 2, 32, dtype, DEVICE, shares_prompts=True
        ),
        "product": make_product_trial,
    }[operation](jnp.bfloat16)
    selected = select(trial, bad=kernel)
    assert selected.name == "xla", selected.kernel_checks
    finding = selected.kernel_checks[0].finding
    assert re.match(rf"{part}: off by 1\.\d\d%; rounding explains at most", finding), finding


def test_products_of_either_loop_pass():
    selected = select(make_product_trial(jnp.bfloat16), loop=grouped_matmul)
    assert selected.name == "loop", selected.kernel_checks


def test_the_trial_has_what_kernels_go_wrong_at():
    """Inputs have empty rows, ends at page boundaries, and shared pages and prompts."""
    *_, tables, limits = make_pages_trial(jnp.float32, num_queries=1).arrays
    assert {0, 1, 15, 16, 17} <= set(limits.reshape(-1).tolist())
    live = [set(row[: -(-end // 16)]) for row, end in zip(tables, limits[:, 0], strict=True)]
    assert any(a & b for i, a in enumerate(live) for b in live[:i])
    for shares_prompts, num_sharing in ((True, 200 + 3 + 260), (False, 0)):
        *_, key_ranges, _, is_token = trials.make_packed_trial(
            4, 2, 32, jnp.float32, DEVICE, shares_prompts=shares_prompts
        ).arrays
        assert (key_ranges[:, 2] > 0).sum() == num_sharing
        assert not is_token.all()
