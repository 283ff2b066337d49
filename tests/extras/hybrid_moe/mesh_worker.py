"""Check a hybrid with experts on a mesh of eight virtual devices; run by `test_meshes.py`.

python -m tests.extras.hybrid_moe.mesh_worker
"""

from tests.extras.delta_net.mesh_worker import check_meshes
from tests.extras.hybrid_moe.models import TINY_NEXT
from tests.mesh_worker import complete


def main():
    check_meshes(TINY_NEXT, [complete(fsdp=2, expert=2, tensor=2)])


if __name__ == "__main__":
    main()
