"""Load a policy's initial weights from its model folder."""

from __future__ import annotations

from jaxrl.models.hf_weights import ProgressCallback, load_hf
from jaxrl.models.policy import Model
from jaxrl.types import Params


def load_frozen_params(
    model: Model, folder: str, architecture: str, progress: ProgressCallback
) -> Params:
    """Load the frozen weights onto the mesh: frozen modules in float32, or an adapter's base.

    See `load_hf` for the arguments. The folder must already be validated.
    """
    if model.architecture.wrapper is not None:
        return model.architecture.wrapper.load_base(folder, model.mesh, progress)
    names = tuple(model.frozen.make_abstract_params())
    if not names:
        return {}
    return load_hf(folder, model.mesh, architecture=architecture, entries=names, progress=progress)


def load_trained_params(
    model: Model,
    folder: str,
    architecture: str,
    progress: ProgressCallback,
    *,
    seed: int,
    is_lazy: bool = False,
) -> Params:
    """Load the initial values of the trainable parameters onto the mesh.

    New adapters are initialized from `seed`. See `load_hf` for the other arguments. The folder must
    already be validated.
    """
    if model.architecture.wrapper is not None:
        return model.architecture.wrapper.load_initial_params(model.mesh, seed)
    names = tuple(model.trained.make_abstract_params())
    return load_hf(
        folder,
        model.mesh,
        architecture=architecture,
        entries=names,
        progress=progress,
        is_lazy=is_lazy,
    )
