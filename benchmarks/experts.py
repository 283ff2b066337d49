r"""Cost of a layer's experts as their number grows while each token reaches as many of them.

    python -m benchmarks.experts [--tokens=4096] [--experts 8 32 128] [--chosen=2]
        [--products xla ragged_dot] [--rounds=15] [--json=FILE]

Times forward and backward passes in one process, all in turn in each round, and prints medians:
with the gradients of tokens and weights, and with that of tokens alone, which shows what the
gradient of all weights takes. Beside the time on the clock is that on processors, which others on
the machine lengthen less. The products of this platform and those of XLA are compared by default.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from jaxrl.config import EXPERTS
from jaxrl.extras.experts.choice import choose
from jaxrl.extras.experts.dispatch import mix
from jaxrl.extras.experts.products import Product

GRADIENTS = {"tokens": (0,), "tokens and weights": (0, 1)}
"""Arguments of `mix` that are differentiated."""


def make_inputs(
    num_experts: int, tokens: int, width: int, inner: int, chosen: int, dtype: str
) -> tuple[Any, ...]:
    """Tokens, weights, and a router's random choices."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-2] ** -0.5, dtype)

    weights = {
        "gate": normal(num_experts, width, inner),
        "up": normal(num_experts, width, inner),
        "down": normal(num_experts, inner, width),
    }
    experts = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :chosen].astype(np.int32)
    shares = jnp.full((tokens, chosen), 1 / chosen)
    return normal(tokens, width), weights, jnp.asarray(experts), shares


def find_product(name: str) -> Product:
    """Product of `config.model.experts`, or XLA's own."""
    return jax.lax.ragged_dot if name == "ragged_dot" else choose(name, common.one_device()).product


def differentiated(product: Product, arguments: tuple[int, ...]) -> Callable[..., Any]:
    """The gradients of tokens, and perhaps of weights."""

    def loss(x: jax.Array, weights: Any, chosen: jax.Array, shares: jax.Array) -> jax.Array:
        return (mix(x, weights, chosen, shares, product=product) ** 2).sum()

    return jax.jit(jax.grad(loss, argnums=arguments))


Label = tuple[int, str, str]
"""Number of experts, products, and what is differentiated."""


def compile_all(flags: argparse.Namespace) -> dict[Label, Callable[[], Any]]:
    """Compiles each case; one that does not compile here is told and left out."""
    runs: dict[Label, Callable[[], Any]] = {}
    for num_experts in flags.experts:
        inputs = make_inputs(
            num_experts, flags.tokens, flags.width, flags.inner, flags.chosen, flags.dtype
        )
        for name in flags.products:
            for what, arguments in GRADIENTS.items():
                function = differentiated(find_product(name), arguments)
                try:
                    program = function.lower(*inputs).compile()
                    jax.block_until_ready(program(*inputs))
                except jax.errors.JaxRuntimeError as error:
                    print(f"{num_experts} experts, {name}: {str(error).splitlines()[0]}")
                    continue
                runs[num_experts, name, what] = lambda program=program, inputs=inputs: program(
                    *inputs
                )
    return runs


def measure(runs: dict[Label, Callable[[], Any]], rounds: int) -> dict[Label, tuple[float, float]]:
    """Medians of each case, ms on the clock and on processors."""
    times_of: dict[Label, list[tuple[float, float]]] = {label: [] for label in runs}
    for _ in range(rounds):
        for label, run in runs.items():
            began = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            ended = time.perf_counter(), time.process_time()
            times_of[label].append((1e3 * (ended[0] - began[0]), 1e3 * (ended[1] - began[1])))
    return {
        label: (statistics.median(a for a, _ in times), statistics.median(b for _, b in times))
        for label, times in times_of.items()
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Prints the table; the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = choose("auto", common.one_device()).name
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--inner", type=int, default=96)
    parser.add_argument("--chosen", type=int, default=2, help="experts of a token")
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--products",
        nargs="+",
        choices=(*EXPERTS[1:], "ragged_dot"),
        default=list(dict.fromkeys((own, "xla"))),
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    flags = parser.parse_args(argv)
    medians = measure(compile_all(flags), flags.rounds)
    print("| experts | products | gradients of | ms | ms of processors |\n|---|---|---|---|---|")
    for (num_experts, name, what), (clock, processors) in medians.items():
        print(f"| {num_experts} | {name} | {what} | {clock:.2f} | {processors:.2f} |")
    most = max(flags.experts)
    record = {
        "benchmark": "experts",
        **{key: value for key, value in vars(flags).items() if key != "json"},
        "medians": [[*label, *times] for label, times in medians.items()],
        **{
            f"{name}_ms": clock
            for (num_experts, name, what), (clock, _) in medians.items()
            if num_experts == most and what == "tokens and weights"
        },
    }
    if flags.json:
        common.write_json(flags.json, record)
    return record


if __name__ == "__main__":
    main()
