"""Config keys for the sentinel."""

from jaxrl.config.keys import FREE, Key

# fmt: off
KEYS = {
    "watch.sentinel.reward_fall": Key(0.5, "Drop of the mean reward below its best that raises a "
        "sign, as a fraction of best minus lowest reward.", above=0, at_most=1, restart=FREE),
    "watch.sentinel.share": Key(0.5, "Share of responses that are malformed, void, truncated, "
        "identical or repetitive.", above=0, at_most=1, restart=FREE),
    "watch.sentinel.gap": Key(0.05, "Mean gap between sampler and trainer, in nats per token, "
        "that is always too large.", above=0, restart=FREE),
}
# fmt: on
