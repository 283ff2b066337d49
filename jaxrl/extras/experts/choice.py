"""Choice of the products that compute the experts of a run: made once, on the host."""

from __future__ import annotations

import importlib

from jax.sharding import Mesh

from jaxrl.extras.experts.dispatch import Experts
from jaxrl.extras.experts.products import (
    Product,
    grouped_product,
    grouped_product_of_known_length,
)
from jaxrl.runtime.sharding import PIECES

PLATFORMS = {"triton": "gpu", "megablox": "tpu"}
"""Platforms of the kernels that do not run everywhere."""


KERNELS = {
    "triton": "jaxrl.extras.experts.gpu",
    "megablox": "jaxrl.extras.experts.tpu",
}
"""The modules that have them."""


def choose(name: str, mesh: Mesh) -> Experts:
    """The products that `config.model.experts` names, on a mesh; see `decide`."""
    platform = mesh.devices.flat[0].platform
    name, reason = decide(name, platform)
    return Experts(
        name=name, reason=reason, product=_product(name, platform), mesh=mesh, batch=PIECES
    )


def decide(name: str, platform: str) -> tuple[str, str]:
    """Picks the products `config.model.experts` stands for, never `auto`, and tells why.

    Raises:
        ValueError: names the key where they do not run on the devices.
    """
    if name == "auto":
        own = [one for one, place in PLATFORMS.items() if place == platform]
        return (*own, "xla")[0], f"since the devices are {platform}s"
    place = PLATFORMS.get(name, platform)
    if place != platform:
        raise ValueError(
            f"config.model.experts is {name!r}, whose kernels are for {place}s, but the devices "
            f"are {platform}s; set it to 'auto' or 'xla'."
        )
    return name, "as config.model.experts says"


def _product(name: str, platform: str) -> Product:
    if name in KERNELS:
        # Imported when asked: those of other platforms are of no use to a process.
        kernel: Product = importlib.import_module(KERNELS[name]).grouped_product
        return kernel
    # A GPU's host would wait for the devices to learn the length of a loop.
    return grouped_product_of_known_length if platform == "gpu" else grouped_product
