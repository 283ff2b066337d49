"""An architecture around another: with parameters beside that one's, some of which are trained."""

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
    """An architecture with a model inside, whose methods a class of this kind has by default."""

    model: Architecture

    # Listed, since the class finds an inherited default before it would ask `__getattr__`.
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
        """Around the model's; see `Architecture`."""

    @property
    @abstractmethod
    def plan(self) -> str:
        """The module that counts the sampler's weights, with `decode_bytes`."""

    @abstractmethod
    def check(self) -> None:
        """Refuses what a run could not begin with.

        Raises:
            FileNotFoundError, ValueError: names the key.
        """

    @abstractmethod
    def load_base(self, folder: str | Path, mesh: Mesh, progress: Progress) -> Params:
        """The parameters that are not trained, of an HF folder of the model that was checked."""

    @abstractmethod
    def begin(self, mesh: Mesh, seed: int) -> Params:
        """Parameters that are trained, as a run begins with them."""

    @abstractmethod
    def export(self, params: Params, parent: Path, source: str | Path) -> None:
        """Writes those that are trained into folders below `parent`; every process calls this.

        One of them is `export`, the whole model in HF's format.

        Args:
            params: that are trained.
            parent: of the folders.
            source: the HF folder that the run began with.
        """

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> Architecture:
        """No `config.json` is of this kind."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Attributes of a family of models that `Architecture` does not declare."""
        if name.startswith("__") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)
