"""Qwen3-MoE: Qwen3's decoder with experts instead of MLPs in some layers.

The parameter tree is that of `qwen`, except that `blocks/mlp` contains only the dense layers. The N
other layers have E experts each and, optionally, a shared expert that every token uses:

    blocks/moe/router/kernel                        [N, D, E]
    blocks/moe/{gate,up}/kernel                     [N, E, D, F]
    blocks/moe/down/kernel                          [N, E, F, D]
    blocks/shared_expert/{gate,up}/kernel           [N, D, S]
    blocks/shared_expert/down/kernel                [N, S, D]
    blocks/shared_expert/output_gate/kernel         [N, D, 1]       (HF: shared_expert_gate)

A softmax over all experts selects the top k for each token (`experts/routing.py`). Tokens are
sorted by expert for the matmuls (`experts/dispatch.py`).

A family with other layers inherits from `QwenMoeConfig` first, then from its dense decoder: all
methods call `super()`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxrl.extras.experts import routing
from jaxrl.extras.experts.choice import resolve_kernel_name, select_kernels
from jaxrl.extras.experts.dispatch import XLA, ExpertKernels
from jaxrl.extras.experts.routing import ROUTED_EXPERTS, RoutingResults
from jaxrl.models.architecture import FusedTensor, KernelCheck, MemoryTerms
from jaxrl.models.aux_arrays import AuxArrays, TokenArraySpec
from jaxrl.models.decoder import check_model_type, linear, project, read_positive_int
from jaxrl.models.defaults import fill_hf_defaults
from jaxrl.models.layers import Stacks
from jaxrl.models.qwen import MLP, QwenConfig
from jaxrl.runtime.compilation import join_keys
from jaxrl.types import Params
from jaxrl.utils.json_io import drop_nulls

_MLP = "model.layers.{}.mlp."
_EXPERT = _MLP + "experts.{}."
HF_NAMES = {
    "blocks/moe/router/kernel": _MLP + "gate.weight",
    "blocks/moe/gate/kernel": _EXPERT + "gate_proj.weight",
    "blocks/moe/up/kernel": _EXPERT + "up_proj.weight",
    "blocks/moe/down/kernel": _EXPERT + "down_proj.weight",
    **{
        f"blocks/shared_expert/{name}/kernel": f"{_MLP}shared_expert.{name}_proj.weight"
        for name in ("gate", "up", "down")
    },
    "blocks/shared_expert/output_gate/kernel": _MLP + "shared_expert_gate.weight",
}
"""HF names in addition to those of `qwen`; the second `{}` is the expert index."""

_SIZES = (
    "moe_intermediate_size",
    "num_experts_per_tok",
    "decoder_sparse_step",
)

RoutingState = tuple[jax.Array, RoutingResults]
"""Index of the next expert layer, and the routing results of the layers so far."""


class ExpertLinear(nnx.Module):
    """Linear layer with one matrix per expert."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        init_kernel = nnx.initializers.lecun_normal(batch_axis=0)
        self.kernel = nnx.Param(init_kernel(rngs.params(), (num_experts, inputs, outputs)))


class MoE(nnx.Module):
    """Mixture-of-experts layer: a router and its experts."""

    def __init__(self, config: QwenMoeConfig, *, rngs: nnx.Rngs):
        E, D, F = config.num_experts, config.width, config.expert_width
        self.router = nnx.Linear(D, E, use_bias=False, rngs=rngs)
        self.gate = ExpertLinear(E, D, F, rngs=rngs)
        self.up = ExpertLinear(E, D, F, rngs=rngs)
        self.down = ExpertLinear(E, F, D, rngs=rngs)


class SharedExpert(MLP):
    """Weights of the shared expert: a SwiGLU MLP and its output gate."""

    def __init__(self, config: QwenMoeConfig, *, rngs: nnx.Rngs):
        super().__init__(replace(config, mlp_width=config.shared_width), rngs=rngs)
        self.output_gate = nnx.Linear(config.width, 1, use_bias=False, rngs=rngs)


@dataclass(frozen=True, kw_only=True)
class QwenMoeConfig(QwenConfig):
    """Config of a Qwen3-MoE model, read from its `config.json`, with its expert kernels.

    Attributes:
        experts: Function that applies a layer's experts, selected by `with_kernels`.
    """

    expert_width: int
    num_experts: int
    top_k: int  # experts per token
    renormalize: bool  # True if a token's expert weights sum to 1
    expert_layers: tuple[int, ...]  # sorted indices of the layers with experts
    shared_width: int = 0  # inner width of the shared expert; 0 without one
    experts: ExpertKernels = field(
        default=XLA, compare=False
    )  # excluded, so that a model is equal on every mesh

    @property
    def program_key(self) -> Hashable:
        """See `Architecture.program_key`."""
        return join_keys(super().program_key, self.experts)

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> QwenMoeConfig:
        """Build the config from a `config.json` with old or new field names.

        Raises:
            ValueError: See `QwenConfig.from_dict`, or the numbers of experts are inconsistent.
        """
        check_model_type(fields, ["qwen3_moe"], source)
        # The dense decoder is Qwen3's.
        filled = fill_hf_defaults(fields, "qwen3_moe", source=source)
        if {"hidden_size", "num_attention_heads"} <= filled.keys():  # `qwen3`: 128
            width, heads = filled["hidden_size"], filled["num_attention_heads"]
            filled.setdefault("head_dim", width // heads)
        dense = QwenConfig.from_dict({**filled, "model_type": "qwen3"}, source=source)
        return cls(**vars(dense), **read_expert_fields(fields, filled, source))

    def to_hf_config(self) -> dict[str, Any]:
        """Return the `config.json` fields; the inverse of `from_dict`."""
        return {
            **super().to_hf_config(),
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": self.expert_width,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": self.renormalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": self._dense_layers,
            **({"shared_expert_intermediate_size": self.shared_width} if self.shared_width else {}),
        }

    @property
    def _dense_layers(self) -> list[int]:
        return [layer for layer in range(self.num_layers) if layer not in self.expert_layers]

    @property
    def partial_layer_indices(self) -> Stacks:
        """Indices of the layers with an MLP and with experts, unless all have experts."""
        if not self._dense_layers:
            return super().partial_layer_indices
        experts = {"moe": self.expert_layers}
        if self.shared_width:
            experts["shared_expert"] = self.expert_layers
        return {**super().partial_layer_indices, "mlp": tuple(self._dense_layers), **experts}

    def declare_feed_forward(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """Declare the experts, and an MLP if some layers are dense."""
        modules = super().declare_feed_forward(rngs) if self._dense_layers else {}
        modules["moe"] = MoE(self, rngs=rngs)
        if self.shared_width:
            modules["shared_expert"] = SharedExpert(self, rngs=rngs)
        return modules

    def get_feed_forward_axes(self) -> dict[str, Any]:
        """Return the axis names.

        Experts are sharded over `expert`; the weights of each expert are sharded like an MLP's.
        """
        gate_up = {"kernel": ("layer", "expert", "width of an expert", "mlp")}
        moe = {
            "router": {"kernel": ("layer", "width", None)},
            "gate": gate_up,
            "up": gate_up,
            "down": {"kernel": ("layer", "expert", "mlp", "width of an expert")},
        }
        dense = super().get_feed_forward_axes()
        axes = {**(dense if self._dense_layers else {}), "moe": moe}
        if self.shared_width:
            gate = {"kernel": ("layer", "width", None)}
            axes["shared_expert"] = {**dense["mlp"], "output_gate": gate}
        return axes

    def prepare_training_weights(self, params: Params, dtype: DTypeLike) -> Params:
        """Cast all weights except those of routers, which are cast in the router's matmul."""
        weights = super().prepare_training_weights(params, dtype)
        moe = {**weights["blocks"]["moe"], "router": params["blocks"]["moe"]["router"]}
        return {**weights, "blocks": {**weights["blocks"], "moe": moe}}

    def list_linear_layers(self) -> tuple[str, ...]:
        """Return the paths of the dense model's linear layers, without routers and experts."""
        return tuple(
            name for name in super().list_linear_layers() if not name.startswith("blocks/moe/")
        )

    @property
    def recorded_specs(self) -> Mapping[str, TokenArraySpec]:
        """Spec of the selected experts of each token. Invalid indices mark unknown experts."""
        dtype = routing.select_index_dtype(self.num_experts)
        shape = len(self.expert_layers), self.top_k
        return {ROUTED_EXPERTS: TokenArraySpec(shape=shape, dtype=dtype, fill=np.iinfo(dtype).max)}

    def with_kernels(
        self, mesh: Mesh, *, experts: str, check_dtype: DTypeLike | None = None
    ) -> QwenMoeConfig:
        """See `Architecture.with_kernels`."""
        return replace(
            self, experts=select_kernels(experts, mesh, self.width, self.expert_width, check_dtype)
        )

    def check_kernels(self, platform: str, *, experts: str, dtype: DTypeLike) -> None:
        """See `Architecture.check_kernels`."""
        resolve_kernel_name(experts, platform, dtype)

    @property
    def kernel_summary(self) -> str:
        """Log line with the expert kernel and the reason for its selection."""
        return f"experts: {self.experts.name}, {self.experts.reason}"

    @property
    def kernel_checks(self) -> tuple[KernelCheck, ...]:
        """Self-test results of the expert kernels."""
        return self.experts.kernel_checks

    @property
    def statistics_reader(self) -> routing.RouterStatistics:
        """Reader of the router statistics."""
        return routing.RouterStatistics()

    def init_extra_state(self, aux: AuxArrays, num_tokens: int) -> RoutingState:
        """Return expert-layer index 0 and empty routing results."""
        results = routing.init_results(
            aux,
            num_layers=len(self.expert_layers),
            num_tokens=num_tokens,
            top_k=self.top_k,
            num_experts=self.num_experts,
        )
        return jnp.zeros((), jnp.int32), results

    def store_extra_state(self, aux: AuxArrays, extra_state: RoutingState) -> None:
        """Store the selected experts and their usage in `aux`."""
        routing.store_results(aux, extra_state[1])

    def apply_feed_forward_with_aux(
        self, layer: Params, x: Float[Array, "M D"], extra_state: RoutingState, aux: AuxArrays
    ) -> tuple[Float[Array, "M D"], RoutingState]:
        """Apply the experts and the shared expert, or the MLP in a dense layer."""
        if "moe" not in layer:
            return self.apply_feed_forward(layer, x), extra_state
        layer_index, results = extra_state
        kernels = {name: part["kernel"] for name, part in layer["moe"].items()}
        router = kernels.pop("router")
        logits = project("dv", x, router.astype(x.dtype), router)
        layer_routing = routing.route_tokens(
            checkpoint_name(logits, "router"),
            top_k=self.top_k,
            renormalize=self.renormalize,
            replayed_ids=routing.get_replayed_ids(aux, layer_index),
        )
        added = self.experts(x, kernels, layer_routing.topk_ids, layer_routing.topk_weights)
        if shared := layer.get("shared_expert"):
            share = jax.nn.sigmoid(checkpoint_name(linear(shared["output_gate"], x), "gate"))
            added = added + share * self.apply_feed_forward({"mlp": shared}, x)
        return added, (
            layer_index + 1,
            routing.record_layer_routing(aux, results, layer_index, layer_routing),
        )

    def get_feed_forward_hf_names(self) -> dict[str, str]:
        """Return the HF names of the MLP, the router and all experts."""
        return {**super().get_feed_forward_hf_names(), **HF_NAMES}

    def get_hf_fused_tensors(self) -> dict[str, FusedTensor]:
        """Return the tensors into which transformers 5 fuses the experts of each layer."""
        E, D, F = self.num_experts, self.width, self.expert_width
        names = self.get_hf_names()
        gate, up, down = (names[f"blocks/moe/{name}/kernel"] for name in ("gate", "up", "down"))
        experts = down.removesuffix("{}.down_proj.weight")
        fused = {}
        for layer in self.expert_layers:
            gate_up_slices = {
                name.format(layer, expert): (expert, rows)
                for expert in range(E)
                for name, rows in ((gate, range(F)), (up, range(F, 2 * F)))
            }
            down_slices = {down.format(layer, expert): (expert, range(D)) for expert in range(E)}
            base = experts.format(layer)
            fused[f"{base}gate_up_proj"] = FusedTensor(shape=(E, 2 * F, D), slices=gate_up_slices)
            fused[f"{base}down_proj"] = FusedTensor(shape=(E, D, F), slices=down_slices)
        return fused

    def estimate_layer_memory(self, tensor: int) -> MemoryTerms:
        """Estimate the memory of a dense layer whose MLP has the larger of two widths.

        The widths are those of the MLP and the shared expert.
        """
        width = max(self.mlp_width if self._dense_layers else 0, self.shared_width)
        return super(QwenMoeConfig, replace(self, mlp_width=width)).estimate_layer_memory(tensor)

    def estimate_expert_memory(self, tensor: int, expert: int) -> MemoryTerms:
        """Estimate the memory of a layer's experts, including buffers for all gathered tokens."""
        rows = expert * min(self.top_k, self.num_experts // expert)
        pairs = expert * self.top_k
        width = self.expert_width
        inner = width if width % tensor else width // tensor
        computed = rows * (2 * self.width + 3 * inner)
        return MemoryTerms(
            activations=2 * computed + 2 * pairs * self.width,
            saved_activations={
                "none": computed + pairs * self.width,
                "dots": 0,
                "names": 2 * rows * inner + 2 * self.num_experts,
            },
            # A forward pass holds one array of pairs at full width and two at the inner width.
            prefill_activations=rows * (self.width + 2 * inner),
            # Of six arrays at full and six at inner width, a GPU stores five and four; a TPU fewer.
            reused_activations=rows * (self.width + 2 * inner),
        )


def read_expert_fields(
    fields: dict[str, Any], filled: dict[str, Any], source: str
) -> dict[str, Any]:
    """Read the fields that `QwenMoeConfig` adds to its dense decoder.

    Args:
        fields: Fields of a `config.json`.
        filled: The same fields after `fill_hf_defaults`.
        source: File name for error messages.

    Raises:
        ValueError: The numbers of experts are inconsistent.
    """
    original, fields = fields, drop_nulls(filled)
    num_layers = read_positive_int(fields, "num_hidden_layers", source)
    sizes = {name: read_positive_int(fields, name, source) for name in _SIZES}
    # transformers 5 renames this field; `fill_hf_defaults` adds a default for the new name.
    is_old = original.get("num_local_experts") is None and "num_experts" in fields
    name = "num_experts" if is_old else "num_local_experts"
    sizes["num_experts"] = read_positive_int(fields, name, source)
    num_experts, top_k = sizes["num_experts"], sizes["num_experts_per_tok"]
    if top_k > num_experts:
        raise ValueError(
            f"{source}: 'num_experts_per_tok' is {top_k}, but there are {num_experts} experts."
        )
    # Every `step`-th layer has experts, except those listed as dense.
    dense_layers, step = fields["mlp_only_layers"], sizes["decoder_sparse_step"]
    expert_layers = tuple(
        i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense_layers
    )
    if not expert_layers:
        raise ValueError(
            f"{source}: 'decoder_sparse_step' of {step} and 'mlp_only_layers' leave no layer "
            "with experts; a dense model has another model_type."
        )
    return {
        "expert_width": sizes["moe_intermediate_size"],
        "num_experts": num_experts,
        "top_k": top_k,
        "renormalize": bool(fields["norm_topk_prob"]),
        "expert_layers": expert_layers,
    }
