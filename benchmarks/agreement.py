r"""Check the numerical accuracy of kernels and of a small model on this device.

    python -m benchmarks.agreement --part=checks|kernels|experts|model [--json=FILE] [--shapes=6]
        [--kernels triton xla]

`checks`: the startup check of each of the platform's kernels, with the head sizes of published
models. `kernels`: attention with the platform's kernels and with XLA, forward and backward over
packed rows and over the sampler's pages, on random shapes. The reference is a brute-force
implementation in float64 on the host, with the same rounded inputs. `experts`: the same for grouped
matmuls, with random group sizes. `model`: a greedy rollout of a small float32 model and the
gradient of an update, on this device and on the CPU, without TF32. Samples may differ at tokens of
equal probability; log-probabilities are compared up to the first difference.

The exit status is 1 if a figure exceeds its bound, or if no kernel for an operation passes its
check. A kernel that cannot run is reported; it is an error only if `--kernels` names it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, rollout, update
from jaxrl.builders.method import build_method
from jaxrl.builders.resolved import resolve_names
from jaxrl.config import default_config
from jaxrl.extras.experts import choice as experts_choice
from jaxrl.extras.experts.products import GroupedMatmul
from jaxrl.extras.kernels import trials
from jaxrl.models.attention import choice as attention_choice
from jaxrl.models.attention.kernels import (
    PAGE_TOKENS,
    SHARES_PROMPTS,
    AttentionKernels,
    compute_key_ranges,
)
from jaxrl.models.attention.reference import XLA
from jaxrl.models.kernel_check import Trial, select_kernel, supports_dtype
from jaxrl.runtime.sharding import make_mesh
from jaxrl.sampling import next_token
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import GradientStep, shard_batch
from tests.extras.experts.brute import brute_force as brute_force_groups
from tests.models.attention.brute import (
    brute_force,
    brute_force_pages,
    random_inputs,
    random_pages,
    random_rows,
)

BOUNDS = {"float32": 1e-4, "bfloat16": 0.008}
"""Maximum error relative to the largest value; the kernels accumulate in float32."""

DTYPES = ("float32", "bfloat16")

HEADS = ((16, 8, 128), (28, 4, 128), (14, 2, 64), (4, 2, 64))
"""Query heads, KV heads, head size: Qwen3-0.6B, Qwen2.5-7B, Qwen2.5-0.5B, a small model."""

GROUP_SIZES = ((1, 8, 64), (32, 96, 512), (48, 128, 768))
"""Values to sample from for the number of groups, the input width and the output width."""

CHECK_HEADS = ((16, 8, 128), (32, 8, 128), (28, 4, 128), (40, 8, 128), (14, 2, 64), (4, 2, 16))
"""Sizes for the startup check, like `HEADS`, with Qwen3-4B and Qwen2.5-32B."""

WIDTHS = ((2048, 768), (64, 48))
"""Model and expert widths: Qwen3-30B-A3B and a small model."""


def list_platform_kernels(table: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the dotted paths of the platform's kernels by name, preferred first."""
    return dict(table.get(jax.devices()[0].platform, {}))


def run_startup_checks() -> tuple[dict[str, Any], bool]:
    """Run the startup checks; return the findings, and whether each case has a working kernel."""
    device, findings, passed = jax.devices()[0], dict[str, Any](), dict[str, bool]()
    tables = attention_choice.TRAIN_KERNELS, attention_choice.PAGED_KERNELS, experts_choice.KERNELS
    for table, dtype in itertools.product(tables, DTYPES[::-1]):
        line = [name for name in list_platform_kernels(table) if supports_dtype(name, dtype)]
        for sizes, name in itertools.product(
            WIDTHS if table is experts_choice.KERNELS else CHECK_HEADS, line
        ):
            make = partial(_make_trials, table, sizes=sizes, dtype=jnp.dtype(dtype), device=device)
            # One call per kernel, so that all are checked, not only those up to the first pass.
            load = {name: partial(pkgutil.resolve_name, list_platform_kernels(table)[name])}
            for check in select_kernel(make, load, XLA.attend_packed).kernel_checks:
                case = f"{check.operation}, {sizes}, {dtype}"
                label = f"{case}: {name}"
                findings[label] = f"{'passes' if check.is_sound else 'FAILS'}: {check.finding}"
                print(f"  {label} {findings[label]}", flush=True)
                passed[case] = passed.get(case, False) or check.is_sound
    if not passed:
        findings["nothing to check"] = f"{device.platform}s have only XLA's attention and experts"
    return findings, all(passed.values())


def _make_trials(
    table: Any, name: str, *, sizes: tuple[int, ...], dtype: Any, device: jax.Device
) -> list[Trial]:
    if table is experts_choice.KERNELS:
        return [experts_choice.make_grouped_matmul_trial(*sizes, dtype, device)]
    if table is attention_choice.TRAIN_KERNELS:
        return [
            trials.make_packed_trial(*sizes, dtype, device, shares_prompts=SHARES_PROMPTS[name])
        ]
    make_paged_trial = partial(
        trials.make_paged_trial, *sizes, dtype, device, page_tokens=PAGE_TOKENS[name]
    )
    block = attention_choice.choose_prefill_block_tokens(device.platform, *sizes[:2])
    return [make_paged_trial(num_queries=count) for count in (1, block)]


def compute_max_error(actual: Any, expected: np.ndarray) -> float:
    """Return the maximum error relative to the largest value; infinity if one is not finite."""
    actual = np.asarray(actual, np.float64)
    if not np.isfinite(actual).all():
        return float("inf")
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def round_to_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    """Round an array to a dtype; return it as float32."""
    return np.asarray(jnp.asarray(array, dtype), np.float32)


def measure_train_errors(
    kernels: AttentionKernels, rng: np.random.Generator, heads: tuple[int, int, int], dtype: str
) -> dict[str, float]:
    """Measure the errors of attention outputs and gradients for random packed rows."""
    num_heads, num_kv_heads, size = heads
    shape = (2, int(rng.integers(130, 400)), num_heads, size)
    *ids, attention_mask = random_rows(rng, *shape[:2], shares_prompts=kernels.shares_prompts)
    arrays = random_inputs(rng, shape, num_kv_heads)
    arrays[3] *= (ids[0] > 0)[:, :, None, None]
    q, k, v, gradient = (round_to_dtype(x, dtype) for x in arrays)
    expected = brute_force(q, k, v, gradient, attention_mask)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, gradient: jax.Array) -> Any:
        key_ranges = compute_key_ranges(*map(jnp.asarray, ids))
        out, back = jax.vjp(lambda q, k, v: kernels.attend_packed(q, k, v, key_ranges), q, k, v)
        return out, *back(gradient)

    out, *gradients = jax.jit(run)(*(jnp.asarray(x, dtype) for x in (q, k, v, gradient)))
    out = np.where((ids[0] > 0)[:, :, None, None], np.asarray(out, np.float32), 0)
    pairs = zip(("out", "dq", "dk", "dv"), (out, *gradients), expected, strict=True)
    return {name: compute_max_error(actual, value) for name, actual, value in pairs}


def measure_page_errors(
    kernels: AttentionKernels, rng: np.random.Generator, heads: tuple[int, int, int], dtype: str
) -> dict[str, float]:
    """Measure the errors of paged attention and its log-sum-exp, with 1 or 16 queries per row."""
    num_queries = int(rng.choice([1, 16]))
    sizes = (4, num_queries, *heads, kernels.page_tokens, int(rng.integers(2, 7)))
    q, keys, values, tables, limits = random_pages(rng, *sizes)
    q, keys, values = (round_to_dtype(x, dtype) for x in (q, keys, values))
    expected, wanted_lse = brute_force_pages(q, keys, values, tables, limits)
    operands_in_dtype = [jnp.asarray(x, dtype) for x in (q, keys, values)]
    out, lse = jax.jit(kernels.attend_pages)(*operands_in_dtype, tables, limits)
    has_keys = np.isfinite(wanted_lse)
    return {
        "out": compute_max_error(out, expected),
        "lse": compute_max_error(np.asarray(lse)[has_keys], wanted_lse[has_keys]),
    }


def check_kernels(num_shapes: int, names: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Measure all kernels; return the largest errors, and True if all are within bounds."""
    mesh = common.make_single_device_mesh()

    def measure_errors(name: str, what: str, dtype: str) -> Iterator[dict[str, float]]:
        rng = np.random.default_rng(0)
        measure = {"train": measure_train_errors, "pages": measure_page_errors}[what]
        for index in range(num_shapes):
            heads = HEADS[index % len(HEADS)]
            sizes = dataclasses.replace(common.MODELS["small"], head_dim=heads[2])
            kernels = attention_choice.select_kernels(name, mesh, sizes.architecture)
            # XLA would round float32 to TF32 on GPUs.
            with jax.default_matmul_precision("highest"):
                yield measure(kernels, rng, heads, dtype)

    cases = itertools.product(
        names or list_kernel_names(attention_choice.TRAIN_KERNELS), ("train", "pages"), DTYPES
    )
    return measure_worst_errors(measure_errors, cases, is_named=bool(names))


def list_kernel_names(table: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the names of the platform's kernels, preferred first, then "xla"."""
    return [*list_platform_kernels(table), "xla"]


def measure_worst_errors(
    measure_errors: Callable[..., Iterable[dict[str, float]]],
    cases: Iterable[tuple[str, ...]],
    *,
    is_named: bool,
) -> tuple[dict[str, Any], bool]:
    """Return the largest errors of each case, and True if all are within bounds.

    A kernel that cannot run is reported. It is an error only if the user requested it.

    Args:
        measure_errors: Function that yields the errors of a case by part, one dict per shape.
        cases: Tuples of kernel name, optional operation, and dtype.
        is_named: True if the user requested the kernels by name.
    """
    worst: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    for name, *what, dtype in (case for case in cases if supports_dtype(case[0], case[-1])):
        label = f"{' '.join([name, *what])}, {dtype}"
        try:
            measured = list(measure_errors(name, *what, dtype))
        except Exception as error:
            failed[label] = f"does not run: {type(error).__name__}: {error}"
        else:
            worst[label] = {part: max(value[part] for value in measured) for part in measured[0]}
    return {**worst, **failed}, are_within_bounds(worst) and not (is_named and failed)


def are_within_bounds(worst: dict[str, dict[str, float]]) -> bool:
    """Return True if all errors are within `BOUNDS`. Keys of `worst` end with the dtype."""
    return all(
        value <= BOUNDS[label.rpartition(" ")[2]]
        for label, parts in worst.items()
        for value in parts.values()
    )


def measure_expert_errors(
    product: GroupedMatmul, rng: np.random.Generator, dtype: str
) -> dict[str, float]:
    """Measure the errors of a grouped matmul and its gradients, with some empty groups."""
    num_groups, width, columns = (int(rng.choice(sizes)) for sizes in GROUP_SIZES)
    shares = rng.dirichlet(np.full(num_groups, 0.3))
    sizes = rng.multinomial(int(rng.integers(1, 2000)), shares)
    count = int(sizes.sum())
    rows, gradient = (
        round_to_dtype(rng.standard_normal((count + 20, size)), dtype) for size in (width, columns)
    )
    weights = round_to_dtype(rng.standard_normal((num_groups, width, columns)), dtype)
    expected = brute_force_groups(rows, weights, sizes, gradient)

    def run(rows: jax.Array, weights: jax.Array, sizes: jax.Array, gradient: jax.Array) -> Any:
        out, back = jax.vjp(lambda rows, weights: product(rows, weights, sizes), rows, weights)
        return out, *back(gradient)

    operands = (jnp.asarray(x, dtype) for x in (rows, weights))
    with jax.default_matmul_precision("highest"):
        actual = jax.jit(run)(
            *operands, jnp.asarray(sizes, jnp.int32), jnp.asarray(gradient, dtype)
        )
    ends = (count, count, num_groups)
    pairs = zip(("out", "of rows", "of weights"), actual, expected, ends, strict=True)
    return {name: compute_max_error(value[:end], other[:end]) for name, value, other, end in pairs}


def check_experts(num_shapes: int, names: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Measure all kernels; return the largest errors, and True if all are within bounds."""

    def measure_errors(name: str, dtype: str) -> Iterator[dict[str, float]]:
        rng, experts = (
            np.random.default_rng(0),
            experts_choice.select_kernels(name, common.make_single_device_mesh()),
        )
        for _ in range(num_shapes):
            yield measure_expert_errors(experts.grouped_matmul, rng, dtype)

    cases = itertools.product(names or list_kernel_names(experts_choice.KERNELS), DTYPES)
    return measure_worst_errors(measure_errors, cases, is_named=bool(names))


MODEL = common.ModelSizes(
    num_layers=4, width=256, num_heads=8, num_kv_heads=2, head_dim=64, mlp_width=512,
    vocab_size=2048, dtype="float32",
)  # fmt: skip
SAMPLE_WORK = rollout.Even(
    num_prompts=4, group_size=1, prompt_tokens=40, new_tokens=48, num_rows=4, chunk_tokens=16,
    tail_rows=0,
)  # fmt: skip
TRAIN_WORK = dataclasses.replace(
    update.WORK["cpu"], num_groups=2, group_size=3, prompt_tokens=40, new_tokens=60, row_tokens=256
)


def sample_greedily(device: Any) -> list[tuple[list[int], list[float]]]:
    """Sample greedily; return the tokens and log-probabilities of each request, in order."""
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=[device])
    engine = Engine(
        MODEL.architecture,
        mesh,
        StopAutomaton([b"a"] * MODEL.vocab_size, ["</search>"]),
        num_tokens=MODEL.vocab_size,
        eos_ids=(),
        num_rows=SAMPLE_WORK.num_rows,
        max_total_tokens=SAMPLE_WORK.prompt_tokens + SAMPLE_WORK.new_tokens,
        chunk_tokens=SAMPLE_WORK.chunk_tokens,
        kernels=common.select_default_kernels(MODEL, mesh),
        kinds=(next_token.GREEDY,),
    )
    engine.row_sizes = engine.row_sizes[-1:]
    engine.set_weights(jax.device_put(init_cpu_params(), device))
    requests = rollout.make_even_requests(MODEL, SAMPLE_WORK, 0)
    samples: dict[int, tuple[list[int], list[float]]] = {
        number: ([], []) for number in engine.submit(requests, temperature=0.0)
    }
    while not engine.is_idle:
        for event in engine.step():
            tokens, logprobs = samples[event.request]
            tokens.extend(event.token_ids.tolist())
            logprobs.extend(event.logprobs.tolist())
            if event.status:
                engine.finish(event.request)
    return list(samples.values())


def init_cpu_params() -> Any:
    """Create random weights on the CPU, so that they do not depend on the device."""
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, common.init_random_params(MODEL))


def compute_gradient(device: Any, dtype: str) -> list[np.ndarray]:
    """Return the leaves of an update's gradient, with the model computed in `dtype`."""
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=[device])
    sizes = dataclasses.replace(MODEL, dtype=dtype)
    packed = update.make_batch(update.make_sequences(sizes, TRAIN_WORK), TRAIN_WORK)
    policy = update.make_model(sizes, TRAIN_WORK, mesh)
    compute = GradientStep(
        policy, make_policy_loss(build_method(resolve_names(default_config(), needs_data=False)))
    )
    params = jax.device_put(init_cpu_params(), device)
    sums = compute(params, shard_batch(mesh, packed.batch), packed)
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(sums.gradients)]


def compute_relative_difference(
    actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> float:
    """Return the norm of the difference, relative to the norm of `expected`."""
    pairs = zip(actual, expected, strict=True)
    square = sum(float(((value - other) ** 2).sum()) for value, other in pairs)
    return (square / sum(float((value**2).sum()) for value in expected)) ** 0.5


def check_model() -> tuple[dict[str, Any], bool]:
    """Compare samples and gradients between this device and the CPU."""
    device, cpu = jax.devices()[0], jax.devices("cpu")[0]
    with jax.default_matmul_precision("highest"):
        num_same, gap = 0, 0.0
        for (tokens, logprobs), (expected, others) in zip(
            sample_greedily(device), sample_greedily(cpu), strict=True
        ):
            pairs = zip(tokens, expected, strict=True)
            count = next((i for i, (a, b) in enumerate(pairs) if a != b), len(expected))
            num_same += count
            differences = np.abs(np.subtract(logprobs[:count], others[:count]))
            gap = max(gap, float(differences.max(initial=0.0)))
        wanted_gradient = compute_gradient(cpu, "float32")
        single = compute_relative_difference(compute_gradient(device, "float32"), wanted_gradient)
    half = compute_relative_difference(compute_gradient(device, "bfloat16"), wanted_gradient)
    figures = {
        "same_greedy_tokens": num_same / (SAMPLE_WORK.num_prompts * SAMPLE_WORK.new_tokens),
        "logprob_gap": gap,
        "gradient_float32": single,
        "gradient_bfloat16": half,
    }
    is_near = figures["same_greedy_tokens"] > 0.9 and gap < 1e-3 and single < 1e-3 and half < 0.05
    return figures, is_near


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part, print its figures and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("checks", "kernels", "experts", "model")
    parser.add_argument("--part", choices=parts, default="kernels")
    parser.add_argument("--shapes", type=int, default=6, help="random shapes per dtype")
    tables = attention_choice.TRAIN_KERNELS, experts_choice.KERNELS
    names = sorted({"xla", *(name for table in tables for line in table.values() for name in line)})
    parser.add_argument(
        "--kernels", nargs="*", choices=names, default=[], help="names (default: the platform's)"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    flags = parser.parse_args(argv)
    if flags.part == "checks":
        figures, is_near = run_startup_checks()
    elif flags.part == "model":
        figures, is_near = check_model()
    else:
        check = check_kernels if flags.part == "kernels" else check_experts
        figures, is_near = check(flags.shapes, flags.kernels)
    record = {"benchmark": f"agreement_{flags.part}", **figures, "is_near": is_near}
    for label, value in record.items():
        print(f"  {label:<30}{value}")
    if flags.json:
        common.write_json(flags.json, record)
    return 0 if is_near else 1


if __name__ == "__main__":
    sys.exit(main())
