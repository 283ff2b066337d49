"""Select a run's expert kernels."""

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

from jaxrl.extras.experts.dispatch import ExpertKernels
from jaxrl.extras.experts.products import grouped_matmul, grouped_matmul_static
from jaxrl.models import kernel_check
from jaxrl.models.kernel_check import SelectedKernel, Trial, list_candidates, select_kernel
from jaxrl.runtime.sharding import PIECE_AXES

CONFIG_KEY = "config.model.experts"

KERNELS = {
    "gpu": {
        "mosaic_gpu": "jaxrl.extras.experts.tokamax:grouped_matmul",
        "triton": "jaxrl.extras.experts.gpu:grouped_matmul",
    },
    "tpu": {"megablox": "jaxrl.extras.experts.tpu:grouped_matmul"},
}
"""Expert kernels by platform, in order of preference."""


def select_kernels(
    name: str,
    mesh: Mesh,
    width: int = 0,
    expert_width: int = 0,
    check_dtype: DTypeLike | None = None,
) -> ExpertKernels:
    """Select the expert kernels for a mesh.

    Args:
        name: Value of `config.model.experts`.
        mesh: Mesh that runs the model.
        width: Width D of the model's hidden states.
        expert_width: Inner width F of an expert.
        check_dtype: Dtype of the self-tests (see `models.kernel_check`); None to skip them.

    Raises:
        ValueError: The devices do not support the kernels, or a self-test fails.
    """
    device = mesh.local_devices[0]  # other processes check their devices
    dtype = None if check_dtype is None else jnp.dtype(check_dtype)
    preferred, reason = resolve_kernel_name(name, device.platform, dtype)
    selected = _select_kernels_cached(name, device, width, expert_width, dtype)
    return ExpertKernels(
        name=selected.name,
        reason=reason if selected.name == preferred else f"where {preferred} failed its check",
        grouped_matmul=selected.function,
        mesh=mesh,
        batch=PIECE_AXES,
        kernel_checks=selected.kernel_checks,
    )


@functools.cache
def _select_kernels_cached(
    name: str, device: jax.Device, width: int, expert_width: int, dtype: Any
) -> SelectedKernel:
    """Select the kernels; the result is cached for all meshes of a process."""
    kernels = KERNELS.get(device.platform, {})
    # A loop of dynamic length would make the host wait for the GPU at every matmul.
    is_gpu = device.platform == "gpu"
    return select_kernel(
        lambda _: (
            [] if dtype is None else [make_grouped_matmul_trial(width, expert_width, dtype, device)]
        ),
        # Import lazily: the kernels of other platforms are not needed.
        {
            kernel: partial(pkgutil.resolve_name, kernels[kernel])
            for kernel in list_candidates(name, kernels, dtype)
        },
        grouped_matmul_static if is_gpu else grouped_matmul,
        config_key="" if name == "auto" else CONFIG_KEY,
    )


def make_grouped_matmul_trial(
    width: int, expert_width: int, dtype: DTypeLike, device: jax.Device
) -> Trial:
    """Build a trial of the grouped matmul, forward and backward, for the startup self-test.

    Rows beyond all groups have unspecified results and are not compared.

    Args:
        width: Width D of the model's hidden states.
        expert_width: Inner width F of an expert.
        dtype: Dtype of the run.
        device: Device that runs the trial.
    """
    rng = np.random.default_rng(0)
    sizes = np.array([130, 0, 7, 61, 256, 1, 0, 33], np.int32)
    num_rows, num_valid = 512, int(sizes.sum())
    rows = rng.normal(size=(num_rows, width)).astype(np.float32)
    weights = rng.normal(size=(len(sizes), width, expert_width)).astype(np.float32)
    gradient = rng.normal(size=(num_rows, expert_width)).astype(np.float32)

    def run_forward_and_backward(
        product: Callable[..., Any], rows: jax.Array, weights: jax.Array, sizes: jax.Array,
        gradient: jax.Array,
    ) -> Sequence[jax.Array]:  # fmt: skip
        out, backward = jax.vjp(lambda rows, weights: product(rows, weights, sizes), rows, weights)
        drows, dweights = backward(gradient.astype(out.dtype))
        return out[:num_valid], drows[:num_valid], dweights

    return Trial(
        operation="expert matmuls",
        names=("outputs", "gradient of rows", "gradient of weights"),
        run=run_forward_and_backward,
        arrays=(rows, weights, sizes, gradient),
        reference=grouped_matmul_static,
        dtype=dtype,
        device=device,
    )


def resolve_kernel_name(
    name: str, platform: str, dtype: DTypeLike | None = None
) -> tuple[str, str]:
    """Resolve `config.model.experts` to a kernel name; also return the reason, to be logged.

    Raises:
        ValueError: The kernels do not support the platform or dtype.
    """
    return kernel_check.resolve_kernel_name(CONFIG_KEY, name, platform, KERNELS, dtype)
