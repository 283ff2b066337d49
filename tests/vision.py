"""The small vision models of `golden/`, and their full pass over rows of whole sequences."""

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
from jaxrl.models.registry import read_model

FOLDERS = Path(__file__).parent / "golden"
NAMES = ("qwen2_5_vl", "qwen3_vl")


@cache
def golden(name="qwen2_5_vl"):
    """A model, its parameters, what the reference computes, and the images."""
    wanted = dict(np.load(FOLDERS / name / "golden.npz"))
    grids = [tuple(map(int, grid)) for grid in wanted["grids"]]
    cuts = np.cumsum([h * w for _, h, w in grids])[:-1]
    patches = np.split(wanted["patches"], cuts)
    images = [Image(patches=x, grid=grid) for x, grid in zip(patches, grids, strict=True)]
    return read_model(FOLDERS / name), load_hf(FOLDERS / name), wanted, images


def beside_rows(config, rows, images_of_rows, *, num_patches=None):
    """What goes with rows of whole sequences, each on a device of its own."""
    arranged = [config.tower.arrange(images) for images in images_of_rows]
    P = num_patches or max(4, *(len(one.patches) for one in arranged))
    T = len(rows[0])
    patches = np.zeros((len(rows), P, config.tower.patch_values), np.float32)
    places = np.zeros((len(rows), P, 4), np.int32)
    positions, of_units = np.zeros((len(rows), T, 3), np.int32), np.full((len(rows), T), -1)
    for index, (ids, images, one) in enumerate(zip(rows, images_of_rows, arranged, strict=True)):
        patches[index, : len(one.patches)] = one.patches
        places[index, : len(one.places)] = one.places
        positions[index] = config.tower.positions(ids, images)
        for run, units in zip(config.tower.runs(ids, images), one.units, strict=True):
            of_units[index, run] = units
    return AuxArrays(
        given={
            POSITIONS: jnp.asarray(positions.reshape(-1, 3)),
            UNITS: jnp.asarray(of_units.reshape(-1), jnp.int32),
        },
        attached={"patches": jnp.asarray(patches), "places": jnp.asarray(places)},
    )


def logits_of(config, params, rows, images_of_rows, *, through=LayerScan(), **settings):
    token_ids = jnp.asarray(np.stack(rows))
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    hidden = config.hidden_states(
        params,
        token_ids,
        positions,
        XLA.within(jnp.ones_like(token_ids), positions),
        replace(through, beside=beside_rows(config, rows, images_of_rows, **settings)),
    )
    return config.unembed(params, hidden, num_tokens=config.vocab_size)
