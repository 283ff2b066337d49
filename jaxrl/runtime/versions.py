"""Records of a run's origin: versions, devices, the code's commit, the model's size, its data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pkgutil
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import jaxrl
from jaxrl.builders.resolved import CORPORA, ResolvedConfig
from jaxrl.config.keys import CORPUS, MODEL
from jaxrl.config.schema import KEYS, flatten
from jaxrl.data.tasks import task_files
from jaxrl.envs.search.corpus import corpus_digest, index_folder
from jaxrl.models.architecture import Verdict
from jaxrl.models.hf_weights import INDEX_FILE, SIDE_FILES
from jaxrl.runtime.distributed import gather
from jaxrl.training.run_state import OF_CODE, Components
from jaxrl.utils.callables import code_folders, is_dotted
from jaxrl.utils.files import set_aside, written_whole
from jaxrl.utils.json_io import parse_json

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def write_environment(
    path: Path, step: int, components: Components, log: Callable[[str], None] = print
) -> None:
    """Adds this start of the run, after global step `step`, to its `environment.json`.

    A file that cannot be read is kept beside the new one, and told.
    """
    starts = []
    try:
        starts = parse_json(path.read_bytes(), str(path))
        if not (isinstance(starts, list) and all(isinstance(start, dict) for start in starts)):
            raise ValueError("no list of starts")
    except FileNotFoundError:
        if step > 0:
            log(f"warning: {path} is missing: what earlier starts ran on is lost")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        log(
            f"warning: {path} cannot be read ({reason}); kept as {set_aside(path).name}, and begun "
            "anew"
        )
        starts = []
    starts = [*starts, {"step": step, **environment(components)}]
    with written_whole(path) as file:
        file.write(json.dumps(starts, indent=1, ensure_ascii=False) + "\n")


def environment(components: Components) -> dict[str, Any]:
    """Versions, devices and data of this process."""
    device = jax.devices()[0]
    sizes: dict[str, Any] = {"external": components.external}
    if not components.external:
        model = components.model.architecture.plain
        shapes = jax.tree.leaves(model.abstract_params())
        sizes = {
            "layers": model.num_layers,
            "width": model.width,
            "parameters": sum(math.prod(leaf.shape) for leaf in shapes),
        }
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "jaxrl": jaxrl.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "commit": commit(Path(jaxrl.__file__).parent),
        "folder": str(Path.cwd()),
        "code_folders": code_folders(),
        "machine": {
            "system": platform.platform(),
            "device_kind": device.device_kind,
            "num_devices": jax.device_count(),
            "num_processes": jax.process_count(),
        },
        "model": sizes,
        **({"prompt_time": components.prompt_time} if components.prompt_time else {}),
        "kernels": [dataclasses.asdict(one) for one in verdicts_of(components)],
        "num_tasks": len(components.tasks),
        "num_eval_tasks": len(components.eval_tasks),
        "num_demonstrations": len(components.demonstrations),
    }


def verdicts_of(components: Components) -> tuple[Verdict, ...]:
    """Findings about kernels before the run: those of attention, then the architecture's."""
    if components.external:
        return ()
    return *components.model.attention.verdicts, *components.model.architecture.verdicts


def commit(folder: Path) -> str | None:
    """The git commit of the code in `folder`, with a + where files differ from it.

    None where git does not know these files, even if the folder lies inside another repository.
    """
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
        return _git(folder, "rev-parse", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def fingerprints(config: ResolvedConfig) -> dict[str, str]:
    """Hashes the files that the configured stages read, by key of the configuration.

    Files of code that dotted names stand for are among them, as `advantage.name's file`.

    Two files with one fingerprint are the same: where they lie, what they are called there and
    when they changed does not matter. A name is a key (`tasks.train.source`), for the model one
    a file (`model.path/config.json`). Files that are missing are left out.

    Data, corpus and the model's small files are hashed whole. Of weights, which may have hundreds
    of gigabytes, the hash covers the size, the header with all names and shapes, and
    `WEIGHT_SAMPLES` blocks spread evenly; trained weights differ from others in nearly all blocks.
    """
    digests = _model_digests("model.path", Path(config.model.path))
    flat = flatten(config)
    for key, entry in KEYS.items():
        if entry.file and flat.get(key) and (file := Path(flat[key]) / entry.file).is_file():
            digests[f"{key}/{entry.file}"] = _digest(file)
    demonstrations = Path(config.sft.source)
    if "sft" in config.stages and demonstrations.exists():
        digests["sft.source"] = _data_digest(demonstrations)
    # The tasks that the configured stages read.
    readers = {"train": {"train"}, "eval": {"train", "evaluate"}}
    kinds = [kind for kind, stages in readers.items() if stages & set(config.stages)]
    for kind in kinds:
        for key, (files, extra) in task_files(config.task_sources[kind]).items():
            # Of a single path its own digest, which the same data has wherever it is named.
            parts = [*map(_data_digest, files), *([extra] if extra else [])]
            is_single = len(files) == 1 and not extra
            whole = "\n".join(parts).encode()
            digests[key] = parts[0] if is_single else hashlib.sha256(whole).hexdigest()
    if config.corpus_section:
        digests |= search_fingerprints(config)
    # The files that dotted names stand for; what these import is not seen.
    names = {key: flat[key] for key, entry in KEYS.items() if entry.names_code}
    names |= {f"env.search.tools.{name}": name for name in config.env.search.tools}
    names |= {f"reward.weights.{name}": name for name in config.reward.weights}
    for kind in kinds:
        names |= {f"{s.key}.format": s.format for s in config.task_sources[kind]}
    for key, name in names.items():
        if is_dotted(name):
            function = pkgutil.resolve_name(name)
            module = getattr(function, "__module__", "") or name.rpartition(".")[0]
            if path := getattr(sys.modules.get(module), "__file__", None):
                digests[f"{key}{OF_CODE}"] = _digest(Path(path))
    return dict(sorted(digests.items()))


def search_fingerprints(config: ResolvedConfig) -> dict[str, str]:
    """Hashes the files that the configured engine searches, as `fingerprints` has them."""
    section = CORPORA.get(config.search.engine, "")
    if not section:
        return {}
    settings, digests = config.search[section], dict[str, str]()
    folder = index_folder(Path(settings.corpus), settings.index)
    for name, value in settings.items():
        key = f"search.{section}.{name}"
        if KEYS[key].holds == MODEL:
            digests |= _model_digests(key, Path(value))
        elif KEYS[key].holds == CORPUS and Path(value).is_file():
            digests[key] = corpus_digest(Path(value), folder)
    return digests


def _model_digests(key: str, model: Path) -> dict[str, str]:
    """Hashes the files of a model's folder, which a key names."""
    files = [path for pattern in (*SIDE_FILES, INDEX_FILE) for path in model.glob(pattern)]
    digests = {
        f"{key}/{path.relative_to(model).as_posix()}": _digest(path)
        for path in files
        if path.is_file()
    }
    for path in model.glob("*.safetensors"):
        # Before the tensors stand a length of 8 bytes and so much JSON.
        with path.open("rb") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
        digests[f"{key}/{path.name}"] = sampled_digest(path, header=header)
    return digests


def check_alike(config: ResolvedConfig, workdir: Path, contents: Mapping[str, str]) -> None:
    """Refuses processes of one job that would train on different things; all of them call this.

    Args:
        config: what this process was started with.
        workdir: where this process writes.
        contents: this process's `fingerprints`.

    Raises:
        ValueError: names what differs, in all processes alike.
    """
    settings = {f"config.{key}": repr(value) for key, value in flatten(config).items()}
    settings["--workdir"] = repr(str(workdir.resolve()))
    for engine in ("local", "dense"):  # made of the corpus, each host may have its own
        settings.pop(f"config.search.{engine}.index", None)
    differing = differences(gather([settings, {f"config.{k}": v for k, v in contents.items()}]))
    if differing:
        rest = len(differing) - MAX_DIFFERENCES
        more = f"; and {rest} more" if rest > 0 else ""
        raise ValueError(
            f"the processes of the job are not alike: {'; '.join(differing[:MAX_DIFFERENCES])}"
            f"{more}. Start all of them with the same command and the same files."
        )


MAX_DIFFERENCES = 10  # that a message names


def differences(everyone: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
    """Names the settings and files in which processes differ from the first one.

    Args:
        everyone: of each process its settings, and the contents of files that settings name. Of
            such a setting the content counts: hosts may keep their files in different places.
    """
    differing = []
    of_files = [f"{name}/" for _, contents in everyone for name in contents]
    for is_content in (False, True):
        every = [one[is_content] for one in everyone]
        for name in dict.fromkeys(name for one in every for name in one):
            values = [one.get(name) for one in every]
            other = next((i for i, value in enumerate(values) if value != values[0]), None)
            is_path = not is_content and any(of.startswith(f"{name}/") for of in of_files)
            if other is None or is_path:
                continue
            if is_content:
                lacking = [i for i in (0, other) if values[i] is None]
                where = f"is missing in process {lacking[0]}" if lacking else "differs"
                where += f" between the processes 0 and {other}" * (not lacking)
                differing.append(f"the content of {name} {where}")
            else:
                both = (f"{values[i]!s:.80} in process {i}" for i in (0, other))
                differing.append(f"{name} is {' and '.join(both)}")
    return differing


WEIGHT_SAMPLES, _SAMPLE_BYTES = 256, 4096

_LONGEST_HEADER = 100_000_000  # bytes; safetensors refuses a longer one


def _data_digest(path: Path) -> str:
    """SHA-256 of a file, or of all files of a folder with their names."""
    if path.is_file():
        return _digest(path)
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(path)}\0{_digest(file)}\n".encode(errors="replace"))
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_digest(path: Path, *, header: int) -> str:
    """SHA-256 of a large file's size, its first `header` bytes and some of its blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(str(size).encode())
        for start, length in _weight_blocks(size, header=header):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def _weight_blocks(size: int, *, header: int) -> Iterator[tuple[int, int]]:
    """Start and length of what is hashed: the header, then blocks up to the end of the file."""
    header = min(header, size, _LONGEST_HEADER)
    yield 0, header
    rest = size - header
    if rest <= WEIGHT_SAMPLES * _SAMPLE_BYTES:
        yield header, rest
        return
    for index in range(WEIGHT_SAMPLES):
        last = rest - _SAMPLE_BYTES
        yield header + last * index // (WEIGHT_SAMPLES - 1), _SAMPLE_BYTES
