"""Estimate the device memory of dense retrieval."""

from __future__ import annotations

import functools
from pathlib import Path

from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.extras.dense.encoders import estimate_encoder_bytes, read_encoder
from jaxrl.extras.dense.passages import count_device_bytes


def count_search_bytes(
    config: ResolvedConfig, num_passages: int, num_local: int, platform: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the permanent and temporary memory that search needs on a device, in bytes.

    Both dicts are empty if the run does not use dense retrieval, or searches on the CPU.

    Args:
        config: Config of the run.
        num_passages: Number of passages in the corpus; 0 to count the lines of the file.
        num_local: Number of devices per process, over which passages are sharded.
        platform: Platform of the devices: cpu, gpu or tpu.

    Raises:
        FileNotFoundError: The encoder is missing, or the corpus is missing and its passages must be
            counted.
        ValueError: The encoder is not supported.
    """
    dense = config.search.dense
    if config.corpus_section != "dense" or dense.devices == "cpu":
        return {}, {}
    model, corpus = read_encoder(dense.encoder), Path(dense.corpus)
    if not num_passages:
        if not corpus.is_file():
            raise FileNotFoundError(
                f"config.search.dense.corpus is {str(corpus)!r}, which does not exist, so "
                "passages cannot be counted. Set --plan_passages to their number."
            )
        stat = corpus.stat()
        num_passages = _count_lines(corpus, stat.st_size, stat.st_mtime_ns)
    sizes = count_device_bytes(
        num_passages,
        model.width,
        dense.dtype,
        num_local,
        platform=platform,
        candidates=dense.candidates,
        query_rows=dense.query_rows,
    )
    weights, activations = estimate_encoder_bytes(
        model, dense.encoder_dtype, dense.query_batch_tokens
    )
    resident = {"search index": sizes["passages"], "search encoder": weights}
    return resident, {"searching": sizes["search"] + activations}


@functools.lru_cache(maxsize=8)
def _count_lines(corpus: Path, size: int, mtime_ns: int) -> int:
    with open(corpus, "rb") as lines:
        return max(sum(1 for line in lines if line.strip()), 1)
