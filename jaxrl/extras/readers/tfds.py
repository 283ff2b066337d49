"""Reader for TFDS datasets in array_record format, without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl.data.readers.base import Reader, Record, shorten_error, to_record
from jaxrl.utils.json_io import parse_json, read_object


def open_tfds(source: str, split: str, config_key: str) -> Reader:
    """Return a reader for one split of a TFDS dataset.

    Empty strings and lists count as missing, since TFDS has no null values. `metadata` may be a
    string that contains a JSON object.

    Args:
        source: Folder of one version of the dataset.
        split: Name of a split, or a slice such as `train[:90%]`.
        config_key: Config key that holds the folder, for error messages.

    Raises:
        ValueError: The folder is not a dataset in this format, is damaged, lacks the split, or has
            images or audio.
    """
    folder = Path(source)
    file = folder / "dataset_info.json"
    if not file.is_file():
        raise ValueError(
            f"{str(folder)!r} has no dataset_info.json; set {config_key} to a JSONL file, or to "
            "the folder of one version of a TFDS dataset, such as data/tfds/bridges/1.0.0."
        )
    # Old datasets lack this field; their format is TFRecord.
    file_format = read_object(file).get("fileFormat", "tfrecord")
    if file_format != "array_record":
        raise ValueError(
            f"{folder} holds {file_format} files, for which TFDS would need TensorFlow or lose "
            "examples; prepare it again with file_format='array_record'."
        )
    import tensorflow_datasets  # imported late, since it takes a second

    try:
        builder = tensorflow_datasets.builder_from_directory(folder)
    except Exception as error:  # several libraries raise various types
        raise ValueError(f"{folder} cannot be read: {shorten_error(error)}.") from error
    # TFDS would decode images of any size and any format that Pillow reads.
    if decoded := list(_find_decoded_features(builder.info.features, tensorflow_datasets.features)):
        raise ValueError(
            f"{folder} has images or sound in {decoded[0]!r}, which are not read from TFDS; write "
            f"its examples as Parquet, with images as bytes, and name that file in {config_key}."
        )
    try:
        is_empty = not builder.info.splits[split].num_examples
        examples: Any = () if is_empty else builder.as_data_source(split)
    except (KeyError, ValueError, RuntimeError) as error:
        name = config_key.removesuffix(".source") + ".split"
        raise ValueError(f"{name} is {split!r}, of {folder}: {shorten_error(error)}") from error
    return _TfdsReader(examples, folder, split)


def _find_decoded_features(feature: Any, feature_types: Any, name: str = "") -> Iterator[str]:
    """Yield the names of features that TFDS would decode, including nested features."""
    if isinstance(feature, feature_types.FeaturesDict):
        for key, inner in feature.items():
            yield from _find_decoded_features(
                inner, feature_types, f"{name}{'/' if name else ''}{key}"
            )
    elif isinstance(feature, feature_types.Sequence | feature_types.Dataset):
        yield from _find_decoded_features(feature.feature, feature_types, name)
    elif isinstance(feature, feature_types.Image | feature_types.Audio):
        yield name


class _TfdsReader(Reader):
    """Reader for the examples in one split."""

    def __init__(self, examples: Any, folder: Path, split: str):
        self._examples, self._folder, self._split = examples, folder, split

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, indices: Sequence[int]) -> list[Record]:
        try:
            examples = self._examples.__getitems__(list(indices))
        except RuntimeError as error:
            raise ValueError(f"{self._folder} cannot be read: {shorten_error(error)}.") from error
        records = []
        for example, index in zip(examples, indices, strict=True):
            location = self.location(index)
            plain = to_record(example, location)
            fields = {name: value for name, value in plain.items() if value not in ("", [])}
            messages, metadata = fields.get("messages"), fields.get("metadata")
            if isinstance(messages, dict):  # TFDS returns a list of dicts as a dict of lists
                rows = zip(*messages.values(), strict=True)
                fields["messages"] = [dict(zip(messages, row, strict=True)) for row in rows]
                if not fields["messages"]:
                    del fields["messages"]
            if isinstance(metadata, str):
                fields["metadata"] = parse_json(metadata, f"{location}: 'metadata'")
            records.append(fields)
        return records

    def location(self, index: int) -> str:
        return f"{self._folder} [{self._split}]:{index + 1}"
