r"""Compile published models for absent devices; compare with the memory plan and the floors.

    python -m benchmarks.published --out=DIR [--cases=search_r1@v6e,dapo@h100] [--parts=decode]
        [--num_layers=2] [--keys rollout.max_num_seqs=768] [--limit_s=900]

For each shipped configuration, the programs of a run are compiled from shapes alone, on the mesh in
`CASES`: the gradients of a micro-batch, the optimizer, log-probabilities, a decoding chunk and
prefill. No weights are created and nothing is executed. Parts are compiled one at a time, each in a
process with a time limit. A part that fails, or that does not fit in memory, is reported in its
row. `DIR/results.json` and `DIR/table.md` are rewritten after each part; a part whose
shapes are in `results.json` is not compiled again.

Compilers: TPUs need libtpu; NVIDIA GPUs need jax-cuda12-plugin, jax-cuda12-pjrt and
nvidia-cuda-nvcc-cu12 of JAX's version. If these are not installed, `LIBTPU_DIR` and
`CUDA_PLUGIN_DIR` may name folders created with `pip install --no-deps --target`. Neither compiler
needs a device, but without a GPU, XLA selects tiles and algorithms without autotuning.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies

from benchmarks import common, floors
from benchmarks.common import format_table
from jaxrl.builders.capacity import GIB, check_row_counts
from jaxrl.builders.method import compute_batch_shape
from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.extras.plan.memory import Target, count_cache_pages, make_target_mesh, plan_rollout
from jaxrl.models.attention.choice import resolve_kernel_name
from jaxrl.models.attention.kernels import SHARES_PROMPTS
from jaxrl.runtime.sharding import count_batch_shards, count_piece_shards
from jaxrl.sampling.buckets import list_prefill_buckets
from jaxrl.training.method import has_kl_loss, needs_old_logprobs
from tests import compiled_memory as memory


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shipped configuration and the devices to compile it for.

    Attributes:
        config: Module in `configs`.
        model: Folder in `configs/models`.
        device: Key of `floors.DEVICES`.
        slice: Topology of a TPU slice, such as `4x4`; for GPUs, the number of hosts.
        keys: Config keys to override, with their values.
        label: Name before the device, if it is not that of the configuration.
    """

    config: str
    model: str
    device: str
    slice: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        """Return the name of the case on the command line."""
        return f"{self.label or self.config}@{self.device}"

    @property
    def target(self) -> Target:
        """Return the devices in the form that the plan expects."""
        device = floors.DEVICES[self.device]
        sizes = [int(size) for size in self.slice.split("x")]
        num_devices = sizes[0] * (sizes[1] if len(sizes) > 1 else device.num_local)
        return Target(
            platform=device.platform,
            num_devices=num_devices,
            num_processes=max(num_devices // device.num_local, 1),
            memory_bytes=int(device.memory_gib * GIB),
        )

    def build_model(self, num_layers: int = 0) -> tuple[ResolvedConfig, Any]:
        """Return the configuration, with micro-batches that fit the devices, and the model."""
        shipped = memory.shipped_on(self.config, self.model, self.target, num_layers, self.keys)
        check_row_counts(
            shipped[0], make_target_mesh(*shipped, self.target), self.target.num_processes
        )
        return shipped


def _make_mesh(fsdp: int, tensor: int = 1, expert: int = 1) -> dict[str, int]:
    return {"mesh.fsdp": fsdp, "mesh.tensor": tensor, "mesh.expert": expert}


def _make_case(
    config: str, model: str, device: str, slice: str, label: str = "", **mesh: int
) -> Case:
    keys = _make_mesh(**mesh) if mesh else {}
    return Case(config=config, model=model, device=device, slice=slice, keys=keys, label=label)


def _make_hybrid_case(model: str, device: str, slice: str, **mesh: int) -> Case:
    return _make_case("search_r1", model, device, slice, model, **mesh)


CASES = {
    case.name: case
    for case in (
        _make_case("search_r1", "qwen2.5-7b", "v6e", "4x4", fsdp=16),
        _make_case("bapo", "qwen2.5-7b", "v6e", "4x4", fsdp=16),
        _make_case("passk", "qwen2.5-7b", "v6e", "4x4", fsdp=8, tensor=2),
        _make_case("ares", "qwen2.5-vl-7b", "v6e", "4x4", fsdp=8, tensor=2),
        _make_case("search_moe", "qwen3-30b-a3b", "v6e", "8x8", fsdp=16, expert=4),
        _make_case("dapo", "qwen2.5-32b", "v6e", "8x8", fsdp=16, tensor=4),
        _make_case("search_r1", "qwen2.5-7b", "h100", "1"),
        _make_case("bapo", "qwen2.5-7b", "h100", "1"),
        _make_case("passk", "qwen2.5-7b", "h100", "1"),
        _make_case("ares", "qwen2.5-vl-7b", "h100", "1"),
        _make_case("search_moe", "qwen3-30b-a3b", "h100", "2"),
        _make_case("dapo", "qwen2.5-32b", "h100", "8"),
        _make_hybrid_case("qwen3.5-4b", "v6e", "2x4", fsdp=8),
        _make_hybrid_case("qwen3.5-9b", "v6e", "2x4", fsdp=2, tensor=4),
        _make_hybrid_case("qwen3.5-4b", "h100", "1"),
        _make_hybrid_case("qwen3.5-9b", "h100", "1"),
    )
}
"""Cases by name. H100s use the mesh of the configuration. A v6e has less memory and four chips per
host; `tensor` and `expert` must fit within a host."""


def get_case(name: str, keys: Sequence[str] = ()) -> Case:
    """Return a case of `CASES`, with additional `key=value` overrides."""
    case = CASES[name]
    overrides = dict(memory.key_and_value(item) for item in keys)
    return dataclasses.replace(case, keys={**case.keys, **overrides})


HOST = "2x2"
"""TPU slice of one host."""

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 device_memory_size: 84942979072
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""Description of an H100 for XLA's compiler: a `GpuTargetConfigProto` in text format."""


def make_compiler_environment() -> dict[str, str]:
    """Return environment variables for compiling without devices."""
    # Unfiltered tracebacks end with the error itself, not with JAX's note about filtering.
    env = common.make_libtpu_environment() | {
        "JAX_PLATFORMS": "cpu",
        "JAX_TRACEBACK_FILTERING": "off",
    }
    if folder := os.environ.get("CUDA_PLUGIN_DIR"):
        own = Path(folder) / "nvidia" / "cuda_nvcc"
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={own}"
        paths = [env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")), folder]
        env |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PATH": f"{own / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "XLA_FLAGS": flags.strip(),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
    return env


def describe_devices(case: Case, part: str) -> list[Any]:
    """Return device descriptions for a part, in the environment of `make_compiler_environment`.

    If there are several hosts, the sampler gets the devices of one host: libtpu cannot compile
    communication between a subset of a larger slice's chips.
    """
    target = case.target
    if target.platform == "tpu":
        is_local = part in ("decode", "prefill") and target.num_processes > 1
        name = f"{case.device}:{HOST if is_local else case.slice}"
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    shape = f"1x{target.num_processes}x{target.num_local}"
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology=shape)
    return list(topology.devices)


MEMORY_PATTERN = re.compile(r"Used (\d+(?:\.\d+)?)G of \d+(?:\.\d+)?G hbm")
"""Pattern for the GiB of memory in error messages of the TPU compiler."""


def compile_part(case: Case, part: str, num_layers: int) -> dict[str, Any]:
    """Compile the programs of a part; return their bytes per device and compilation times."""
    config, model = case.build_model(num_layers)
    devices = describe_devices(case, part)
    figures: dict[str, Any] = {}
    # Kernels of tokamax and JAX select their lowering by the default device.
    with (
        mock.patch("jax.extend.backend.get_default_device", return_value=devices[0]),
        mock.patch("jax.devices", return_value=devices),
    ):
        programs = memory.programs_of(config, model, case.target, devices, part)
        for name, (lower, other_bytes) in programs.items():
            started = time.perf_counter()
            lowered = lower()
            seconds = time.perf_counter() - started
            figures[name] = {"beside": other_bytes, "lower_s": seconds}
            started = time.perf_counter()
            try:
                sizes = memory.compiled(lowered, case.target.platform)
            except jax.errors.JaxRuntimeError as error:
                figures[name]["refused"] = str(error)[:2000]
                if used := MEMORY_PATTERN.search(str(error)):
                    figures[name]["total"] = int(float(used[1]) * GIB)
            else:
                figures[name] |= dataclasses.asdict(sizes)
            figures[name]["compile_s"] = time.perf_counter() - started
    return figures


def run_part(flags: argparse.Namespace, name: str, part: str) -> dict[str, Any]:
    """Compile a part in a new process; return the result of `compile_part` and the status."""
    out, limit_s = flags.out, flags.limit_s
    record = out / "part.json"
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.published", f"--out={record}", f"--one={name}"]
    command += [f"--parts={part}", f"--num_layers={flags.num_layers}", "--keys", *flags.keys]
    started = time.monotonic()
    with (out / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"\n$ {shlex.join(command[1:])}\n")
        log.flush()
        log_start = log.tell()
        try:
            done = subprocess.run(
                command,
                env=os.environ | make_compiler_environment(),
                stdout=log,
                stderr=log,
                timeout=limit_s,
            )
            ending = "done" if done.returncode == 0 else f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            ending = f"stopped after {limit_s:.0f} s"
    result = {"ending": ending, "seconds": time.monotonic() - started, "programs": {}}
    if ending == "done":
        result["programs"] = json.loads(record.read_text(encoding="utf-8"))
    else:
        result["said_last"] = (
            (out / "log.txt").read_bytes()[log_start:].decode(errors="replace")[-2000:]
        )
    record.unlink(missing_ok=True)
    return result


@dataclass(frozen=True, kw_only=True)
class Step:
    """Programs of a training step, with every trajectory at its maximum length.

    Attributes:
        calls: Number of calls per step, by program.
        stages: Stages of a call, by program.
        tokens: Number of tokens in all trajectories, including prompts.
        num_devices: Number of devices that share the tokens.
    """

    calls: dict[str, float]
    stages: dict[str, floors.Stages]
    tokens: int
    num_devices: int

    @classmethod
    def build(cls, case: Case, config: ResolvedConfig, model: Any) -> Step:
        """Compute the number of calls per step and the stages of each call."""
        # Meshes of the trainer and of the sampler of one process.
        target, rollout = case.target, config.rollout
        mesh = make_target_mesh(config, model, target)
        own = {**mesh.shape}
        if target.num_processes > 1:  # each process samples on its local devices
            rest = target.num_local // own["expert"] // own["tensor"]
            own |= {"data": rest, "fsdp": 1, "context": 1}
        device = floors.DEVICES[case.device]
        train = floors.Part(model=model, mesh=dict(mesh.shape), device=device)
        sample = floors.Part(model=model, mesh=own, device=device)
        named, dtype = config.model.attention, config.model.dtype
        kernels, _ = resolve_kernel_name(named, target.platform, model.head_dim, dtype)
        # Sizes of one call: a micro-batch, a chunk of decoding, a prefill.
        shards = count_batch_shards(mesh) if SHARES_PROMPTS[kernels] else 0
        shape = compute_batch_shape(config, "train", shards, own["context"], model)
        length, chunk = rollout.max_total_tokens, rollout.chunk_tokens
        tokens = shape.micro_rows * shape.row_tokens / count_piece_shards(mesh)
        sampling = target.num_devices // own["tensor"]
        rows = rollout.max_num_seqs // sampling
        read = list_prefill_buckets(target.platform, length)[-1]
        decoding = floors.repeat_stages(sample.decode_step(rows, length / 2), chunk)
        recomputes_layers = config.model.remat in ("full", "offload")
        # Numbers of calls.
        trajectories = rollout.tasks_per_step * rollout.group_size
        prompts = rollout.tasks_per_step * rollout.max_prompt_tokens
        num_observation_tokens = length - rollout.max_prompt_tokens - rollout.max_response_tokens
        updates = config.optimizer.num_minibatches * shape.num_micro
        passes = needs_old_logprobs(config.optimizer, config.filter, config.loss) + (
            has_kl_loss(config.kl) and config.kl.anchor == "ref"
        )
        return cls(
            calls={
                "update": updates,
                "optimizer": config.optimizer.num_minibatches,
                "score": passes * updates,
                "decode": trajectories / rollout.max_num_seqs * rollout.max_response_tokens / chunk,
                "prefill": (prompts + trajectories * max(num_observation_tokens, 0))
                / (read * sampling),
                "weights": 1,
            },
            stages={
                "update": train.update(tokens, length, recomputes_layers=recomputes_layers),
                "optimizer": train.optimizer(),
                "score": train.scoring(tokens, length),
                "decode": decoding,
                "prefill": sample.prefill(read, length),
                "weights": train.weight_transfer(),
            },
            tokens=trajectories * length,
            num_devices=target.num_devices,
        )

    def floor(self, name: str, device: floors.Device) -> tuple[float, str]:
        """Return the minimum seconds of a call, and the resource that dominates."""
        return floors.compute_floor_s(self.stages[name], device)


PROGRAMS = ("update", "optimizer", "score", "weights", "prefill", "decode")
"""Programs of a step; `weights` copies the weights to the sampler."""


def _format_gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


HEADS = (
    "case", "mesh", "program", "compiled in s", "arguments", "temporaries", "beside", "compiler",
    "plan", "", "at least, ms", "waits for",
)  # fmt: skip


def format_row(
    case: Case, mesh: str, name: str, item: Mapping[str, Any], planned: int | None, step: Step
) -> list[str]:
    """Format the row of a program: GiB per device, and the floor of a call."""
    seconds, waits = step.floor(name, floors.DEVICES[case.device])
    total = item.get("total")
    whole = None if total is None else total + item["beside"]
    deviation = "" if planned is None or whole is None else f"{planned / whole - 1:+.0%}"
    compiler = _format_gib(whole)
    if "refused" in item:
        compiler = f"{compiler}, refused" if compiler else "refused"
    elif whole is not None and whole > case.target.memory_bytes:
        compiler += ", too much"
    return [
        case.name, mesh, name, f"{item['compile_s']:.0f}", _format_gib(item.get("arguments")),
        _format_gib(total - item["arguments"] if "arguments" in item else None),
        _format_gib(item["beside"]),
        compiler, _format_gib(planned), deviation, f"{1e3 * seconds:,.1f}", waits,
    ]  # fmt: skip


def format_report(results: Mapping[str, Any]) -> str:
    """Format the results as two Markdown tables, of programs and of steps."""
    rows, steps = [], []
    for name in dict.fromkeys(item["case"] for item in results.values()):
        own = [item for item in results.values() if item["case"] == name]
        case = get_case(name, own[0]["keys"])
        config, model = case.build_model(own[0]["num_layers"])
        step, device = Step.build(case, config, model), floors.DEVICES[case.device]
        # Memory in use while the sampler runs, except for its weights and cache.
        mesh = "x".join(map(str, make_target_mesh(config, model, case.target).shape.values()))
        parts = plan_rollout(config, model, case.target).persistent
        sampler = ("decode weights", "KV cache", "states of recurrent layers")
        other_bytes = sum(size for term, size in parts.items() if term not in sampler)
        for item in own:
            part = item["part"]
            # The train state is in memory while the sampler runs, so its figures include it.
            beside = other_bytes if part in ("decode", "prefill") else 0
            planned = memory.planned_bytes(config, model, case.target, part) + beside
            for program, sizes in item["programs"].items():
                sizes = sizes | {"beside": sizes["beside"] + beside}
                rows.append(
                    format_row(
                        case, mesh, program, sizes, planned if program == part else None, step
                    )
                )
            if not item["programs"]:
                last = item["said_last"].strip().splitlines() or [""]
                floor_s, waits = step.floor(part, device)
                rows.append(
                    [name, mesh, part, item["ending"], "", "", "", last[-1][:200],
                     _format_gib(planned), "", f"{1e3 * floor_s:,.1f}", waits]
                )  # fmt: skip
        seconds = {part: step.calls[part] * step.floor(part, device)[0] for part in PROGRAMS}
        whole = sum(seconds.values())
        steps.append(
            [name, *(f"{seconds[part]:,.1f}" for part in PROGRAMS), f"{whole:,.1f}",
             f"{step.tokens / whole / step.num_devices:,.0f}"]
        )  # fmt: skip
    heads = ["case", *PROGRAMS, "step, s", "tokens a second and device"]
    return f"{format_table(HEADS, rows)}\n\n{format_table(heads, steps)}\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compile the selected parts; return their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--cases", default=",".join(CASES), help="names in CASES")
    parser.add_argument("--parts", default=",".join(memory.PARTS), help="programs")
    parser.add_argument(
        "--num_layers", type=int, default=0, help="number of layers; 0: the model's"
    )
    parser.add_argument(
        "--keys", nargs="*", default=[], help="changes to the configurations: key=value"
    )
    parser.add_argument("--limit_s", type=float, default=900.0, help="seconds for each part")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in a subprocess
    flags = parser.parse_args(argv)
    if flags.one:
        figures = compile_part(get_case(flags.one, flags.keys), flags.parts, flags.num_layers)
        flags.out.write_text(json.dumps(figures), encoding="utf-8")
        return figures
    if unknown := set(flags.cases.split(",")) - set(CASES):
        parser.error(f"--cases names {', '.join(sorted(unknown))}; expected some of {list(CASES)}")
    flags.out.mkdir(parents=True, exist_ok=True)
    # Results are saved after every part, so that an interrupted benchmark can resume.
    file = flags.out / "results.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in flags.cases.split(","):
        case = get_case(name, flags.keys)
        config, model = case.build_model(flags.num_layers)
        # Identity of a part: an earlier result with the same values is reused.
        compiled = {
            "case": name,
            "keys": flags.keys,
            "num_layers": flags.num_layers,
            "micro_rows": config.optimizer.micro_rows,
            "cache_pages": count_cache_pages(config, model, case.target),
            "versions": common.get_package_versions("jax", "jaxlib"),
        }
        for part in flags.parts.split(","):
            key = f"{name} {part}"
            identity = compiled | {"part": part, "ending": "done"}
            if identity.items() <= results.get(key, {}).items():
                continue
            result = run_part(flags, name, part)
            results[key] = identity | result
            file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            (flags.out / "table.md").write_text(format_report(results), encoding="utf-8")
            print(f"{key}: {result['ending']}, {result['seconds']:.0f} s", flush=True)
    print(format_report(results))
    return results


if __name__ == "__main__":
    main()
