"""Keys of the sentinel."""

from jaxrl.config.keys import FREE, Key

# fmt: off
KEYS = {
    "watch.sentinel.reward_fall": Key(0.5, "Share of the best mean reward, counted from the lowest "
        "reward, that has to be lost.", above=0, at_most=1, restart=FREE),
    "watch.sentinel.share": Key(0.5, "Share of responses that are malformed, void, cut off, alike "
        "or going round in circles.", above=0, at_most=1, restart=FREE),
    "watch.sentinel.gap": Key(0.05, "Mean difference of sampler and trainer, nats a token, that is "
        "too much whatever was usual.", above=0, restart=FREE),
}
# fmt: on
