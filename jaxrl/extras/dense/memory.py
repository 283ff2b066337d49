"""Memory of dense retrieval on a device: its passages, its encoder, and a search's arrays."""

from __future__ import annotations

import functools
from pathlib import Path

from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.extras.dense.encoders import encoder_bytes, read_encoder
from jaxrl.extras.dense.passages import device_bytes


def search_bytes(
    config: ResolvedConfig, num_passages: int, num_local: int, platform: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of one device throughout, and those that answering queries adds; none on a CPU's.

    Args:
        config: of the run; both are empty where it searches by no vectors, or on the host's CPU.
        num_passages: of the corpus; 0 counts them in the file.
        num_local: devices of a process, which split the passages.
        platform: of these: cpu, gpu or tpu.

    Raises:
        FileNotFoundError: `num_passages` is 0 and there is no corpus, or there is no encoder.
        ValueError: the encoder is of no known kind.
    """
    dense = config.search.dense
    if config.corpus_section != "dense" or dense.devices == "cpu":
        return {}, {}
    model, corpus = read_encoder(dense.encoder), Path(dense.corpus)
    if not num_passages:
        if not corpus.is_file():
            raise FileNotFoundError(
                f"config.search.dense.corpus is {str(corpus)!r}, which is not there to count its "
                "passages; say how many there are by --plan_passages."
            )
        stat = corpus.stat()
        num_passages = _count_lines(corpus, stat.st_size, stat.st_mtime_ns)
    sizes = device_bytes(
        num_passages,
        model.width,
        dense.dtype,
        num_local,
        platform=platform,
        candidates=dense.candidates,
        query_rows=dense.query_rows,
    )
    weights, activations = encoder_bytes(model, dense.encoder_dtype, dense.query_batch_tokens)
    held = {"search index": sizes["passages"], "search encoder": weights}
    return held, {"searching": sizes["search"] + activations}


@functools.lru_cache(maxsize=8)
def _count_lines(corpus: Path, size: int, mtime_ns: int) -> int:
    with open(corpus, "rb") as lines:
        return max(sum(1 for line in lines if line.strip()), 1)
