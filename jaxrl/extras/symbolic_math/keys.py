"""Config keys of the reward part `math_verify`."""

from jaxrl.config.keys import FREE, Key

# fmt: off
KEYS = {
    "reward.math_verify.deadline_s": Key(5.0, "Seconds of processor time per comparison; a "
        "slower one is not equal.", above=0),
    "reward.math_verify.memory_mib": Key(1024, "MiB of each worker; a comparison that needs more "
        "is not equal.", above=0),
    "reward.math_verify.workers": Key(2, "Worker processes per process of the run.",
        above=0, restart=FREE),
}
# fmt: on
