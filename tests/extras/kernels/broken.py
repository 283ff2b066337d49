"""Broken kernels of attention and experts, which run on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jaxrl.extras.experts.products import grouped_matmul_static
from jaxrl.models.attention.reference import XLA


def nothing_is_wrong(out):
    return out


def one_is_not_a_number(out):
    return out.at[(0,) * out.ndim].set(np.nan)


def off_by_a_hundredth(out):
    return (out * 1.01).astype(out.dtype)


def one_vector_is_another(out):
    """Change one vector of thousands, so that the total error is small."""
    return out.at[tuple(size // 3 for size in out.shape[:-1])].multiply(-1)


@jax.custom_vjp
def gradient_is_off(out):
    return out


gradient_is_off.defvjp(lambda out: (out, None), lambda _, g: ((g * 1.01).astype(g.dtype),))


@jax.custom_vjp
def does_not_compile(out):
    """Kernel that does not compile on this device."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype))(out)


does_not_compile.defvjp(lambda out: (does_not_compile(out), None), lambda _, g: (g,))


def runs_out_of_memory(out):
    """Sort 64 TiB, which the compiler cannot optimize away."""
    first = jnp.sort(jnp.arange(1 << 24)[:, None] * out.ravel()[0] + jnp.ones((1, 1 << 20)), axis=0)
    return out + 0 * jax.lax.stop_gradient(first)[0, 0].astype(out.dtype)


AT_MOST = "rounding explains at most "
BREAKS = {
    "one_is_not_a_number": r"outputs: 1 of \d+ are not finite",
    "off_by_a_hundredth": rf"outputs: off by (0\.[7-9]|1\.)\d+%; {AT_MOST}0\.\d\d%",
    "one_vector_is_another": rf"outputs: (one vector is )?off by \d+\.\d+%; {AT_MOST}",
    "gradient_is_off": rf"gradient of \w+: off by (0\.[7-9]|1\.)\d+%; {AT_MOST}0\.\d\d%",
    "does_not_compile": "ValueError: Only interpret mode is supported on CPU backend.",
    "runs_out_of_memory": r"RESOURCE_EXHAUSTED: Out of memory",
}
"""Finding about each; of kernels without a gradient the fourth has none to be wrong."""


def train(how):
    return lambda q, k, v, key_ranges: how(XLA.attend_packed(q, k, v, key_ranges))


def attend_pages(how):
    def attend(*arguments):
        out, lse = XLA.attend_pages(*arguments)
        return how(out), lse

    return attend


def product(how):
    return lambda *arguments: how(grouped_matmul_static(*arguments))


def __getattr__(name):
    """Return a kernel by name, such as `train_off_by_a_hundredth`."""
    for kind in (train, attend_pages, product):
        how = globals().get(name.removeprefix(f"{kind.__name__}_"))
        if name.startswith(f"{kind.__name__}_") and how:
            return kind(how)
    raise AttributeError(name)
