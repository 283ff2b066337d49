"""Architectures: a model as everything outside this folder knows it.

An architecture is a frozen dataclass: its fields are the sizes of one model, its methods compute
with that model's parameters. The parameters are a nested dict: `blocks` holds the layers, every
array with a leading axis over them; each other entry, an embedding say, is a dict of arrays. All
compute is pure, so that callers jit, split and differentiate it as they need.
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
from jaxrl.models.aux_arrays import Statistics, TokenArray
from jaxrl.models.layers import Attend, LayerScan, SamplerLayerScan, Stacks
from jaxrl.models.params import ParamSpec, split_params
from jaxrl.types import Params
from jaxrl.utils.callables import is_user_code


@dataclass(frozen=True, kw_only=True)
class MemoryTerms:
    """Sizes of a layer for the plan: values on one device.

    Attributes:
        activations: of a token, while the layer is differentiated.
        saved_activations: of a token, kept for the backward pass by each `model.remat` but `full`
            and `offload`; without the layer's input and without scores.
        read_activations: of a token, while prompts and observations are read.
        reused: Part of experts' `activations` that an accelerator writes over others.
    """

    activations: int
    saved_activations: dict[str, int]
    read_activations: int
    reused: int = 0


@dataclass(frozen=True, kw_only=True)
class Fused:
    """An HF tensor of matrices that holds several tensors.

    Attributes:
        shape: of the whole, three axes.
        parts: by the names of `hf_names`, in which matrix each stands, and in which of its rows.
    """

    shape: tuple[int, int, int]
    parts: dict[str, tuple[int, range]]


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """Finding about a kernel before it was used.

    Attributes:
        operation: that it computes.
        kernel: its name in the configuration.
        is_sound: it may be used.
        finding: what was measured, or how it failed; one line.
    """

    operation: str
    kernel: str
    is_sound: bool
    finding: str


class Architecture(ABC):
    """One model's sizes, and how to compute with its parameters."""

    vocab_size: int  # V, ids that the tables hold
    width: int  # D, of the hidden states
    num_layers: int  # L
    num_heads: int  # N, of queries
    num_kv_heads: int  # K, of keys and values, as the cache holds them
    head_dim: int  # H, of keys and values
    max_positions: int  # tokens of the longest sequence
    tie_embeddings: bool  # the output layer is the embedding
    head_dtype: str = ""  # of the output layer's product; "": as all others
    num_experts: int = 0  # of a layer that has some, which `mesh.expert` splits
    tower: Tower | None = None  # reads attachments, images say; None in a model of text alone

    @property
    def program_key(self) -> Hashable:
        """Equal only for architectures whose passes are the same programs on the same mesh.

        None where nothing equals it: a class of the user's may have been edited and loaded again.
        """
        return None if is_user_code(type(self)) else self

    @property
    def plain(self) -> Architecture:
        """The model itself, without an architecture around it."""
        return self

    @property
    def wrapper(self) -> Any:
        """Return this architecture if it is a `WrappedArchitecture`, else None."""
        return None

    def parts(self, frozen: Sequence[str] = ()) -> tuple[ParamSpec, ParamSpec]:
        """The parameters that are trained, and the others: the entries `frozen`."""
        return split_params(self, lambda path: path[0] not in frozen)

    @property
    def recorded(self) -> Mapping[str, TokenArray]:
        """Return the per-token arrays that a pass records, and that a later pass can replay."""
        return {}

    def on_mesh(
        self, mesh: Mesh, *, experts: str, check_dtype: DTypeLike | None = None
    ) -> Architecture:
        """Returns this model with the kernels for a mesh.

        Args:
            mesh: that computes.
            experts: `config.model.experts`.
            check_dtype: of the run, by which kernels are checked; None: nothing is run.

        Raises:
            ValueError: names the key where such kernels do not run on the devices, or fail there.
        """
        return self

    def check_kernels(self, platform: str, *, experts: str, dtype: DTypeLike) -> None:
        """Refuses what `on_mesh` would for a platform and a dtype, whose devices need not be there.

        Raises:
            ValueError: names the key.
        """
        return  # most models have attention alone

    def with_head(self, dtype: str) -> Architecture:
        """Returns this model with an output layer that multiplies in a dtype of its own.

        Sampler and trainer alike read its table, and the hidden states, in that dtype. The model
        has it as `head_dtype`, and `output` names the table's entry.

        Raises:
            ValueError: the architecture has no such product; names the key.
        """
        raise ValueError(
            f"config.model.head_dtype is {dtype!r}, but the architecture {type(self).__name__} "
            "computes its output layer in config.model.dtype alone (it defines no with_head); set "
            "the key to ''."
        )

    @property
    def output(self) -> str:
        """The entry of the parameters with the output layer's table; "" without `with_head`."""
        return ""

    @property
    def shown_kernels(self) -> str:
        """The kernels of `on_mesh` beside those of attention, for the log; "" without any."""
        return ""

    @property
    def kernel_checks(self) -> tuple[KernelCheck, ...]:
        """Findings about the kernels of `on_mesh` before they were used."""
        return ()

    @property
    def statistics(self) -> Statistics | None:
        """Return the reader of the sums in `AuxArrays.statistics`, or None."""
        return None

    @property
    def stacks(self) -> Stacks:
        """Entries of `blocks` that only some layers have, over which their leading axis is."""
        return {}

    @classmethod
    @abstractmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> Architecture:
        """The model of a parsed `config.json`; `source` is named in errors.

        Raises:
            ValueError: the file asks for something that is not computed here.
        """

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """The inverse of `from_dict`: a `config.json` for a model that came from none."""

    @abstractmethod
    def abstract_params(self) -> Params:
        """The parameters as `jax.ShapeDtypeStruct`s, without making any."""

    @abstractmethod
    def logical_axes(self) -> dict[str, Any]:
        """Names of each parameter's axes, in the shape of the parameters; see `sharding.RULES`."""

    def decode_axes(self) -> dict[str, Any]:
        """Names of the axes of `decode_weights`; may have weights that are on some devices only."""
        return self.logical_axes()

    @abstractmethod
    def hf_names(self) -> dict[str, str]:
        """Path of each parameter, `/` between names, to its HF tensor.

        A `{}` stands for the layer; a second one for the number on the parameter's next axis, as of
        an expert. The order is that of an export. A `kernel` is [in, out] here and [out, in] there.
        """

    def hf_renamed(self) -> dict[str, str]:
        """Other beginnings that names of tensors may have, and those that `hf_names` has."""
        return {}

    def linear_layers(self) -> tuple[str, ...]:
        """Layers of `blocks` that `decoder.linear` computes, as `blocks/attention/q`.

        These may have an adapter, and int8 weights; each has a `kernel` [L, in, out].
        """
        return ()

    def hf_copies(self) -> dict[str, str]:
        """HF tensors that a folder may hold though they repeat another, which is the value."""
        return {}

    def hf_fused(self) -> dict[str, Fused]:
        """HF tensors that a folder may hold in place of several of `hf_names`."""
        return {}

    @abstractmethod
    def train_weights(self, params: Params, dtype: DTypeLike) -> Params:
        """Weights as `hidden_states` and `unembed` read them for a gradient.

        In an entry outside `blocks` there may be arrays that the parameters do not have; they lie
        on the devices as its first one does.
        """

    @abstractmethod
    def decode_weights(self, params: Params, dtype: DTypeLike) -> Params:
        """Weights as `sample_states` and `unembed` read them; `blocks` stacked still."""

    @abstractmethod
    def hidden_states(
        self,
        params: Params,
        token_ids: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        attend: Attend,
        through: LayerScan,
    ) -> Float[Array, "R T D"]:
        """The full pass: final hidden states of packed rows.

        Of tokens with attachments `through.beside` has the arrays of `Tower.arrays`, whose
        positions count, and what is attached: `patches` and `places`, see `Tower.embeddings`.

        Args:
            params: parameters, or their `train_weights`.
            token_ids: ids of the rows, or of pieces of them (`config.mesh.context`): a token knows
                of others by `attend` alone.
            positions: position of each token in its own sequence.
            attend: lets each of the R * T tokens, row by row, read what it may; of every layer.
            through: goes through the layers and says what the backward pass computes again.
        """

    @abstractmethod
    def unembed(
        self, params: Params, hidden: Float[Array, "... D"], *, num_tokens: int
    ) -> Float[Array, "... V"]:
        """Float32 logits; ids from `num_tokens` on, which no tokenizer knows, get the lowest."""

    @abstractmethod
    def sample_states(
        self,
        weights: Params,
        token_ids: Int[Array, " M"],
        positions: Int[Array, " M"],
        through: SamplerLayerScan,
    ) -> Float[Array, "M D"]:
        """The sampler's pass: final hidden states of M tokens, of one row or of many.

        With a tower, `through.beside` may have the arrays of `Tower.arrays`, whose positions count,
        and as attached what `Tower.embeddings` gave, `[S, U, E]` of S shards.

        Args:
            weights: of `decode_weights`.
            token_ids: the tokens.
            positions: of each in its own sequence.
            through: goes through `blocks`, and hands each layer its `attend`, to be called once: it
                lets each token read what is before it in its sequence.
        """

    @abstractmethod
    def memory_terms(self, tensor: int) -> MemoryTerms:
        """Terms of a layer without experts, heads and inner width split over `tensor` devices."""

    def expert_terms(self, tensor: int, expert: int) -> MemoryTerms:
        """Terms that experts of a layer add, split over `expert` devices and each over `tensor`."""
        raise NotImplementedError

    @property
    def num_idle(self) -> int:
        """Parameters of experts that a token does not reach."""
        return 0


def is_axes(node: Any) -> bool:
    """True if a node of a tree of axes names those of one array; layers of a model are a tuple."""
    return isinstance(node, tuple) and not any(isinstance(part, dict) for part in node)
