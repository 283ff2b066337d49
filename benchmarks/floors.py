"""Compute lower bounds on the times of a step's parts, from formulas for bytes and FLOPs.

A part is a sequence of stages. A stage takes as long as its slowest resource; stages do not
overlap. docs/research/performance.md has the formulas for one device. This module adds
communication between devices, mixtures of experts, recomputation, and the activations that matmuls
read and write. It counts matmuls with weights, attention, recurrent states, logits and the
optimizer. Of a recurrent layer's arithmetic it counts only the products with the state. It ignores
norms, activations that a fused kernel need not store, vision towers, launch times of programs and
collectives, and waiting for tools.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from jaxrl.models.architecture import Architecture

SHARE_FLOPS, SHARE_BYTES = 0.8, 0.9
"""Fractions of the data sheet's rates that the floors assume; not measured."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Rates of one device from its data sheet, per second.

    Attributes:
        platform: Platform name in JAX.
        flops: Dense bfloat16 FLOP/s.
        bandwidth: Memory bandwidth in bytes/s.
        links: Bytes/s received over all links together.
        network: Bytes/s received from other hosts; 0 if the links reach them too.
        num_local: Number of devices per host.
        memory_gib: Memory that a program may use, in GiB.
        source: URL of the data sheet.
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
    # Four links, 800 GB/s in both directions together. The compiler offers 31.25 of 32 GiB.
    "v6e": Device(
        platform="tpu", flops=918e12, bandwidth=1640e9, links=400e9, network=0.0, num_local=4,
        memory_gib=31.25, source="https://cloud.google.com/tpu/docs/v6e",
    ),
    # NVLink: 900 GB/s in both directions. One 400 Gb/s network card per device, as in a DGX.
    "h100": Device(
        platform="gpu", flops=989e12, bandwidth=3350e9, links=450e9, network=50e9, num_local=8,
        memory_gib=79.1, source=f"{_NVIDIA}h100/",
    ),
    "h200": Device(
        platform="gpu", flops=989e12, bandwidth=4800e9, links=450e9, network=50e9, num_local=8,
        memory_gib=139.8, source=f"{_NVIDIA}h200/",
    ),
}  # fmt: skip
"""Devices by their name in `benchmarks.published`."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Work on one device. Stages do not overlap with each other."""

    flops: float = 0.0
    memory: float = 0.0  # bytes
    links: float = 0.0  # bytes received
    network: float = 0.0  # bytes received

    def seconds(self, device: Device) -> dict[str, float]:
        """Return the seconds that each resource alone would take."""
        network = device.network or math.inf
        return {
            "arithmetic": self.flops / (SHARE_FLOPS * device.flops),
            "memory": self.memory / (SHARE_BYTES * device.bandwidth),
            "links": self.links / (SHARE_BYTES * device.links),
            "network": self.network / (SHARE_BYTES * network),
        }


Stages = Sequence[Stage]


def compute_floor_s(stages: Stages, device: Device) -> tuple[float, str]:
    """Return the minimum seconds of consecutive stages, and the resource that dominates."""
    busy_s = dict.fromkeys(("arithmetic", "memory", "links", "network"), 0.0)
    for stage in stages:
        seconds = stage.seconds(device)
        longest = max(seconds, key=lambda name: seconds[name])
        busy_s[longest] += seconds[longest]
    return sum(busy_s.values()), max(busy_s, key=lambda name: busy_s[name])


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Number of weights that matmuls read, and of activations that they read and write.

    Attributes:
        table: Weights of the output layer.
        dense: Weights of all layers that every token is multiplied by.
        experts: Weights of all experts.
        active_share: Fraction of the experts that process a token.
        activations: Input and output values of the matmuls in all layers, per token.
        params: Parameters that the optimizer updates.
    """

    table: int
    dense: int
    experts: int
    active_share: float
    activations: int
    params: int

    @classmethod
    def count(cls, model: Architecture) -> Weights:
        """Count the weights of a language model. Only `params` includes a vision tower."""
        params = model.make_abstract_params()
        dense = experts = activations = 0
        share = model.top_k / model.num_experts if model.num_experts else 0.0
        axes = flatten_dict(model.get_logical_axes()["blocks"])
        for path, leaf in flatten_dict(params["blocks"]).items():
            if leaf.ndim == 3:  # [L, in, out]; norms and biases have two axes
                dense += math.prod(leaf.shape)
                activations += leaf.shape[0] * sum(leaf.shape[1:])
            elif "expert" in axes[path]:  # [L, E, in, out]
                experts += math.prod(leaf.shape)
                activations += leaf.shape[0] * model.top_k * sum(leaf.shape[2:])
        return cls(
            table=model.vocab_size * model.width,
            dense=dense,
            experts=experts,
            active_share=share,
            activations=activations,
            params=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        )

    @property
    def layers(self) -> float:
        """Return the number of layer weights that a token is multiplied by."""
        return self.dense + self.active_share * self.experts


@dataclass(frozen=True, kw_only=True)
class Part:
    """Stages of a model's programs on one device of a mesh, in bfloat16.

    Attributes:
        model: Model architecture.
        mesh: Sizes of the mesh axes, by name.
        device: Rates of the mesh's devices.
    """

    model: Architecture
    mesh: Mapping[str, int]
    device: Device

    @property
    def weights(self) -> Weights:
        """Return the weight counts of the complete model."""
        return Weights.count(self.model)

    @property
    def attention(self) -> int:
        """Return this device's FLOPs per token and earlier token, in all layers."""
        model = self.model
        width = model.num_heads * model.head_dim // self.mesh["tensor"]
        return 4 * model.num_attention_layers * width

    @property
    def state(self) -> int:
        """Return the number of values of this device's recurrent states, in all layers."""
        sizes = (math.prod(spec.shape) for spec in self.model.state_specs.values())
        return self.model.num_recurrent_layers * sum(sizes) // self.mesh["tensor"]

    def gather(self, size: float, axes: Sequence[str]) -> Stage:
        """Return the stage of an all-gather of `size` bytes sharded over adjacent mesh axes.

        A reduce-scatter of gradients of that size costs the same. Across hosts, each device
        receives one part, and the devices of a host exchange the parts over their links.
        """
        names = list(self.mesh)
        inner = math.prod(self.mesh[item] for item in names[names.index(axes[-1]) + 1 :])
        group = math.prod(self.mesh[item] for item in axes)
        num_linked = group
        if self.device.network:
            num_linked = min(group, max(self.device.num_local // inner, 1))
        network = (1 - num_linked / group) * size / num_linked
        return Stage(links=(1 - 1 / group) * size - network, network=network)

    def gather_weights(self, size: int) -> Stage:
        """Return the all-gather of the layers and embedding tables, with `size` bytes per value."""
        weights, mesh = self.weights, self.mesh
        tables = weights.table * (1 if self.model.tie_embeddings else 2)
        dense = size * (weights.dense + tables) / mesh["tensor"]
        experts = size * weights.experts / mesh["tensor"] / mesh["expert"]
        dense_gather = self.gather(dense, ("fsdp", "context", "expert"))
        expert_gather = self.gather(experts, ("fsdp", "context"))
        return overlap([dense_gather, expert_gather])

    def send_activations(
        self, tokens: float, *, sums: float = 2, has_backward: bool = False
    ) -> Stage:
        """Return the communication of activations.

        Along `tensor`, results are summed: attention and MLP in each layer, the embedding, and in
        the backward pass, in float32, the output layer. Along `expert`, the tokens of a layer are
        gathered and float32 sums are returned. Both axes are within a host.

        Args:
            tokens: Number of tokens on this device.
            sums: Number of sums per layer over all passes; experts need half that number.
            has_backward: True if there is a backward pass.
        """
        tensor, expert, layers = self.mesh["tensor"], self.mesh["expert"], self.model.num_layers
        hidden = tokens * self.model.width
        summed_bytes = 2 * (1 - 1 / tensor) * hidden * (2 * (sums * layers + 1) + 4 * has_backward)
        passes = sums / 2 * layers if self.model.num_experts else 0.0
        return Stage(links=summed_bytes + passes * (expert - 1) * hidden * (2 + 4))

    def forward_flops(self, tokens: float, length: int) -> float:
        """Return the forward FLOPs of all layers for tokens in causal sequences of `length`."""
        products = 2 * self.weights.layers / self.mesh["tensor"]
        # A state is multiplied by a query, by a key, and by a key and a value.
        return tokens * (products + self.attention * length / 2 + 6 * self.state)

    def decode_step(self, rows: int, context: float) -> list[Stage]:
        """Return the stages of a decoding step, which samples one token per row.

        Args:
            rows: Number of rows decoded concurrently on this device.
            context: Mean number of tokens that a row attends to.
        """
        weights, mesh, model = self.weights, self.mesh, self.model
        tensor, expert = mesh["tensor"], mesh["expert"]
        # Experts without tokens are not read. With more tokens, fewer experts have none.
        read = 1 - (1 - weights.active_share) ** (rows * expert)
        resident_weights = weights.dense + weights.table + read * weights.experts / expert
        cache = 2 * model.num_attention_layers * model.num_kv_heads * model.head_dim * 2 / tensor
        table = Stage(
            flops=2 * rows * (weights.layers + weights.table) / tensor,
            memory=2 * resident_weights / tensor,
        )
        attention_stage = Stage(
            flops=rows * context * self.attention, memory=rows * context * cache
        )
        states = Stage(flops=6 * rows * self.state, memory=2 * 4 * rows * self.state)
        logits = Stage(memory=2 * rows * model.vocab_size * 4 / tensor)
        return [table, attention_stage, states, logits, self.send_activations(rows)]

    def prefill(self, tokens: int, length: int) -> list[Stage]:
        """Return the stages of a prefill of `tokens` prompt and observation tokens."""
        weights, mesh = self.weights, self.mesh
        resident_weights = weights.dense + weights.experts / mesh["expert"]
        memory = 2 * (
            resident_weights / mesh["tensor"] + tokens * weights.activations / mesh["tensor"]
        )
        compute_stage = Stage(flops=self.forward_flops(tokens, length), memory=memory)
        return [compute_stage, self.send_activations(tokens)]

    def scoring(self, tokens: float, length: int) -> list[Stage]:
        """Return the stages of scoring, during which the weights are gathered.

        Args:
            tokens: Number of tokens on this device, after splitting rows over `context`.
            length: Number of tokens in a sequence.
        """
        weights, tensor = self.weights, self.mesh["tensor"]
        table = 2 * tokens * weights.table / tensor
        logits = 2 * 4 * tokens * self.model.vocab_size / tensor
        resident_weights = weights.dense + weights.table + weights.experts / self.mesh["expert"]
        memory = (
            2 * 2 * resident_weights / tensor + 2 * tokens * weights.activations / tensor + logits
        )
        compute_stage = Stage(flops=self.forward_flops(tokens, length) + table, memory=memory)
        return [overlap([compute_stage, self.gather_weights(2)]), self.send_activations(tokens)]

    def update(self, tokens: float, length: int, *, recomputes_layers: bool = True) -> list[Stage]:
        """Return the stages that add the gradient of a micro-batch of `tokens` to the sum.

        The backward pass has two matmuls for each forward matmul. Attention has five for every two,
        because scores are recomputed. The output layer is always recomputed, the layers only if
        `recomputes_layers`. Even then, the weights of a layer are gathered only twice.
        """
        weights, tensor, mesh = self.weights, self.mesh["tensor"], self.mesh
        attention = tokens * self.attention * length / 2
        products = self.forward_flops(tokens, length) - attention
        table = 2 * tokens * weights.table / tensor
        flops = (
            (4 if recomputes_layers else 3) * products
            + (4.5 if recomputes_layers else 3.5) * attention
            + 4 * table
        )
        resident_weights = weights.dense + weights.table + weights.experts / mesh["expert"]
        passes = 4 if recomputes_layers else 3
        logits = 6 * 4 * tokens * self.model.vocab_size / tensor
        device_params = weights.params / math.prod(
            mesh[item] for item in ("fsdp", "context", "expert")
        )
        memory = (
            2 * (passes + 1) * resident_weights / tensor
            + passes * 2 * tokens * weights.activations / tensor
            + logits
            + 2 * 4 * device_params / tensor
        )
        # Layers: forward, backward and gradients. Tables: once, and gradients in float32.
        weights_sent = [self.gather_weights(2)] * 3
        gradient_bytes = 2 * (1 - 1 / mesh["data"]) * 4 * device_params / tensor
        transfers = [*weights_sent, Stage(links=gradient_bytes)]
        compute_stage = Stage(flops=flops, memory=memory)
        # A recomputed layer does not need its MLP's sum; experts do.
        sums = 4 + recomputes_layers * (2 if self.model.num_experts else 1)
        return [
            overlap([compute_stage, *transfers]),
            self.send_activations(tokens, sums=sums, has_backward=True),
        ]

    def optimizer(self) -> list[Stage]:
        """Return the Adam update of this device's parameters: four reads, three writes, a norm."""
        device_params = self.weights.params / math.prod(
            self.mesh[item] for item in ("fsdp", "context", "expert", "tensor")
        )
        return [Stage(memory=(4 + 3 + 1) * 4 * device_params)]

    def weight_transfer(self) -> list[Stage]:
        """Return the gather of the sampler's weights, sharded over `tensor` and `expert` only."""
        weights = self.weights
        resident_weights = weights.dense + 2 * weights.table + weights.experts / self.mesh["expert"]
        memory = Stage(memory=2 * 2 * resident_weights / self.mesh["tensor"])
        return [overlap([memory, self.gather_weights(2)])]


def overlap(stages: Stages) -> Stage:
    """Merge stages into one in which they all overlap."""
    return Stage(
        flops=sum(item.flops for item in stages),
        memory=sum(item.memory for item in stages),
        links=sum(item.links for item in stages),
        network=sum(item.network for item in stages),
    )


def repeat_stages(stages: Stages, count: float) -> list[Stage]:
    """Repeat stages `count` times."""

    def scale_fields(item: Stage) -> dict[str, Any]:
        return {name: count * value for name, value in vars(item).items()}

    return [Stage(**scale_fields(item)) for item in stages]
