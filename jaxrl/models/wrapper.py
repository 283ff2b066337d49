"""Architecture wrapper that adds trainable parameters, such as LoRA."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from operator import attrgetter
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl.models.architecture import Architecture
from jaxrl.models.attachments import Tower
from jaxrl.models.hf_weights import ProgressCallback
from jaxrl.runtime.compilation import join_keys
from jaxrl.types import Params


def _make_delegating_property(name: str) -> Any:
    """Return a property that reads `name` from the wrapped model."""
    return property(attrgetter(f"model.{name}"))


class WrappedArchitecture(Architecture):
    """Architecture that wraps a model and delegates to it by default."""

    model: Architecture

    # Delegate these explicitly: inherited defaults take precedence over `__getattr__`.
    vocab_size: int = _make_delegating_property("vocab_size")
    width: int = _make_delegating_property("width")
    num_layers: int = _make_delegating_property("num_layers")
    num_heads: int = _make_delegating_property("num_heads")
    num_kv_heads: int = _make_delegating_property("num_kv_heads")
    head_dim: int = _make_delegating_property("head_dim")
    max_positions: int = _make_delegating_property("max_positions")
    tie_embeddings: bool = _make_delegating_property("tie_embeddings")
    head_dtype: str = _make_delegating_property("head_dtype")
    output_module: Any = _make_delegating_property("output_module")
    num_experts: int = _make_delegating_property("num_experts")
    statistics_reader: Any = _make_delegating_property("statistics_reader")
    recorded_specs: Any = _make_delegating_property("recorded_specs")
    kernel_summary: Any = _make_delegating_property("kernel_summary")
    kernel_checks: Any = _make_delegating_property("kernel_checks")
    tower: Tower | None = _make_delegating_property("tower")
    partial_layer_indices: Any = _make_delegating_property("partial_layer_indices")
    recurrent_module: str = _make_delegating_property("recurrent_module")
    state_specs: Any = _make_delegating_property("state_specs")
    to_hf_config: Any = _make_delegating_property("to_hf_config")
    get_hf_names: Any = _make_delegating_property("get_hf_names")
    get_hf_prefix_map: Any = _make_delegating_property("get_hf_prefix_map")
    get_hf_module_prefixes: Any = _make_delegating_property("get_hf_module_prefixes")
    get_hf_passthrough_prefixes: Any = _make_delegating_property("get_hf_passthrough_prefixes")
    get_hf_tied_names: Any = _make_delegating_property("get_hf_tied_names")
    get_hf_fused_tensors: Any = _make_delegating_property("get_hf_fused_tensors")
    list_linear_layers: Any = _make_delegating_property("list_linear_layers")
    compute_hidden_states: Any = _make_delegating_property("compute_hidden_states")
    unembed: Any = _make_delegating_property("unembed")
    compute_sampler_hidden_states: Any = _make_delegating_property("compute_sampler_hidden_states")
    estimate_layer_memory: Any = _make_delegating_property("estimate_layer_memory")
    estimate_expert_memory: Any = _make_delegating_property("estimate_expert_memory")
    check_kernels: Any = _make_delegating_property("check_kernels")

    @property
    def program_key(self) -> Hashable:
        """See `Architecture.program_key`."""
        return join_keys(super().program_key, self.model.program_key)

    @property
    def unwrapped(self) -> Architecture:
        """See `Architecture.unwrapped`."""
        return self.model

    @property
    def wrapper(self) -> WrappedArchitecture:
        """See `Architecture.wrapper`."""
        return self

    @abstractmethod
    def with_kernels(
        self, mesh: Mesh, *, experts: str, check_dtype: DTypeLike | None = None
    ) -> Architecture:
        """Return a copy that wraps `model.with_kernels(...)`; see `Architecture.with_kernels`."""

    @property
    @abstractmethod
    def memory_module(self) -> str:
        """Return the dotted name of the module that defines `count_decode_bytes`."""

    @abstractmethod
    def check_files_and_settings(self) -> None:
        """Check the files and settings that a run needs.

        Raises:
            FileNotFoundError, ValueError: A file or setting is invalid. The message names the key.
        """

    @abstractmethod
    def load_base(self, folder: str | Path, mesh: Mesh, progress: ProgressCallback) -> Params:
        """Load the frozen parameters from a validated HF folder."""

    @abstractmethod
    def load_initial_params(self, mesh: Mesh, seed: int) -> Params:
        """Return the initial values of the trained parameters."""

    @abstractmethod
    def export(self, params: Params, parent: Path, source: str | Path) -> None:
        """Write the trained parameters to folders in `parent`. Every process must call this.

        One of the folders is `export`, the merged model in HF format.

        Args:
            params: Trained parameters.
            parent: Folder in which to create the folders.
            source: HF folder of the model that the run started from.
        """

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> Architecture:
        """Raise a NotImplementedError: no `config.json` describes a wrapper."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped model that `Architecture` does not declare."""
        if name.startswith("__") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)
