"""Checks array annotations in every test run."""

import pytest
from jaxtyping import install_import_hook

# Before anything imports these: the hook rewrites modules as they load. The tower lets an int pass
# for a float, as it does for mypy.
install_import_hook(
    ["jaxrl.objectives", "jaxrl.models"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory):
    """The folder of a quickstart world of forty people; not to be written to."""
    from examples import quickstart_world  # after the hook: it imports parts of jaxrl

    folder = tmp_path_factory.mktemp("world")
    sizes = ["--num_people=40", "--num_held_out=8", "--num_demonstrations=400"]
    quickstart_world.main([f"--out={folder}", *sizes])
    return folder


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory, worker_id):
    """For compiled programs, which all whole runs share, those of the other processes too."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder
