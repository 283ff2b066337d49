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
from jaxrl.models.hf_weights import Progress
from jaxrl.runtime.compilation import joined
from jaxrl.types import Params


def _of_model(name: str) -> Any:
    return property(attrgetter(f"model.{name}"))


class WrappedArchitecture(Architecture):
    """An architecture that wraps a model and delegates to it by default."""

    model: Architecture

    # Listed because inherited defaults take precedence over `__getattr__`.
    vocab_size: int = _of_model("vocab_size")
    width: int = _of_model("width")
    num_layers: int = _of_model("num_layers")
    num_heads: int = _of_model("num_heads")
    num_kv_heads: int = _of_model("num_kv_heads")
    head_dim: int = _of_model("head_dim")
    max_positions: int = _of_model("max_positions")
    tie_embeddings: bool = _of_model("tie_embeddings")
    head_dtype: str = _of_model("head_dtype")
    output: Any = _of_model("output")
    num_experts: int = _of_model("num_experts")
    statistics: Any = _of_model("statistics")
    recorded: Any = _of_model("recorded")
    shown_kernels: Any = _of_model("shown_kernels")
    kernel_checks: Any = _of_model("kernel_checks")
    tower: Tower | None = _of_model("tower")
    stacks: Any = _of_model("stacks")
    num_idle: Any = _of_model("num_idle")
    hf_config: Any = _of_model("hf_config")
    hf_names: Any = _of_model("hf_names")
    hf_renamed: Any = _of_model("hf_renamed")
    hf_copies: Any = _of_model("hf_copies")
    hf_fused: Any = _of_model("hf_fused")
    linear_layers: Any = _of_model("linear_layers")
    hidden_states: Any = _of_model("hidden_states")
    unembed: Any = _of_model("unembed")
    sample_states: Any = _of_model("sample_states")
    memory_terms: Any = _of_model("memory_terms")
    expert_terms: Any = _of_model("expert_terms")
    check_kernels: Any = _of_model("check_kernels")

    @property
    def program_key(self) -> Hashable:
        """See `Architecture.program_key`."""
        return joined(super().program_key, self.model.program_key)

    @property
    def plain(self) -> Architecture:
        """See `Architecture.plain`."""
        return self.model

    @property
    def wrapper(self) -> WrappedArchitecture:
        """See `Architecture.wrapper`."""
        return self

    @abstractmethod
    def on_mesh(
        self, mesh: Mesh, *, experts: str, check_dtype: DTypeLike | None = None
    ) -> Architecture:
        """Wrap the model's result; see `Architecture`."""

    @property
    @abstractmethod
    def plan(self) -> str:
        """Return the module that counts the sampler's weights, with `decode_bytes`."""

    @abstractmethod
    def check(self) -> None:
        """Check that a run can start.

        Raises:
            FileNotFoundError, ValueError: A file or setting is wrong. Names the config key.
        """

    @abstractmethod
    def load_base(self, folder: str | Path, mesh: Mesh, progress: Progress) -> Params:
        """Load the parameters that are not trained from a validated HF folder."""

    @abstractmethod
    def begin(self, mesh: Mesh, seed: int) -> Params:
        """Return the initial trained parameters."""

    @abstractmethod
    def export(self, params: Params, parent: Path, source: str | Path) -> None:
        """Write the trained parameters into folders below `parent`. Every process must call this.

        One of the folders is `export`, the merged model in HF format.

        Args:
            params: Trained parameters.
            parent: Parent of the folders.
            source: HF folder from which the run started.
        """

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> Architecture:
        """Raise NotImplementedError: no `config.json` describes a wrapper."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the model that `Architecture` does not declare."""
        if name.startswith("__") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)
