"""Config keys for the reward part `math_verify`."""

from jaxrl.config.keys import FREE, Key

# fmt: off
KEYS = {
    "reward.math_verify.deadline_s": Key(5.0, "CPU seconds per comparison.", above=0),
    "reward.math_verify.memory_mib": Key(1024, "MiB of memory per worker.", above=0),
    "reward.math_verify.workers": Key(2, "Number of worker processes per process of the run.",
        above=0, restart=FREE),
}
# fmt: on
