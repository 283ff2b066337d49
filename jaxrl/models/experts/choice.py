"""By which products the experts of a run are computed: chosen once, on the host."""

from __future__ import annotations

from jax.sharding import Mesh

from jaxrl.models.experts.dispatch import Experts
from jaxrl.models.experts.products import (
    Product,
    grouped_product,
    grouped_product_of_known_length,
)
from jaxrl.runtime.sharding import PIECES


def choose(name: str, mesh: Mesh) -> Experts:
    """The products that `config.model.experts` names, on a mesh; see `decide`."""
    platform = mesh.devices.flat[0].platform
    name, reason = decide(name, platform)
    product: Product = grouped_product
    if name == "megablox":
        from jaxrl.models.experts import tpu  # of use on TPUs alone

        product = tpu.grouped_product
    elif platform == "gpu":
        # A GPU's host would wait for the devices to learn the length of a loop.
        product = grouped_product_of_known_length
    return Experts(name=name, reason=reason, product=product, mesh=mesh, batch=PIECES)


def decide(name: str, platform: str) -> tuple[str, str]:
    """Which products `config.model.experts` stands for, never `auto`, and why.

    On GPUs that is XLA. `jax.lax.ragged_dot` computes every expert for every token there, and JAX's
    grouped kernels for GPUs are for single generations and without a gradient.

    Raises:
        ValueError: names the key where they do not run on the devices.
    """
    if name == "auto":
        return "megablox" if platform == "tpu" else "xla", f"since the devices are {platform}s"
    if name == "megablox" and platform != "tpu":
        raise ValueError(
            f"config.model.experts is 'megablox', whose kernels are for tpus, but the devices are "
            f"{platform}s; set it to 'auto' or 'xla'."
        )
    return name, "as config.model.experts says"
