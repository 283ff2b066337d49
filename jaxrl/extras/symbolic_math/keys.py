"""Keys of the reward part `math_verify`."""

from jaxrl.config.keys import FREE, Key

# fmt: off
KEYS = {
    "reward.math_verify.deadline_s": Key(5.0, "Seconds of computing that a comparison may take; an "
        "answer that takes more is not equal.", above=0),
    "reward.math_verify.memory_mib": Key(1024, "MiB of each worker; likewise.", above=0),
    "reward.math_verify.workers": Key(2, "Processes that compare, of each process of the run.",
        above=0, restart=FREE),
}
# fmt: on
