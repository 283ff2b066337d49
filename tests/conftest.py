"""Checks array annotations in every test run."""

from jaxtyping import install_import_hook

# Before anything imports these: the hook rewrites modules as they load. The tower lets an int pass
# for a float, as it does for mypy.
install_import_hook(
    ["jaxrl.objectives", "jaxrl.models"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)
