"""Config keys of the sentinel."""

from jaxrl.config.keys import FREE, Key

# fmt: off
KEYS = {
    "watch.sentinel.reward_fall": Key(0.5, "Fraction of the best mean reward that must be lost.",
        above=0, at_most=1, restart=FREE),
    "watch.sentinel.share": Key(0.5, "Share of responses that are malformed, void, truncated, "
        "equal or repetitive.", above=0, at_most=1, restart=FREE),
    "watch.sentinel.gap": Key(0.05, "Mean difference of sampler and trainer in nats per token "
        "that is always too large.", above=0, restart=FREE),
}
# fmt: on
