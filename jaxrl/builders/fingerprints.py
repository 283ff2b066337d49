"""Content hashes of the files that a configuration refers to."""

from __future__ import annotations

import hashlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxrl.builders.resolved import CORPUS_SECTIONS, ResolvedConfig
from jaxrl.config.environments import (
    expand_environments,
    is_environment_key,
    split_environment_key,
)
from jaxrl.config.keys import CORPUS, FILE, MODEL
from jaxrl.config.schema import KEYS, flatten_config
from jaxrl.data.tasks import list_task_files
from jaxrl.envs.search.corpus import compute_corpus_digest, get_index_folder
from jaxrl.models.hf_weights import INDEX_FILE, SIDE_FILES
from jaxrl.runtime.distributed import gather
from jaxrl.training.run_state import USER_CODE_SUFFIX
from jaxrl.utils.callables import is_dotted_path
from jaxrl.utils.files import hash_file

MAX_DIFFERENCES = 10  # maximum number of differences listed in a message

NUM_WEIGHT_SAMPLES, _SAMPLE_BYTES = 256, 4096

_MAX_HEADER_BYTES = 100_000_000  # bytes; the limit of safetensors


def compute_fingerprints(config: ResolvedConfig) -> dict[str, str]:
    """Hash the content of the files that the configured stages read.

    The result maps config keys (`tasks.train.source`) to hashes. For a model file, the key is
    followed by the file name (`model.path/config.json`); for user code, by a suffix
    (`advantage.name's file`). A file's path does not affect its hash. Missing files are skipped.

    Data, the corpus and small model files are hashed completely. Weights may take hundreds of
    gigabytes, so their hash covers only the size, the header with all names and shapes, and
    `NUM_WEIGHT_SAMPLES` evenly spaced blocks. Training changes nearly all of these blocks.
    """
    digests = _hash_model_files("model.path", Path(config.model.path))
    flat = flatten_config(config)
    for key, entry in KEYS.items():
        if entry.file and flat.get(key) and (file := Path(flat[key]) / entry.file).is_file():
            digests[f"{key}/{entry.file}"] = hash_file(file)
    for name, environment in config.environments.items():
        prefix = f"environments.{name}." if name else ""
        digests |= {
            key if key.startswith(prefix) else f"{prefix}{key}": digest
            for key, digest in _hash_environment_files(environment).items()
        }
    # Files with user code, without the modules that they import.
    names = {key: flat[key] for key, entry in KEYS.items() if entry.names_code}
    digests |= _hash_user_code({k: x for k, x in names.items() if not is_environment_key(k)})
    return dict(sorted(digests.items()))


def _hash_environment_files(config: ResolvedConfig) -> dict[str, str]:
    """Hash the files of one environment: tasks, demonstrations, prompt, corpus, user code."""
    digests, flat = dict[str, str](), flatten_config(config)
    demonstrations = Path(config.sft.source)
    if "sft" in config.stages and demonstrations.exists():
        digests["sft.source"] = _hash_data(demonstrations)
    if (template := Path(config.prompt.template_file)).is_file():
        digests["prompt.template_file"] = hash_file(template)
    # The tasks that the configured stages read.
    readers = {"train": {"train"}, "eval": {"train", "evaluate"}}
    kinds = [kind for kind, stages in readers.items() if stages & set(config.stages)]
    for kind in kinds:
        for key, (files, extra) in list_task_files(config.task_sources[kind]).items():
            # A single path keeps its plain digest, which does not depend on the config.
            parts = [*map(_hash_data, files), *([extra] if extra else [])]
            is_single = len(files) == 1 and not extra
            joined = "\n".join(parts).encode()
            digests[key] = parts[0] if is_single else hashlib.sha256(joined).hexdigest()
    if config.needs_live_engine:
        digests |= compute_search_fingerprints(config)
    code_keys = [key for key, entry in KEYS.items() if entry.names_code and is_environment_key(key)]
    names = {key: flat[key] for key in code_keys}
    names |= {f"env.search.tools.{name}": name for name in config.env.search.tools}
    names |= {f"reward.weights.{name}": name for name in config.reward.weights}
    for kind in kinds:
        names |= {f"{s.key}.format": s.format for s in config.task_sources[kind]}
    return digests | _hash_user_code(names)


def _hash_user_code(names: Mapping[str, str]) -> dict[str, str]:
    """Hash the files that define user code.

    Args:
        names: Dotted name of the code, by config key.
    """
    digests = {}
    for key, name in names.items():
        if is_dotted_path(name):
            function = pkgutil.resolve_name(name)
            module = getattr(function, "__module__", "") or name.rpartition(".")[0]
            if path := getattr(sys.modules.get(module), "__file__", None):
                digests[f"{key}{USER_CODE_SUFFIX}"] = hash_file(Path(path))
    return digests


def compute_search_fingerprints(config: ResolvedConfig) -> dict[str, str]:
    """Hash the files of the search engine; see `compute_fingerprints`."""
    section = CORPUS_SECTIONS.get(config.search.engine, config.search.engine)
    settings, digests = config.search.get(section, {}), dict[str, str]()
    for name, value in settings.items():
        key = f"search.{section}.{name}"
        if KEYS[key].holds == MODEL:
            digests |= _hash_model_files(key, Path(value))
        elif KEYS[key].holds == CORPUS and Path(value).is_file():
            folder = get_index_folder(Path(value), settings.index)
            digests[key] = compute_corpus_digest(Path(value), folder)
        elif KEYS[key].holds == FILE and Path(value).is_file():
            digests[key] = hash_file(Path(value))
    return digests


def _hash_model_files(key: str, model: Path) -> dict[str, str]:
    """Hash the files of a model folder. Names in the result start with `key`."""
    files = [path for pattern in (*SIDE_FILES, INDEX_FILE) for path in model.glob(pattern)]
    digests = {
        f"{key}/{path.relative_to(model).as_posix()}": hash_file(path)
        for path in files
        if path.is_file()
    }
    for path in model.glob("*.safetensors"):
        # A safetensors file starts with an 8-byte length and that many bytes of JSON.
        with path.open("rb") as file:
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
        digests[f"{key}/{path.name}"] = _hash_weights(path, header_bytes=header_bytes)
    return digests


def check_processes_agree(
    config: ResolvedConfig, workdir: Path, contents: Mapping[str, str]
) -> None:
    """Check that all processes of a job have the same settings and files.

    This is a collective operation: every process must call it.

    Args:
        config: Configuration of this process.
        workdir: Workdir of this process.
        contents: Result of `compute_fingerprints` in this process.

    Raises:
        ValueError: Settings or files differ. Every process raises the same error.
    """
    values = expand_environments(flatten_config(config.recorded_config))
    settings = {f"config.{key}": repr(value) for key, value in values.items()}
    settings["--workdir"] = repr(str(workdir.resolve()))
    for engine in ("local", "dense"):  # hosts may keep their indexes in different folders
        index = f"search.{engine}.index"
        for key in [key for key in values if split_environment_key(key)[1] == index]:
            del settings[f"config.{key}"]
    differences = describe_differences(
        gather([settings, {f"config.{k}": v for k, v in contents.items()}])
    )
    if differences:
        rest = len(differences) - MAX_DIFFERENCES
        more = f"; and {rest} more" if rest > 0 else ""
        raise ValueError(
            f"the processes of the job differ: {'; '.join(differences[:MAX_DIFFERENCES])}"
            f"{more}. Start all of them with the same command and the same files."
        )


def describe_differences(all_processes: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
    """Describe the settings and files that differ between any process and process 0.

    Args:
        all_processes: Settings and fingerprints of each process. A setting that names files is
            compared by content only, because hosts may store files in different folders.
    """
    paths = {name.partition("/")[0] for _, contents in all_processes for name in contents}
    compared = [
        {name: value for name, value in settings.items() if name not in paths}
        | {f"the content of {name}": digest for name, digest in contents.items()}
        for settings, contents in all_processes
    ]
    differences = []
    for name in dict.fromkeys(name for process in compared for name in process):
        values = [process.get(name) for process in compared]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            texts = [f"{values[i]!s:.80} in process {i}" for i in (0, other)]
            differences.append(f"{name} is {' and '.join(texts)}")
    return differences


def _hash_data(path: Path) -> str:
    """Return the SHA-256 of a file, or of a folder's files and their relative paths."""
    if path.is_file():
        return hash_file(path)
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(path)}\0{hash_file(file)}\n".encode(errors="replace"))
    return digest.hexdigest()


def _hash_weights(path: Path, *, header_bytes: int) -> str:
    """Return the SHA-256 of a large file's size, header and sampled blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(str(size).encode())
        for start, length in _iter_weight_blocks(size, header_bytes=header_bytes):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def _iter_weight_blocks(size: int, *, header_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start and length of each block to hash: the header, then evenly spaced samples."""
    header_bytes = min(header_bytes, size, _MAX_HEADER_BYTES)
    yield 0, header_bytes
    rest = size - header_bytes
    if rest <= NUM_WEIGHT_SAMPLES * _SAMPLE_BYTES:
        yield header_bytes, rest
        return
    last = rest - _SAMPLE_BYTES
    for index in range(NUM_WEIGHT_SAMPLES):
        yield header_bytes + last * index // (NUM_WEIGHT_SAMPLES - 1), _SAMPLE_BYTES
