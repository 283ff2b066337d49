"""Loading of a policy's initial weights from its model folder."""

from __future__ import annotations

from jaxrl.models.hf_weights import Progress, load_hf
from jaxrl.models.policy import Model
from jaxrl.types import Params


def load_base(model: Model, folder: str, architecture: str, progress: Progress) -> Params:
    """Load the frozen weights onto the mesh: frozen entries in float32, or an adapter's base.

    The arguments are those of `load_hf`. The folder must be validated.
    """
    if model.architecture.wrapper is not None:
        return model.architecture.wrapper.load_base(folder, model.mesh, progress)
    names = tuple(model.frozen.abstract_params())
    if not names:
        return {}
    return load_hf(folder, model.mesh, architecture=architecture, entries=names, progress=progress)


def load_trained(
    model: Model,
    folder: str,
    architecture: str,
    progress: Progress,
    *,
    seed: int,
    is_late: bool = False,
) -> Params:
    """Load the initial trained parameters onto the mesh.

    An adapter's parameters are initialized from `seed`. The other arguments are those of `load_hf`.
    The folder must be validated.
    """
    if model.architecture.wrapper is not None:
        return model.architecture.wrapper.begin(model.mesh, seed)
    names = tuple(model.trained.abstract_params())
    return load_hf(
        folder,
        model.mesh,
        architecture=architecture,
        entries=names,
        progress=progress,
        is_late=is_late,
    )
