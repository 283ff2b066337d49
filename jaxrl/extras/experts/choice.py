"""Selection of a run's expert kernels, once, on the host."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl.extras.experts.dispatch import Experts
from jaxrl.extras.experts.products import grouped_product, grouped_product_of_known_length
from jaxrl.models.kernel_check import Choice, Trial, excluded, select_kernel, takes
from jaxrl.runtime.sharding import PIECES

KERNELS = {
    "gpu": {
        "mosaic_gpu": "jaxrl.extras.experts.tokamax:grouped_product",
        "triton": "jaxrl.extras.experts.gpu:grouped_product",
    },
    "tpu": {"megablox": "jaxrl.extras.experts.tpu:grouped_product"},
}
"""Platform-specific kernels, by platform, in order of preference."""


def choose(
    name: str,
    mesh: Mesh,
    width: int = 0,
    expert_width: int = 0,
    check_dtype: DTypeLike | None = None,
) -> Experts:
    """Return the kernels of `config.model.experts` for a mesh; see `decide`.

    Args:
        name: One of `config.EXPERTS`.
        mesh: Mesh that runs the model.
        width: Width of the model.
        expert_width: Width of an expert's inner layer.
        check_dtype: Dtype with which kernels are self-tested (see `models.kernel_check`); None runs
            no test.

    Raises:
        ValueError: The kernels do not run on these devices, or fail the self-test.
    """
    device = mesh.local_devices[0]  # other processes check theirs
    dtype = None if check_dtype is None else jnp.dtype(check_dtype)
    first, reason = decide(name, device.platform, dtype)
    chosen = _checked(name, device, width, expert_width, dtype)
    return Experts(
        name=chosen.name,
        reason=reason if chosen.name == first else f"where {first} failed its check",
        product=chosen.function,
        mesh=mesh,
        batch=PIECES,
        kernel_checks=chosen.kernel_checks,
    )


@functools.cache
def _checked(name: str, device: jax.Device, width: int, expert_width: int, dtype: Any) -> Choice:
    """Select the kernels, once for all meshes of a process."""
    kernels = KERNELS.get(device.platform, {})
    line = {"auto": [one for one in kernels if takes(one, dtype)], "xla": []}.get(name, [name])
    # With a loop of unknown length the host would wait for a GPU at every product.
    on_gpu = device.platform == "gpu"
    return select_kernel(
        lambda _: [] if dtype is None else [trial_of(width, expert_width, dtype, device)],
        # Import lazily: a process never needs the kernels of other platforms.
        {one: partial(pkgutil.resolve_name, kernels[one]) for one in line},
        grouped_product_of_known_length if on_gpu else grouped_product,
        named_by="" if name == "auto" else "config.model.experts",
    )


def trial_of(width: int, expert_width: int, dtype: DTypeLike, device: jax.Device) -> Trial:
    """Build the trial: expert products, forward and backward; rows beyond all groups are ignored.

    Args:
        width: Width of the model.
        expert_width: Width of an expert's inner layer.
        dtype: Dtype of the run.
        device: Device that runs the trial.
    """
    rng = np.random.default_rng(0)
    sizes = np.array([130, 0, 7, 61, 256, 1, 0, 33], np.int32)
    num_rows, taken = 512, int(sizes.sum())
    rows = rng.normal(size=(num_rows, width)).astype(np.float32)
    weights = rng.normal(size=(len(sizes), width, expert_width)).astype(np.float32)
    gradient = rng.normal(size=(num_rows, expert_width)).astype(np.float32)

    def run(
        product: Callable[..., Any], rows: jax.Array, weights: jax.Array, sizes: jax.Array,
        gradient: jax.Array,
    ) -> Sequence[jax.Array]:  # fmt: skip
        out, backward = jax.vjp(lambda rows, weights: product(rows, weights, sizes), rows, weights)
        of_rows, of_weights = backward(gradient.astype(out.dtype))
        return out[:taken], of_rows[:taken], of_weights

    return Trial(
        operation="products of experts",
        names=("outputs", "gradient of rows", "gradient of weights"),
        run=run,
        arrays=(rows, weights, sizes, gradient),
        reference=grouped_product_of_known_length,
        dtype=dtype,
        device=device,
    )


def decide(name: str, platform: str, dtype: DTypeLike | None = None) -> tuple[str, str]:
    """Resolve `config.model.experts` to a kernel name other than `auto`, and the reason.

    Raises:
        ValueError: The kernels do not support these devices or this dtype. Names the config key.
    """
    kernels = KERNELS.get(platform, {})
    if name == "auto":
        line = (one for one in kernels if takes(one, dtype))
        return (*line, "xla")[0], f"since the devices are {platform}s{excluded(kernels, dtype)}"
    if name != "xla" and name not in kernels:
        places = " and ".join(f"{place}s" for place in KERNELS if name in KERNELS[place])
        raise ValueError(
            f"config.model.experts is {name!r}, whose kernels are for {places}, but the devices "
            f"are {platform}s; set it to 'auto' or 'xla'."
        )
    if not takes(name, dtype):
        raise ValueError(
            f"config.model.experts is {name!r}, whose kernels multiply 16-bit floats, but "
            f"config.model.dtype is '{dtype}'; set the first to 'auto' or 'xla'."
        )
    return name, "as config.model.experts says"
