"""Small vision models from `golden/`, and their full pass over rows of complete sequences."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxrl.extras.vision.processor import Image
from jaxrl.models.attachments import POSITIONS, UNITS
from jaxrl.models.attention.reference import XLA
from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.hf_weights import load_hf
from jaxrl.models.layers import LayerScan
from jaxrl.models.recurrence import make_recurrence
from jaxrl.models.registry import read_architecture

FOLDERS = Path(__file__).parent / "golden"
NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl")


@cache
def golden(name="qwen2_5_vl"):
    """Return a model, its parameters, the outputs of the reference, and the images."""
    wanted = dict(np.load(FOLDERS / name / "golden.npz"))
    grids = [tuple(map(int, grid)) for grid in wanted["grids"]]
    cuts = np.cumsum([h * w for _, h, w in grids])[:-1]
    patches = np.split(wanted["patches"], cuts)
    images = [Image(patches=x, grid=grid) for x, grid in zip(patches, grids, strict=True)]
    return read_architecture(FOLDERS / name), load_hf(FOLDERS / name), wanted, images


def aux_arrays_of(config, rows, images_of_rows, *, num_patches=None):
    """Return the auxiliary arrays of rows, each on a separate device."""
    collated = [config.tower.collate(images) for images in images_of_rows]
    P = num_patches or max(4, *(len(image.patches) for image in collated))
    T = len(rows[0])
    patches = np.zeros((len(rows), P, config.tower.num_values_per_patch), np.float32)
    coords = np.zeros((len(rows), P, 4), np.int32)
    positions, of_units = np.zeros((len(rows), T, 3), np.int32), np.full((len(rows), T), -1)
    for index, (ids, images, row) in enumerate(zip(rows, images_of_rows, collated, strict=True)):
        patches[index, : len(row.patches)] = row.patches
        coords[index, : len(row.coords)] = row.coords
        positions[index] = config.tower.compute_positions(ids, images)
        for run, units in zip(
            config.tower.find_attachment_tokens(ids, images), row.units, strict=True
        ):
            of_units[index, run] = units
    return AuxArrays(
        inputs={
            POSITIONS: jnp.asarray(positions.reshape(-1, 3)),
            UNITS: jnp.asarray(of_units.reshape(-1), jnp.int32),
        },
        attached={"patches": jnp.asarray(patches), "coords": jnp.asarray(coords)},
    )


def logits_of(config, params, rows, images_of_rows, *, layer_scan=LayerScan(), **settings):
    token_ids = jnp.asarray(np.stack(rows))
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    specs, starts = config.state_specs, jnp.zeros_like(token_ids)
    run_recurrence = make_recurrence(specs, starts) if specs else None
    hidden = config.compute_hidden_states(
        params,
        token_ids,
        positions,
        XLA.make_attend(jnp.ones_like(token_ids), positions),
        replace(
            layer_scan,
            aux=aux_arrays_of(config, rows, images_of_rows, **settings),
            run_recurrence=run_recurrence,
        ),
    )
    return config.unembed(params, hidden, num_tokens=config.vocab_size)
