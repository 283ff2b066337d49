"""The weights that a policy begins with, from the folder of its model."""

from __future__ import annotations

from jaxrl.models.hf_weights import Progress, load_hf
from jaxrl.models.policy import Model
from jaxrl.types import Params


def load_base(model: Model, folder: str, architecture: str, progress: Progress) -> Params:
    """Loads what is not trained onto the mesh: frozen entries in float32, or an adapter's base.

    Args:
        model: the policy.
        folder: of the model, that was checked.
        architecture: as of `read_model`.
        progress: told how many MiB or layers are read, of how many.
    """
    if model.architecture.around is not None:
        return model.architecture.around.load_base(folder, model.mesh, progress)
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
    """Loads or makes what is trained, as a run begins with it, on the mesh.

    Args:
        model: the policy.
        folder: of the model, that was checked.
        architecture: as of `read_model`.
        progress: told how many MiB are read, of how many.
        seed: of parameters that the folder does not have.
        is_late: parameters of the folder stay on disk until they are wanted; see `load_hf`.
    """
    if model.architecture.around is not None:
        return model.architecture.around.begin(model.mesh, seed)
    return load_hf(
        folder,
        model.mesh,
        architecture=architecture,
        entries=tuple(model.trained.abstract_params()),
        progress=progress,
        is_late=is_late,
    )
