"""Interface of a model to everything outside this folder.

An architecture is a frozen dataclass: its fields are the sizes of one model, its methods compute
with that model's parameters. The parameters are a nested dict: `blocks` holds the layers, every
array with a leading layer axis; each other entry, such as an embedding, is a dict of arrays. All
computation is pure, so callers can jit, split and differentiate it.
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
from jaxrl.models.aux_arrays import Statistics, TokenArraySpec
from jaxrl.models.layers import Attend, LayerScan, SamplerLayerScan, Stacks
from jaxrl.models.params import ParamSpec, split_params
from jaxrl.types import Params
from jaxrl.utils.callables import is_user_code


@dataclass(frozen=True, kw_only=True)
class MemoryTerms:
    """Per-layer memory for the planner, in values per token on one device.

    Attributes:
        activations: Peak while the layer is differentiated.
        saved_activations: Values saved for the backward pass under each `model.remat` except `full`
            and `offload`, without the layer's input and without scores.
        prefill_activations: Peak during prefill of prompts and observations.
        reused_activations: Part of the experts' `activations` whose memory an accelerator shares
            with others.
    """

    activations: int
    saved_activations: dict[str, int]
    prefill_activations: int
    reused_activations: int = 0


@dataclass(frozen=True, kw_only=True)
class FusedTensor:
    """An HF tensor that fuses several tensors.

    Attributes:
        shape: Shape of the fused tensor, three axes.
        slices: For each name in `hf_names`, the index of its matrix and the range of its rows.
    """

    shape: tuple[int, int, int]
    slices: dict[str, tuple[int, range]]


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """Result of a kernel's self-test.

    Attributes:
        operation: Operation that the kernel computes.
        kernel: Kernel's name in the configuration.
        is_sound: True if the kernel may be used.
        finding: Measured error, or how the kernel failed; one line.
    """

    operation: str
    kernel: str
    is_sound: bool
    finding: str


class Architecture(ABC):
    """Sizes of one model, and the computation with its parameters."""

    vocab_size: int  # V, ids in the embedding and output tables
    width: int  # D, of the hidden states
    num_layers: int  # L
    num_heads: int  # N, of queries
    num_kv_heads: int  # K, of keys and values, as in the KV cache
    head_dim: int  # H, of keys and values
    max_positions: int  # tokens of the longest sequence
    tie_embeddings: bool  # the output layer is the embedding
    head_dtype: str = ""  # of the output layer's product; "": the compute dtype
    num_experts: int = 0  # per MoE layer; `mesh.expert` splits them
    tower: Tower | None = None  # encoder of attachments such as images; None in a text model

    @property
    def program_key(self) -> Hashable:
        """Return a key that is equal only for architectures with the same compiled programs.

        None equals nothing: a user's class may have been edited and reloaded.
        """
        return None if is_user_code(type(self)) else self

    @property
    def unwrapped(self) -> Architecture:
        """Return the model without a wrapper around it."""
        return self

    @property
    def wrapper(self) -> Any:
        """Return this architecture if it is a `WrappedArchitecture`, else None."""
        return None

    def param_specs(self, frozen: Sequence[str] = ()) -> tuple[ParamSpec, ParamSpec]:
        """Return the specs of the trained parameters and of the `frozen` entries."""
        return split_params(self, lambda path: path[0] not in frozen)

    @property
    def recorded(self) -> Mapping[str, TokenArraySpec]:
        """Return the per-token arrays that a pass records and a later pass can replay."""
        return {}

    def on_mesh(
        self, mesh: Mesh, *, experts: str, check_dtype: DTypeLike | None = None
    ) -> Architecture:
        """Return this model with the kernels for a mesh.

        Args:
            mesh: Mesh that runs the model.
            experts: Value of `config.model.experts`.
            check_dtype: Dtype with which kernels are self-tested; None runs no test.

        Raises:
            ValueError: The kernels do not run on the devices, or fail there. Names the config key.
        """
        return self

    def check_kernels(self, platform: str, *, experts: str, dtype: DTypeLike) -> None:
        """Raise what `on_mesh` would for a platform and dtype, without needing the devices.

        Raises:
            ValueError: The kernels do not run on the platform. Names the config key.
        """
        return  # most models have no kernels except attention

    def with_head_dtype(self, dtype: str) -> Architecture:
        """Return this model with an output layer that multiplies in its own dtype.

        Sampler and trainer both read its table and the hidden states in that dtype. The model
        stores it as `head_dtype`, and `output` names the table's entry.

        Raises:
            ValueError: The architecture does not support this. Names the config key.
        """
        raise ValueError(
            f"config.model.head_dtype is {dtype!r}, but the architecture {type(self).__name__} "
            "computes its output layer in config.model.dtype alone (it defines no with_head); set "
            "the key to ''."
        )

    @property
    def output(self) -> str:
        """Return the parameter entry of the output layer's table; "" without `with_head_dtype`."""
        return ""

    @property
    def kernel_summary(self) -> str:
        """Return the kernels of `on_mesh` other than attention, for the log, or ""."""
        return ""

    @property
    def kernel_checks(self) -> tuple[KernelCheck, ...]:
        """Return the self-test results of the kernels of `on_mesh`."""
        return ()

    @property
    def statistics(self) -> Statistics | None:
        """Return the reader of the sums in `AuxArrays.statistics`, or None."""
        return None

    @property
    def stacks(self) -> Stacks:
        """Return the entries of `blocks` that only some layers have, with those layers."""
        return {}

    @classmethod
    @abstractmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> Architecture:
        """Build the model from a parsed `config.json`; `source` names the file in errors.

        Raises:
            ValueError: The file requires an unsupported feature.
        """

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """Return a `config.json` for a model that was not loaded from one."""

    @abstractmethod
    def abstract_params(self) -> Params:
        """Return the parameters as `jax.ShapeDtypeStruct`s, without allocating them."""

    @abstractmethod
    def logical_axes(self) -> dict[str, Any]:
        """Return axis names as a tree like the parameters'; see `sharding.RULES`."""

    def decode_axes(self) -> dict[str, Any]:
        """Return axis names of `decode_weights`; some weights may be on some devices only."""
        return self.logical_axes()

    @abstractmethod
    def hf_names(self) -> dict[str, str]:
        """Return the HF tensor name of each parameter path, `/` between names.

        The first `{}` is the layer; a second one indexes the parameter's next axis, such as
        experts. The order is that of an export. A `kernel` is [in, out] here and [out, in] in HF
        files.
        """

    def hf_prefix_map(self) -> dict[str, str]:
        """Return alternative prefixes of tensor names, mapped to those in `hf_names`."""
        return {}

    def linear_layers(self) -> tuple[str, ...]:
        """Return the layers of `blocks` that use `decoder.linear`, such as `blocks/attention/q`.

        These support adapters and int8 weights; each has a `kernel` [L, in, out].
        """
        return ()

    def hf_tied_names(self) -> dict[str, str]:
        """Map redundant HF tensors that a folder may contain to the tensors they duplicate."""
        return {}

    def hf_fused_tensors(self) -> dict[str, FusedTensor]:
        """Return HF tensors that a folder may contain in place of several of `hf_names`."""
        return {}

    @abstractmethod
    def train_weights(self, params: Params, dtype: DTypeLike) -> Params:
        """Return the weights as `hidden_states` and `unembed` read them during training.

        Entries outside `blocks` may hold arrays that are not parameters; these are sharded like the
        entry's first parameter.
        """

    @abstractmethod
    def decode_weights(self, params: Params, dtype: DTypeLike) -> Params:
        """Return the weights for `sampler_hidden_states` and `unembed`; `blocks` stay stacked."""

    @abstractmethod
    def hidden_states(
        self,
        params: Params,
        token_ids: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        attend: Attend,
        layer_scan: LayerScan,
    ) -> Float[Array, "R T D"]:
        """Compute the final hidden states of packed rows.

        With attachments, `layer_scan.aux` has the arrays of `Tower.input_arrays`, whose positions
        replace `positions`, and as attached `patches` and `places`, see `Tower.encode`.

        Args:
            params: Parameters, or their `train_weights`.
            token_ids: Rows, or pieces of rows (`config.mesh.context`): tokens interact only through
                `attend`.
            positions: Position of each token in its own sequence.
            attend: Masked attention over the R * T tokens, row by row, for every layer.
            layer_scan: Iterates over the layers and sets what the backward pass recomputes.
        """

    @abstractmethod
    def unembed(
        self, params: Params, hidden: Float[Array, "... D"], *, num_tokens: int
    ) -> Float[Array, "... V"]:
        """Compute float32 logits; ids from `num_tokens` on are padding and get the lowest value."""

    @abstractmethod
    def sampler_hidden_states(
        self,
        weights: Params,
        token_ids: Int[Array, " M"],
        positions: Int[Array, " M"],
        layer_scan: SamplerLayerScan,
    ) -> Float[Array, "M D"]:
        """Compute the final hidden states of M tokens, of one row or of many, in the sampler.

        With a tower, `layer_scan.aux` may have the arrays of `Tower.input_arrays`, whose positions
        replace `positions`, and as attached the result of `Tower.encode`, `[S, U, E]` for S
        shards.

        Args:
            weights: Result of `decode_weights`.
            token_ids: Token ids.
            positions: Position of each token in its own sequence.
            layer_scan: Iterates over `blocks` and passes each layer an `attend`, to be called once,
                which lets each token read its sequence up to itself.
        """

    @abstractmethod
    def memory_terms(self, tensor: int) -> MemoryTerms:
        """Return a layer's terms without experts; heads and inner width split over `tensor`."""

    def expert_terms(self, tensor: int, expert: int) -> MemoryTerms:
        """Return the terms added by a layer's experts, split over `expert` and `tensor` devices."""
        raise NotImplementedError

    @property
    def num_inactive_params(self) -> int:
        """Return the number of expert parameters that a token does not use."""
        return 0


def is_axes(node: Any) -> bool:
    """Return True if a node holds one array's axis names; a tuple of dicts holds layers instead."""
    return isinstance(node, tuple) and not any(isinstance(part, dict) for part in node)
