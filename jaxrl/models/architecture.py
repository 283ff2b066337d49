"""Model interface used by the rest of jaxrl.

An architecture is a frozen dataclass: its fields are the sizes of one model, and its methods
compute with that model's parameters. The parameters are a nested dict. `blocks` holds the layers,
stacked along a leading layer axis. Each other module, such as the embedding, is a dict of arrays.
All computation is pure, so callers can jit, shard and differentiate it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.models.attachments import Tower
from jaxrl.models.aux_arrays import StatisticsReader, TokenArraySpec
from jaxrl.models.layers import Attend, LayerScan, SamplerLayerScan, Stacks
from jaxrl.models.params import ParamSpec, split_param_specs
from jaxrl.models.recurrence import StateSpecs
from jaxrl.types import Params
from jaxrl.utils.callables import is_user_code


@dataclass(frozen=True, kw_only=True)
class MemoryTerms:
    """Per-layer memory estimates for the planner, in values per token per device.

    Attributes:
        activations: Peak during the layer's backward pass.
        saved_activations: Values saved for the backward pass, by `model.remat` mode except `full`
            and `offload`. Excludes the layer's input and the attention scores.
        prefill_activations: Peak during prefill of prompts and observations.
        reused_activations: Part of the experts' `activations` that, on an accelerator, reuses the
            memory of other arrays.
    """

    activations: int
    saved_activations: dict[str, int]
    prefill_activations: int
    reused_activations: int = 0


@dataclass(frozen=True, kw_only=True)
class FusedTensor:
    """HF tensor that stacks several matrices, each with its own name in `get_hf_names`.

    Attributes:
        shape: Shape of the fused tensor: matrices, rows, columns.
        slices: Matrix index and row range of each separate tensor, by its name in `get_hf_names`.
    """

    shape: tuple[int, int, int]
    slices: dict[str, tuple[int, range]]


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """Result of a kernel's self-test.

    Attributes:
        operation: Display name of the operation.
        kernel: Kernel name, as in the config.
        is_sound: True if the kernel may be used.
        finding: Measured error or reason for the failure, in one line.
    """

    operation: str
    kernel: str
    is_sound: bool
    finding: str


class Architecture(ABC):
    """Interface of a model: its sizes, and pure functions of its parameters."""

    vocab_size: int  # V, ids in the embedding and output tables
    width: int  # D, width of the hidden states
    num_layers: int  # L
    num_heads: int  # N, query heads
    num_kv_heads: int  # K, KV heads
    head_dim: int  # H, head size
    max_positions: int  # maximum sequence length in tokens
    tie_embeddings: bool  # True if the output layer is the embedding
    head_dtype: str = ""  # dtype of the output layer's matmul; "": the compute dtype
    num_experts: int = 0  # experts per MoE layer; `mesh.expert` splits them
    tower: Tower | None = None  # encoder of attachments such as images; None in a text model
    recurrent_module: str = ""  # module of `blocks` that only recurrent layers have; "" for none

    @property
    def program_key(self) -> Hashable:
        """Return a cache key: architectures with equal keys share compiled programs.

        User classes return None, which disables sharing: they may have been edited and reloaded.
        """
        return None if is_user_code(type(self)) else self

    @property
    def unwrapped(self) -> Architecture:
        """Return the wrapped model, or this model if it wraps none."""
        return self

    @property
    def wrapper(self) -> Any:
        """Return this architecture if it is a `WrappedArchitecture`, else None."""
        return None

    def make_param_specs(self, frozen: Sequence[str] = ()) -> tuple[ParamSpec, ParamSpec]:
        """Return specs of the trained and the frozen parameters; `frozen` lists frozen modules."""
        return split_param_specs(self, lambda path: path[0] not in frozen)

    @property
    def recorded_specs(self) -> Mapping[str, TokenArraySpec]:
        """Return the specs of per-token arrays that one pass records and another can replay."""
        return {}

    def with_kernels(
        self, mesh: Mesh, *, experts: str, check_dtype: DTypeLike | None = None
    ) -> Architecture:
        """Return a copy of this model that uses the kernels for `mesh`.

        Args:
            mesh: Mesh that runs the model.
            experts: Value of `config.model.experts`.
            check_dtype: Dtype of the kernels' self-tests; None skips them.

        Raises:
            ValueError: The devices do not support the kernels, or a self-test fails. The message
                names the config key.
        """
        return self

    def check_kernels(self, platform: str, *, experts: str, dtype: DTypeLike) -> None:
        """Check that the kernels support a platform and dtype, without using devices.

        Raises:
            ValueError: The kernels do not support them. The message names the config key.
        """
        return  # most models have no kernels except attention

    def with_head_dtype(self, dtype: str) -> Architecture:
        """Return a copy of this model whose output layer computes in `dtype`.

        The sampler and the trainer cast the output weights and the hidden states to `dtype`. The
        copy stores it as `head_dtype`.

        Raises:
            ValueError: The architecture does not support a separate head dtype.
        """
        raise ValueError(
            f"config.model.head_dtype is {dtype!r}, but the architecture {type(self).__name__} "
            "supports only config.model.dtype (it does not define with_head_dtype); set "
            "the key to ''."
        )

    @property
    def output_module(self) -> str:
        """Return the module that holds the output weights, such as "lm_head".

        "" if the architecture does not implement `with_head_dtype`.
        """
        return ""

    @property
    def kernel_summary(self) -> str:
        """Return a log line about the kernels other than attention, or ""."""
        return ""

    @property
    def kernel_checks(self) -> tuple[KernelCheck, ...]:
        """Return the self-test results of the kernels that `with_kernels` selected."""
        return ()

    @property
    def statistics_reader(self) -> StatisticsReader | None:
        """Return the object that turns `AuxArrays.statistics` into metrics and a loss, or None."""
        return None

    @property
    def partial_layer_indices(self) -> Stacks:
        """Return the layer indices of each module of `blocks` that only some layers have."""
        return {}

    @property
    def state_specs(self) -> StateSpecs:
        """Return specs of one sequence's state in a recurrent layer; {} without such layers."""
        return {}

    @property
    def num_recurrent_layers(self) -> int:
        """Return the number of layers with a state instead of keys and values."""
        return len(self.partial_layer_indices.get(self.recurrent_module, ()))

    @property
    def num_attention_layers(self) -> int:
        """Return the number of layers with keys and values, at least 1."""
        return self.num_layers - self.num_recurrent_layers

    @classmethod
    @abstractmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> Architecture:
        """Create the architecture from a parsed `config.json`; `source` names the file in errors.

        Raises:
            ValueError: The model needs an unsupported feature.
        """

    @abstractmethod
    def to_hf_config(self) -> dict[str, Any]:
        """Return the `config.json` fields to write if there is no source `config.json`."""

    @abstractmethod
    def make_abstract_params(self) -> Params:
        """Return the parameters as `jax.ShapeDtypeStruct`s, without allocating them."""

    @abstractmethod
    def get_logical_axes(self) -> dict[str, Any]:
        """Return a tree with the axis names of each parameter; see `LOGICAL_AXIS_RULES`."""

    def get_decoding_axes(self) -> dict[str, Any]:
        """Return the axis names of `prepare_decoding_weights`; these may depend on the platform."""
        return self.get_logical_axes()

    @abstractmethod
    def get_hf_names(self) -> dict[str, str]:
        """Return the HF tensor name of each parameter path (keys joined by `/`), in export order.

        The first `{}` is the layer index. A second `{}` is the index along the parameter's next
        axis, such as the expert. A `kernel` is [in, out] here and [out, in] in HF files.
        """

    def get_hf_prefix_map(self) -> dict[str, str]:
        """Map alternative prefixes of HF tensor names to the prefixes in `get_hf_names`."""
        return {}

    def list_linear_layers(self) -> tuple[str, ...]:
        """Return the paths of layers that use `decoder.linear`, such as `blocks/attention/q`.

        These support adapters and int8 weights. Each has a `kernel` [L, in, out].
        """
        return ()

    def get_hf_passthrough_prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of HF tensors that are unused but copied unchanged to an export."""
        return ()

    def get_hf_module_prefixes(self) -> dict[str, str]:
        """Map prefixes in `get_hf_names` to the prefixes of modules in transformers."""
        return {canonical: prefix for prefix, canonical in self.get_hf_prefix_map().items()}

    def get_hf_tied_names(self) -> dict[str, str]:
        """Return, for each redundant HF tensor in some folders, the name of its original."""
        return {}

    def get_hf_fused_tensors(self) -> dict[str, FusedTensor]:
        """Return fused HF tensors that some folders store instead of those in `get_hf_names`."""
        return {}

    @abstractmethod
    def prepare_training_weights(self, params: Params, dtype: DTypeLike) -> Params:
        """Convert parameters to the weights for `compute_hidden_states` and `unembed` in training.

        A module outside `blocks` may hold additional arrays, sharded like its first parameter.
        """

    @abstractmethod
    def prepare_decoding_weights(self, params: Params, dtype: DTypeLike) -> Params:
        """Convert parameters to the sampler's weights; `blocks` stay stacked."""

    @abstractmethod
    def compute_hidden_states(
        self,
        params: Params,
        token_ids: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        attend: Attend,
        layer_scan: LayerScan,
    ) -> Float[Array, "R T D"]:
        """Compute the final hidden states of packed rows.

        With attachments, `layer_scan.aux.inputs` holds the arrays of `Tower.input_arrays`; their
        positions replace `positions`. `layer_scan.aux.attached` then holds the arguments `patches`
        and `coords` of `Tower.encode`. A recurrent layer calls `layer_scan.run_recurrence` instead
        of `attend`.

        Args:
            params: Parameters, or their `prepare_training_weights`.
            token_ids: Token ids of rows, or of pieces of rows (`config.mesh.context`). Tokens
                interact only through `attend`.
            positions: Position of each token in its sequence.
            attend: Masked attention within each row, for all R * T tokens and every layer.
            layer_scan: Loop over the layers, which also applies `config.model.remat`.
        """

    @abstractmethod
    def unembed(
        self, params: Params, hidden: Float[Array, "... D"], *, num_tokens: int
    ) -> Float[Array, "... V"]:
        """Compute float32 logits; ids >= `num_tokens` are masked out as padding."""

    @abstractmethod
    def compute_sampler_hidden_states(
        self,
        weights: Params,
        token_ids: Int[Array, " M"],
        positions: Int[Array, " M"],
        layer_scan: SamplerLayerScan,
    ) -> Float[Array, "M D"]:
        """Compute the final hidden states of M tokens, from one or more rows, in the sampler.

        With a tower, `layer_scan.aux.inputs` may hold the arrays of `Tower.input_arrays`; their
        positions then replace `positions`. `layer_scan.aux.attached` then holds the result of
        `Tower.encode`, `[S, U, E]` for S shards.

        Args:
            weights: Result of `prepare_decoding_weights`.
            token_ids: Token ids.
            positions: Position of each token in its sequence.
            layer_scan: Loop over `blocks`. A layer with the module `recurrent_module` receives
                `run_recurrence`; every other layer receives a causal `attend`. The layer must call
                this function exactly once.
        """

    @abstractmethod
    def estimate_layer_memory(self, tensor: int) -> MemoryTerms:
        """Return the memory of one layer without experts, split over `tensor` devices."""

    def estimate_expert_memory(self, tensor: int, expert: int) -> MemoryTerms:
        """Return the memory of one layer's experts, split over `expert` * `tensor` devices."""
        raise NotImplementedError


def is_axes_leaf(node: Any) -> bool:
    """Return True if `node` has the axis names of one array, False if it is a tuple of layers."""
    return isinstance(node, tuple) and not any(isinstance(part, dict) for part in node)
