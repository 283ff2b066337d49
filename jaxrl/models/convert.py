"""Hugging Face folders to checkpoints and back: a command.

    python -m jaxrl.models.convert import HF_FOLDER CHECKPOINT
    python -m jaxrl.models.convert export CHECKPOINT HF_FOLDER

The checkpoint of these commands is a folder with the parameters, float32, as an Orbax item
`params`, and `source/`: the HF folder's small files and the dtype of each of its tensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from jaxrl.models.hf_weights import (
    DTYPES_FILE,
    Log,
    copy_side_files,
    load_hf,
    save_hf,
    tensor_dtypes,
    write_json,
)
from jaxrl.models.registry import read_model
from jaxrl.runtime import sharding
from jaxrl.utils.files import folder_taking_place


def import_checkpoint(
    source: str | Path, path: str | Path, architecture: str = "", *, log: Log = lambda _: None
) -> None:
    """HF folder to checkpoint, over all devices; `log` gets the warnings of `load_hf`."""
    source = Path(source)
    mesh = sharding.make_mesh(data=1, fsdp=-1, tensor=1)
    params = load_hf(source, mesh, architecture=architecture, log=log)
    dtypes = tensor_dtypes(source, read_model(source, architecture))
    with folder_taking_place(Path(path), marker=f"source/{DTYPES_FILE}") as folder:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "params", params)
        (folder / "source").mkdir()
        copy_side_files(source, folder / "source")
        write_json(folder / "source" / DTYPES_FILE, dtypes)


def export_checkpoint(
    checkpoint: str | Path,
    path: str | Path,
    architecture: str = "",
    *,
    max_shard_size: int = 5 * 10**9,
) -> None:
    """Checkpoint of `import_checkpoint` to HF folder, over all devices."""
    source = Path(checkpoint) / "source"
    if not (source / DTYPES_FILE).is_file():
        raise FileNotFoundError(
            f"{str(checkpoint)!r} holds no source/{DTYPES_FILE}; expected a folder written by "
            "`python -m jaxrl.models.convert import`."
        )
    config = read_model(source, architecture)
    mesh = sharding.make_mesh(data=1, fsdp=-1, tensor=1)
    target = jax.tree.map(
        lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
        config.abstract_params(),
        sharding.param_shardings(mesh, config),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(Path(checkpoint).absolute() / "params", target)
    save_hf(params, config, path, source=source, max_shard_size=max_shard_size)


def main(arguments: list[str] | None = None) -> None:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl.models.convert")
    commands = parser.add_subparsers(dest="command", required=True)
    importer = commands.add_parser("import", help="HF folder to checkpoint")
    exporter = commands.add_parser("export", help="checkpoint to HF folder")
    for command in (importer, exporter):
        command.add_argument("source", metavar="SRC")
        command.add_argument("path", metavar="DST")
        command.add_argument("--architecture", default="", help="default: by config.json")
    exporter.add_argument(
        "--max_shard_size", type=int, default=5 * 10**9, metavar="BYTES", help="of each file"
    )
    options = parser.parse_args(arguments)
    where = (options.source, options.path, options.architecture)
    try:
        if options.command == "import":
            import_checkpoint(*where, log=print)
        else:
            export_checkpoint(*where, max_shard_size=options.max_shard_size)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{parser.prog}: {error}") from error


if __name__ == "__main__":
    main()
