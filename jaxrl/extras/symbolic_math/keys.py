"""Config keys of the reward part `math_verify`."""

from jaxrl.config.keys import FREE, Key

# fmt: off
KEYS = {
    "reward.math_verify.deadline_s": Key(5.0, "CPU seconds per comparison; answers that take "
        "longer count as not equal.", above=0),
    "reward.math_verify.memory_mib": Key(1024, "MiB of memory per worker; answers whose comparison "
        "needs more count as not equal.", above=0),
    "reward.math_verify.workers": Key(2, "Number of worker processes per process of the run.",
        above=0, restart=FREE),
}
# fmt: on
