"""Code shared by the benchmarks: size presets, floors, timing and result records.

Unless stated otherwise, benchmarks run on the first device, with random weights that are created
on the device instead of loaded from a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.models.attention.choice import select_kernels
from jaxrl.models.attention.kernels import AttentionKernels
from jaxrl.models.decoder import init_params
from jaxrl.models.qwen import QwenConfig
from jaxrl.runtime.sharding import make_mesh, make_param_shardings
from jaxrl.sampling.interfaces import EngineCounts
from jaxrl.types import Params
from jaxrl.utils.files import open_atomic


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a Qwen3 model with tied embeddings; every field is a flag."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    dtype: str  # dtype of activations, matmuls and caches
    head_dtype: str = ""  # dtype of the output layer; "": `dtype`

    @property
    def architecture(self) -> QwenConfig:
        """Return the architecture with these sizes."""
        sizes = dataclasses.asdict(self)
        del sizes["dtype"]
        return QwenConfig(
            **sizes,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            tie_embeddings=True,
            qkv_bias=False,
            output_bias=False,
            qk_norm=True,
            max_positions=32_768,
        )

    @property
    def product_params(self) -> int:
        """Return the number of weights in the matmuls of a token, output layer included."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = 2 * self.width * (heads + kv_heads) + 3 * self.width * self.mlp_width
        return self.num_layers * layer + self.vocab_size * self.width

    @property
    def bytes_per_value(self) -> int:
        """Return the bytes per weight during computation and per value in the cache."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def cache_bytes_per_token(self) -> int:
        """Return the bytes of a token's keys and values in all layers."""
        num_values = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return num_values * self.bytes_per_value

    @property
    def attention_flops_per_token(self) -> int:
        """Return the FLOPs of attending to one earlier token, in all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


MODELS = {
    "small": ModelSizes(
        num_layers=4, width=256, num_heads=4, num_kv_heads=2, head_dim=64, mlp_width=768,
        vocab_size=4096, dtype="float32",
    ),
    "qwen3-0.6b": ModelSizes(
        num_layers=28, width=1024, num_heads=16, num_kv_heads=8, head_dim=128, mlp_width=3072,
        vocab_size=151_936, dtype="bfloat16",
    ),
    "qwen3-4b": ModelSizes(
        num_layers=36, width=2560, num_heads=32, num_kv_heads=8, head_dim=128, mlp_width=9728,
        vocab_size=151_936, dtype="bfloat16",
    ),
}  # fmt: skip
"""Sizes of a small model and of published models, by name."""

PRESETS = {"cpu": "small", "h200": "qwen3-0.6b"}
"""Default model of each preset. A preset is named after the machine that it fits."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Device rates from which floors are computed; None if unknown, which disables floors."""

    bandwidth: float | None  # bytes/s of memory
    flops: float | None  # FLOP/s that matmuls can reach
    nominal_flops: float | None  # FLOP/s in the data sheet, for MFU


H200 = Hardware(bandwidth=4.3e12, flops=790e12, nominal_flops=989e12)
"""H200 in bfloat16, at 90% of the rated bandwidth and 80% of the rated FLOP/s."""


def compute_decode_floor_s(
    model: ModelSizes, hardware: Hardware, *, num_rows: int, context: float
) -> float | None:
    """Return the minimum seconds of a decoding step: one pass over weights, cache and logits.

    Args:
        model: Model sizes.
        hardware: Device rates.
        num_rows: Number of rows decoded concurrently.
        context: Mean number of tokens that a row attends to.
    """
    bandwidth, flops = hardware.bandwidth, hardware.flops
    if bandwidth is None or flops is None:
        return None
    weights = model.product_params
    products = max(weights * model.bytes_per_value / bandwidth, 2 * weights * num_rows / flops)
    tokens = num_rows * context
    attention = max(
        tokens * model.cache_bytes_per_token / bandwidth,
        tokens * model.attention_flops_per_token / flops,
    )
    return products + attention + 2 * num_rows * model.vocab_size * 4 / bandwidth


def count_train_flops_per_token(model: ModelSizes, context: float) -> float:
    """Return the FLOPs per token of the forward and backward pass, without recomputation.

    `context` is the length of the sequence, in tokens.
    """
    causal = model.attention_flops_per_token * context / 2
    return 3 * (2 * model.product_params + causal)


class Compilations:
    """Count and total duration of the XLA compilations in this process."""

    def __init__(self) -> None:
        self.num = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += seconds
            self.num += event.endswith("backend_compile_duration")


def get_processor_name() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def get_package_versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of the given packages, by name."""
    installed = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **installed}


def make_libtpu_environment() -> dict[str, str]:
    """Return the environment variables for compiling for TPUs on a machine without TPUs.

    `LIBTPU_DIR` may name a folder that was created with `pip install --target`.
    """
    variables = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    if folder := os.environ.get("LIBTPU_DIR"):
        paths = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables |= {"TPU_LIBRARY_PATH": f"{folder}/libtpu/libtpu.so", "PYTHONPATH": paths}
    return variables


def get_peak_bytes() -> tuple[int, str]:
    """Return the peak memory so far in bytes, and its scope: "device" or "process"."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "device"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident * (1 if sys.platform == "darwin" else 1024), "process"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Durations of the repetitions and of compilation."""

    seconds: list[float]  # wall time per repetition
    cpu_seconds: list[float]  # CPU time of all threads per repetition
    compile_s: float  # compilation time before the first timed repetition
    num_recompilations: int  # compilations after that; should be 0

    def figures(self, num_tokens: int) -> dict[str, Any]:
        """Return the rates, given `num_tokens` per repetition.

        With one thread, tokens per second of CPU time equal the tokens per second of an idle core,
        even if other programs share the core.
        """
        on_cpu = jax.default_backend() == "cpu"
        per_cpu = summarize([num_tokens / seconds for seconds in self.cpu_seconds])
        return {
            "tokens_per_s": summarize([num_tokens / seconds for seconds in self.seconds]),
            "tokens_per_cpu_s": per_cpu if on_cpu else None,
            "compile_s": self.compile_s,
            "num_recompilations": self.num_recompilations,
        }


def repeat(run: Callable[[int], Any], *, warm_up: int, repetitions: int) -> Timing:
    """Call `run(number)` for warm-up and timed repetitions; return the timing."""
    compilations = Compilations()
    for number in range(warm_up):
        run(number)
    compile_s, num = compilations.seconds, compilations.num
    times, cpu_times = [], []
    for number in range(warm_up, warm_up + repetitions):
        started, cpu_started = time.perf_counter(), time.process_time()
        run(number)
        times.append(time.perf_counter() - started)
        cpu_times.append(time.process_time() - cpu_started)
    return Timing(
        seconds=times,
        cpu_seconds=cpu_times,
        compile_s=compile_s,
        num_recompilations=compilations.num - num,
    )


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return the minimum, median and maximum of the values."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def make_single_device_mesh(index: int = 0) -> Mesh:
    """Return a mesh over the device with this index."""
    return make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[index : index + 1])


def use_cores(cores: Collection[int]) -> None:
    """Pin all threads of this process to these cores; Linux only."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread may have just ended
            os.sched_setaffinity(int(thread), cores)


def measure_thread_times() -> dict[str, tuple[float, float]]:
    """Return the seconds that each thread ran and waited for a core; Linux only."""
    times = {}
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            on_core, waiting, _ = map(int, (thread / "schedstat").read_text().split())
            times[thread.name] = (on_core / 1e9, waiting / 1e9)
    return times


def init_random_params(model: ModelSizes, mesh: Mesh | None = None) -> Params:
    """Create random float32 weights on the devices."""
    layouts = None if mesh is None else make_param_shardings(mesh, model.architecture)
    return jax.jit(lambda: init_params(model.architecture, 0), out_shardings=layouts)()


def select_default_kernels(model: ModelSizes, mesh: Mesh) -> AttentionKernels:
    """Return the attention kernels that a run with default settings uses."""
    return select_kernels("auto", mesh, model.architecture, check_dtype=model.dtype)


def compute_mfu(operations: float, seconds: float, hardware: Hardware) -> float | None:
    """Return the model FLOPs utilization, relative to the data sheet; None if unknown."""
    return None if hardware.nominal_flops is None else operations / seconds / hardware.nominal_flops


RolloutVariant = tuple[Callable[[int], Any], EngineCounts]
"""Function that runs a repetition of a rollout, and the counters of its engine."""


def measure_variants(
    variants: dict[str, RolloutVariant], *, warm_up: int, repetitions: int
) -> dict[str, list[dict[str, float]]]:
    """Measure rollout variants, running all of them in every repetition."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for number in range(warm_up + repetitions):
        for name, (run, counts) in variants.items():
            before = dataclasses.replace(counts)
            started, cpu_started = time.perf_counter(), time.process_time()
            run(number)
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
            sampled, steps = counts.sampled - before.sampled, counts.row_steps - before.row_steps
            if number >= warm_up:
                figures = {"tokens_per_s": sampled / seconds, "row_occupancy": sampled / steps}
                if jax.default_backend() == "cpu":  # comparable even if the core is shared
                    figures["tokens_per_cpu_s"] = sampled / cpu_seconds
                measured[name].append(figures)
    return measured


def compute_median_figures(repetitions: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the repetitions."""
    return {key: statistics.median(r[key] for r in repetitions) for key in repetitions[0]}


def compute_median_ratio(
    measured: dict[str, list[dict[str, float]]], name: str, other: str, figure: str
) -> float:
    """Return the median over repetitions of the ratio of a figure between two variants."""
    pairs = zip(measured[name], measured[other], strict=True)
    return statistics.median(
        numerator[figure] / denominator[figure] for numerator, denominator in pairs
    )


def parse_flags(
    description: str, work: dict[str, Any], argv: Sequence[str] | None
) -> tuple[argparse.Namespace, ModelSizes, Any, Hardware]:
    """Parse the command line: a preset, and flags that override individual sizes.

    Args:
        description: Description of the benchmark.
        work: Benchmark sizes by preset, as dataclasses; each field becomes a flag.
        argv: Command-line arguments; None for those of the process.

    Returns:
        The flags, the model sizes, the benchmark sizes and the device rates.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu", help="sizes")
    parser.add_argument("--model", choices=sorted(MODELS), help="shapes (default: the preset's)")
    parser.add_argument("--repetitions", type=int, default=5, help="timed runs")
    parser.add_argument("--warm_up", type=int, default=2, help="untimed runs before them")
    parser.add_argument("--json", type=Path, help="record (default: under runs/bench)")
    parser.add_argument("--bandwidth", type=float, help="bytes/s, for floors (GPU: an H200's)")
    parser.add_argument("--flops", type=float, help="operations/s, for floors (GPU: an H200's)")
    parser.add_argument(
        "--nominal_flops", type=float, help="operations/s, for MFU (GPU: an H200's)"
    )
    for sizes in (MODELS["small"], work["cpu"]):
        for name, kind in get_type_hints(type(sizes)).items():
            parser.add_argument(f"--{name}", type=_flag_types[kind])
    flags = parser.parse_args(argv)

    # Flags that are not set keep the preset's values.
    def with_flags(sizes: Any) -> Any:
        names = [field.name for field in dataclasses.fields(sizes)]
        overrides = {
            name: getattr(flags, name) for name in names if getattr(flags, name) is not None
        }
        return dataclasses.replace(sizes, **overrides)

    # A GPU is assumed to be an H200 unless flags say otherwise; other devices have no floors.
    default_hardware = H200 if jax.default_backend() == "gpu" else _UNKNOWN
    figures = {name: getattr(flags, name) for name in dataclasses.asdict(default_hardware)}
    overrides = {name: value for name, value in figures.items() if value is not None}
    hardware = dataclasses.replace(default_hardware, **overrides)
    flags.model = flags.model or PRESETS[flags.preset]
    return flags, with_flags(MODELS[flags.model]), with_flags(work[flags.preset]), hardware


_UNKNOWN = Hardware(bandwidth=None, flops=None, nominal_flops=None)


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}; expected true or false")
    return text.lower() == "true"


_flag_types: dict[type, Callable[[str], Any]] = {
    int: int,
    str: str,
    float: float,
    bool: _parse_bool,
}


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_json(path: Path, record: Any) -> None:
    """Write a record as JSON, atomically; create missing folders."""
    with open_atomic(path) as file:
        file.write(json.dumps(record, indent=2) + "\n")


def report_figures(
    name: str,
    flags: argparse.Namespace,
    model: ModelSizes,
    work: Any,
    hardware: Hardware,
    figures: dict[str, Any],
) -> dict[str, Any]:
    """Print the figures and write them to a JSON record; return the record."""
    peak, scope = get_peak_bytes()
    device = jax.devices()[0]
    record = {
        "benchmark": name,
        "preset": flags.preset,
        "model_name": flags.model,
        "device": f"{device.platform}: {device.device_kind}",
        "processor": get_processor_name(),
        "versions": get_package_versions("jax", "jaxlib", "flax", "optax", "numpy"),
        "model": dataclasses.asdict(model),
        "work": dataclasses.asdict(work),
        "hardware": dataclasses.asdict(hardware),
        **figures,
        "peak_bytes": peak,
        "peak_bytes_of": scope,
    }
    path = flags.json or Path("runs/bench") / f"{name}_{flags.preset}.json"
    write_json(path, record)
    model_name = f"preset {flags.preset}, {flags.model}"
    machine = f"{record['device']}, {record['processor']}"
    print(f"{name}, {model_name}, {machine}, jax {jax.__version__}")
    for label, value in figures.items():
        print(f"  {label:<30}{_format_value(value)}")
    print(f"  {'peak_bytes':<30}{_format_value(peak)} of the {scope}")
    print(f"  written to {path}")
    return record


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_format_value(x)}" for name, x in value.items())
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"
