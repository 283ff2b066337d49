"""Check hybrids with experts on meshes of eight virtual devices; run by `test_meshes.py`.

python -m tests.extras.hybrid_moe.mesh_worker
"""

from tests.extras.delta_net.mesh_worker import check_meshes
from tests.extras.hybrid_moe.models import TINY_NEXT, TINY_QWEN3_5
from tests.mesh_worker import complete


def main():
    check_meshes(TINY_NEXT, [complete(fsdp=2, expert=2, tensor=2)])
    check_meshes(TINY_QWEN3_5, [complete(expert=8)])


if __name__ == "__main__":
    main()
