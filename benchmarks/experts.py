"""What a layer of experts costs as their number grows while each token reaches two of them.

    python -m benchmarks.experts

Times a forward and a backward pass of the products in one process, alternating, and prints medians
and, for `jax.lax.ragged_dot`, the operations that XLA counts. A token's own products take
`2 * 3 * 6 * D * F` operations forwards and backwards together, whatever the number of experts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.experts.dispatch import mix
from jaxrl.models.experts.products import Product, grouped_product

CHOSEN = 2
PRODUCTS: dict[str, Product] = {"tiles": grouped_product, "ragged_dot": jax.lax.ragged_dot}


def make_inputs(num_experts: int, tokens: int, width: int, inner: int) -> tuple[Any, ...]:
    """Tokens, weights, and a router's random choices."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-2] ** -0.5)

    weights = {
        "gate": normal(num_experts, width, inner),
        "up": normal(num_experts, width, inner),
        "down": normal(num_experts, inner, width),
    }
    chosen = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :CHOSEN].astype(np.int32)
    shares = jnp.full((tokens, CHOSEN), 1 / CHOSEN)
    return normal(tokens, width), weights, jnp.asarray(chosen), shares


def differentiated(product: Product) -> Callable[..., Any]:
    """The gradients of tokens and weights."""

    def loss(x: jax.Array, weights: Any, chosen: jax.Array, shares: jax.Array) -> jax.Array:
        return (mix(x, weights, chosen, shares, product=product) ** 2).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--inner", type=int, default=96)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    options = parser.parse_args()
    print("| experts | products | ms | GFLOP by XLA |\n|---|---|---|---|")
    for num_experts in options.experts:
        inputs = make_inputs(num_experts, options.tokens, options.width, options.inner)
        compiled = {
            name: differentiated(PRODUCTS[name]).lower(*inputs).compile()
            for name in options.products
        }
        times: dict[str, list[float]] = {name: [] for name in compiled}
        for _ in range(options.repeats + 1):
            for name, run in compiled.items():
                began = time.perf_counter()
                jax.block_until_ready(run(*inputs))
                times[name].append(time.perf_counter() - began)
        for name, run in compiled.items():
            counted = run.cost_analysis()["flops"] / 1e9
            # XLA counts a loop's body once, so its count says nothing of the tiles.
            operations = f"{counted:.2f}" if name == "ragged_dot" else "not counted"
            took = 1e3 * statistics.median(times[name][1:])
            print(f"| {num_experts} | {name} | {took:.1f} | {operations} |", flush=True)


if __name__ == "__main__":
    main()
