"""Small hybrids with experts."""

from jaxrl.extras.hybrid_moe.qwen3_5_moe import Qwen35MoeConfig
from jaxrl.extras.hybrid_moe.qwen3_next import Qwen3NextConfig
from tests.extras.delta_net.models import TINY_HYBRID

EXPERTS = {
    "expert_width": 24,
    "num_experts": 8,
    "top_k": 2,
    "renormalize": True,
    "shared_width": 20,
}
TINY_QWEN3_5 = Qwen35MoeConfig(
    **{**vars(TINY_HYBRID), "mlp_width": EXPERTS["shared_width"]},
    **EXPERTS,
    expert_layers=tuple(range(TINY_HYBRID.num_layers)),
)
TINY_NEXT = Qwen3NextConfig(
    **vars(TINY_HYBRID), **EXPERTS | {"renormalize": False}, expert_layers=(0, 1, 4)
)
"""Two layers with an MLP, of which one follows a layer with experts of the same kind."""


def random_experts(rng, num_layers):
    """Return random sizes of experts, in every layer."""
    num_experts = int(rng.integers(2, 12))
    return {
        "expert_width": int(rng.integers(6, 40)),
        "num_experts": num_experts,
        "top_k": int(rng.integers(1, num_experts + 1)),
        "renormalize": True,
        "expert_layers": tuple(range(num_layers)),
        "shared_width": int(rng.integers(6, 40)),
    }
