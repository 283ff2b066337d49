r"""Convert JSONL tasks to a TFDS dataset, whose folder a run can read.

python -m examples.tfds_tasks --out=data/tfds --name=bridges --version=1.0.0 \
    train=my_data/train.jsonl test=my_data/test.jsonl
python -m jaxrl.launch --config=my_run.py --workdir=runs/my_run \
    --config.tasks.train.source=data/tfds/bridges/1.0.0 \
    --config.tasks.eval.source=data/tfds/bridges/1.0.0

Each `split=file` is validated like the tasks of a run and written as array_record, the format that
TFDS reads without TensorFlow. Tasks keep their order. `metadata` is stored as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from jaxrl.data.tasks import read_tasks
from jaxrl.envs.base import Task


def make_task_features() -> dict[str, Any]:
    """Return the TFDS features of a task. Missing fields are empty texts and lists."""
    text = tfds.features.Text
    return {
        "id": text(),
        "question": text(),
        "messages": tfds.features.Sequence({"role": text(), "content": text()}),
        "answers": tfds.features.Sequence(text()),
        "data_source": text(),
        "metadata": text(),
    }


def make_example(task: Task) -> dict[str, Any]:
    """Convert a task to an example with these features."""
    return {
        "id": task.id,
        "question": task.question or "",
        "messages": list(task.messages or ()),
        "answers": list(task.answers),
        "data_source": task.data_source,
        "metadata": json.dumps(dict(task.metadata)) if task.metadata else "",
    }


def write_dataset(
    out: str | Path,
    name: str,
    version: str,
    info: Mapping[str, Any],
    splits: Mapping[str, Iterable[dict[str, Any]]],
) -> Path:
    """Write a dataset; return its folder, `out/name/version`."""

    class TaskBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        # Not named `Builder`: TFDS would derive the name from the package, and a script has none.
        VERSION = tfds.core.Version(version)
        # No checksums of downloads: to find them, TFDS needs importlib_resources, which it does
        # not declare as a dependency.
        code_path = None

        def _info(self) -> tfds.core.DatasetInfo:
            features_dict = tfds.features.FeaturesDict(dict(info))
            return tfds.core.DatasetInfo(
                builder=self, features=features_dict, disable_shuffling=True
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, Any]]]:
            return {split: self._generate_examples(rows) for split, rows in splits.items()}

        def _generate_examples(self, rows: Iterable[Any]) -> Iterator[tuple[int, Any]]:
            yield from enumerate(rows)

    TaskBuilder.name = name
    # Without TensorFlow, only array_record supports both writing and reading.
    builder = TaskBuilder(data_dir=str(out), file_format="array_record")
    builder.download_and_prepare()
    return Path(str(builder.data_path))


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the files given on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder of all data sets")
    parser.add_argument("--name", required=True, help="name of the data set, in snake case")
    parser.add_argument(
        "--version", default="1.0.0", help="version of the data set (default: 1.0.0)"
    )
    parser.add_argument("files", nargs="+", metavar="split=file.jsonl")
    settings = parser.parse_args(argv)
    if not all("=" in file for file in settings.files):
        parser.error("expected files as split=file.jsonl, such as train=my_data/train.jsonl")
    files = dict(file.split("=", maxsplit=1) for file in settings.files)
    try:
        splits = {
            split: [make_example(task) for task in read_tasks(file, f"{split}=")]
            for split, file in files.items()
        }
        tfds.disable_progress_bar()
        folder = write_dataset(
            settings.out, settings.name, settings.version, make_task_features(), splits
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    counts = ", ".join(f"{len(rows):,} in {split}" for split, rows in splits.items())
    print(f"{folder}: {counts}")


if __name__ == "__main__":
    main()
