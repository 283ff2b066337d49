"""Least times of the parts of a step on a device, from bytes and operations by formula.

A part is a line of stages. A stage takes as long as the resource that it needs longest, the stages
come one after another. docs/research/performance.md has the formulas of one device. Added are
communication between devices, mixtures of experts, recomputation, and what products move.
It counts products with weights, attention, logits and the optimizer. It leaves out norms,
activations that one kernel could keep, vision towers, launches of programs and collectives, and
waiting for tools.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl.models.architecture import Architecture

SHARE_FLOPS, SHARE_BYTES = 0.8, 0.9
"""Shares of a data sheet's operations and bytes that floors ask for: assumed, not measured."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Rates of a data sheet, a second, of one device.

    Attributes:
        platform: as JAX names it.
        flops: operations of products in bfloat16, dense.
        bandwidth: bytes of memory.
        links: bytes received from devices that links reach, all links together.
        network: bytes received from other hosts; 0: the links reach these too.
        num_local: devices of a host.
        memory_gib: of it, what a program may be given.
        source: where these stand.
    """

    platform: str
    flops: float
    bandwidth: float
    links: float
    network: float
    num_local: int
    memory_gib: float
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
DEVICES = {
    # Four links with 800 GB/s both ways together. Its compiler gives 31.25 of 32 GiB.
    "v6e": Device(
        platform="tpu", flops=918e12, bandwidth=1640e9, links=400e9, network=0.0, num_local=4,
        memory_gib=31.25, source="https://cloud.google.com/tpu/docs/v6e",
    ),
    # NVLink has 900 GB/s both ways. For each device a network card of 400 Gb/s, as in a DGX.
    "h100": Device(
        platform="gpu", flops=989e12, bandwidth=3350e9, links=450e9, network=50e9, num_local=8,
        memory_gib=79.1, source=f"{_NVIDIA}h100/",
    ),
    "h200": Device(
        platform="gpu", flops=989e12, bandwidth=4800e9, links=450e9, network=50e9, num_local=8,
        memory_gib=139.8, source=f"{_NVIDIA}h200/",
    ),
}  # fmt: skip
"""Devices by the names of `benchmarks.published`."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Work on one device that nothing else overlaps."""

    flops: float = 0.0
    memory: float = 0.0  # bytes
    links: float = 0.0  # bytes received
    network: float = 0.0  # bytes received

    def seconds(self, device: Device) -> dict[str, float]:
        """Time by what it waits for, each alone."""
        network = device.network or math.inf
        return {
            "arithmetic": self.flops / (SHARE_FLOPS * device.flops),
            "memory": self.memory / (SHARE_BYTES * device.bandwidth),
            "links": self.links / (SHARE_BYTES * device.links),
            "network": self.network / (SHARE_BYTES * network),
        }


Stages = Sequence[Stage]


def floor_s(stages: Stages, device: Device) -> tuple[float, str]:
    """The least seconds of stages one after another, and what most of them wait for."""
    waits = dict.fromkeys(("arithmetic", "memory", "links", "network"), 0.0)
    for stage in stages:
        seconds = stage.seconds(device)
        longest = max(seconds, key=lambda name: seconds[name])
        waits[longest] += seconds[longest]
    return sum(waits.values()), max(waits, key=lambda name: waits[name])


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Values of a model's weights that products read, and of what products take and give.

    Attributes:
        table: the output layer.
        dense: of all layers, which each token is multiplied with.
        experts: of all experts.
        chosen: the part of the experts that a token reaches.
        passed: of a token, taken and given by the products of all layers.
        params: all parameters, which the optimizer changes.
    """

    table: int
    dense: int
    experts: int
    chosen: float
    passed: int
    params: int

    @classmethod
    def of(cls, model: Architecture) -> Weights:
        """Counts those of a language model; a tower's count as parameters alone."""
        params = model.abstract_params()
        dense = experts = passed = 0
        share = model.num_chosen / model.num_experts if model.num_experts else 0.0
        for leaf in jax.tree.leaves(params["blocks"]):
            if leaf.ndim == 3:  # [L, in, out]; norms and biases have two axes
                dense += math.prod(leaf.shape)
                passed += leaf.shape[0] * sum(leaf.shape[1:])
            elif leaf.ndim == 4:  # [L, E, in, out]
                experts += math.prod(leaf.shape)
                passed += leaf.shape[0] * model.num_chosen * sum(leaf.shape[2:])
        return cls(
            table=model.vocab_size * model.width,
            dense=dense,
            experts=experts,
            chosen=share,
            passed=passed,
            params=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        )

    @property
    def layers(self) -> float:
        """Values of all layers that a token is multiplied with."""
        return self.dense + self.chosen * self.experts


@dataclass(frozen=True, kw_only=True)
class Part:
    """A model on a mesh, for the stages of its programs on one device; values are bfloat16.

    Attributes:
        model: its sizes.
        mesh: sizes of the mesh axes.
        device: of the mesh.
    """

    model: Architecture
    mesh: Mapping[str, int]
    device: Device

    @property
    def weights(self) -> Weights:
        """Weights of the whole model."""
        return Weights.of(self.model)

    @property
    def attention(self) -> int:
        """Operations of a token for each earlier one, in all layers, on this device."""
        model = self.model
        return 4 * model.num_layers * model.num_heads * model.head_dim // self.mesh["tensor"]

    def gathered(self, size: float, axes: Sequence[str]) -> Stage:
        """All of `size` bytes that lie in parts on the devices of neighbouring mesh axes.

        Adding up gradients of that size, each device its part, is as much. Of what comes from other
        hosts the devices of a host bring each other the parts that each received.
        """
        names = list(self.mesh)
        inner = math.prod(self.mesh[one] for one in names[names.index(axes[-1]) + 1 :])
        group = math.prod(self.mesh[one] for one in axes)
        together = group
        if self.device.network:
            together = min(group, max(self.device.num_local // inner, 1))
        network = (1 - together / group) * size / together
        return Stage(links=(1 - 1 / group) * size - network, network=network)

    def weights_gathered(self, size: int) -> Stage:
        """The weights of all layers, and the tables, at `size` bytes a value."""
        weights, mesh = self.weights, self.mesh
        tables = weights.table * (1 if self.model.tie_embeddings else 2)
        dense = size * (weights.dense + tables) / mesh["tensor"]
        experts = size * weights.experts / mesh["tensor"] / mesh["expert"]
        of_all = self.gathered(dense, ("fsdp", "context", "expert"))
        of_experts = self.gathered(experts, ("fsdp", "context"))
        return added([of_all, of_experts])

    def tokens_sent(self, tokens: float, *, sums: float = 2, back: bool = False) -> Stage:
        """Stage in which devices send each other what `tokens` on a device take.

        Along `tensor` results are added up: of attention and of the MLP in each layer, of the table
        of ids, and backwards, in float32, of the output layer. Along `expert` a layer's tokens are
        gathered and the sums, in float32, come back. Both are within a host.

        Args:
            tokens: on this device.
            sums: how often a layer adds up, all passes together; experts half as often.
            back: there is a backward pass.
        """
        tensor, expert, layers = self.mesh["tensor"], self.mesh["expert"], self.model.num_layers
        hidden = tokens * self.model.width
        added_up = 2 * (1 - 1 / tensor) * hidden * (2 * (sums * layers + 1) + 4 * back)
        passes = sums / 2 * layers if self.model.num_experts else 0.0
        return Stage(links=added_up + passes * (expert - 1) * hidden * (2 + 4))

    def forward_flops(self, tokens: float, length: int) -> float:
        """Operations of all layers for `tokens` of causal sequences of `length`."""
        products = 2 * self.weights.layers / self.mesh["tensor"]
        return tokens * (products + self.attention * length / 2)

    def decode_step(self, rows: int, context: float) -> list[Stage]:
        """A step of the sampler that draws one token for each of `rows` on this device.

        Args:
            rows: decoded side by side on this device.
            context: mean tokens that a row attends to.
        """
        weights, mesh, model = self.weights, self.mesh, self.model
        tensor, expert = mesh["tensor"], mesh["expert"]
        # Experts that no token chose are not read: the more tokens, the fewer those are.
        read = 1 - (1 - weights.chosen) ** (rows * expert)
        held = weights.dense + weights.table + read * weights.experts / expert
        cache = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2 / tensor
        table = Stage(
            flops=2 * rows * (weights.layers + weights.table) / tensor, memory=2 * held / tensor
        )
        attended = Stage(flops=rows * context * self.attention, memory=rows * context * cache)
        logits = Stage(memory=2 * rows * model.vocab_size * 4 / tensor)
        return [table, attended, logits, self.tokens_sent(rows)]

    def reading(self, tokens: int, length: int) -> list[Stage]:
        """The sampler's pass over `tokens` on this device, of prompts and observations."""
        weights, mesh = self.weights, self.mesh
        held = weights.dense + weights.experts / mesh["expert"]
        memory = 2 * (held / mesh["tensor"] + tokens * weights.passed / mesh["tensor"])
        computed = Stage(flops=self.forward_flops(tokens, length), memory=memory)
        return [computed, self.tokens_sent(tokens)]

    def scoring(self, tokens: float, length: int) -> list[Stage]:
        """Log-probabilities of `tokens` on this device; weights arrive meanwhile.

        Args:
            tokens: on this device; of a row that is split over `context`, its piece.
            length: tokens of a sequence.
        """
        weights, tensor = self.weights, self.mesh["tensor"]
        table = 2 * tokens * weights.table / tensor
        logits = 2 * 4 * tokens * self.model.vocab_size / tensor
        held = weights.dense + weights.table + weights.experts / self.mesh["expert"]
        memory = 2 * 2 * held / tensor + 2 * tokens * weights.passed / tensor + logits
        computed = Stage(flops=self.forward_flops(tokens, length) + table, memory=memory)
        return [added([computed, self.weights_gathered(2)]), self.tokens_sent(tokens)]

    def update(self, tokens: float, length: int, *, again: bool = True) -> list[Stage]:
        """Gradients of a micro-batch of `tokens` on this device, added to those so far.

        Products have two of their own size backwards; attention has five for two, since scores are
        computed again. The output layer is computed again, the layers where `again` says so: then a
        layer's weights still arrive twice.
        """
        weights, tensor, mesh = self.weights, self.mesh["tensor"], self.mesh
        attention = tokens * self.attention * length / 2
        products = self.forward_flops(tokens, length) - attention
        table = 2 * tokens * weights.table / tensor
        flops = (4 if again else 3) * products + (4.5 if again else 3.5) * attention + 4 * table
        held = weights.dense + weights.table + weights.experts / mesh["expert"]
        passes = 4 if again else 3
        logits = 6 * 4 * tokens * self.model.vocab_size / tensor
        own = weights.params / math.prod(mesh[one] for one in ("fsdp", "context", "expert"))
        memory = (
            2 * (passes + 1) * held / tensor
            + passes * 2 * tokens * weights.passed / tensor
            + logits
            + 2 * 4 * own / tensor
        )
        # Of layers forward, backward, and gradients; of tables once, and gradients in float32.
        weights_sent = [self.weights_gathered(2)] * 3
        spread = 2 * (1 - 1 / mesh["data"]) * 4 * own / tensor
        sent = [*weights_sent, Stage(links=spread)]
        computed = Stage(flops=flops, memory=memory)
        # A layer that is computed again needs no sum of its MLP; experts need theirs.
        sums = 4 + again * (2 if self.model.num_experts else 1)
        return [added([computed, *sent]), self.tokens_sent(tokens, sums=sums, back=True)]

    def optimizer(self) -> list[Stage]:
        """Adam on this device's parameters: four float32 values read, three written, a norm."""
        own = self.weights.params / math.prod(
            self.mesh[one] for one in ("fsdp", "context", "expert", "tensor")
        )
        return [Stage(memory=(4 + 3 + 1) * 4 * own)]

    def handing_over(self) -> list[Stage]:
        """The weights as the sampler has them, whole but for `tensor` and `expert`."""
        weights = self.weights
        held = weights.dense + 2 * weights.table + weights.experts / self.mesh["expert"]
        memory = Stage(memory=2 * 2 * held / self.mesh["tensor"])
        return [added([memory, self.weights_gathered(2)])]


def added(stages: Stages) -> Stage:
    """One stage in which all go on side by side."""
    return Stage(
        flops=sum(one.flops for one in stages),
        memory=sum(one.memory for one in stages),
        links=sum(one.links for one in stages),
        network=sum(one.network for one in stages),
    )


def times(stages: Stages, count: float) -> list[Stage]:
    """Stages that come `count` times."""

    def more(one: Stage) -> dict[str, Any]:
        return {name: count * value for name, value in vars(one).items()}

    return [Stage(**more(one)) for one in stages]
