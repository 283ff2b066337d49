"""Keys of losses, terms and masks against collapse."""

from jaxrl.config.keys import TRAINING, Key, Rule

# fmt: off
KEYS = {
    "loss.dppo.divergence": Key("tv", "`tv`: difference of probabilities; `kl`: nats.",
        one_of=("tv", "kl"), restart=TRAINING),
    "loss.dppo.anchor": Key("old", "Divergence from the policy before the update, `old`, or from "
        "the sampler, `rollout`.", one_of=("old", "rollout"), restart=TRAINING),
    "loss.dppo.cap": Key(20.0, "Largest ratio by which a token's gradient is weighed.", at_least=1,
        restart=TRAINING),
    "loss.term.llds.level": Key("action", "What has to have lost likelihood as a whole: an "
        "`action`, which is a turn, or the `response`.", one_of=("action", "response"),
        restart=TRAINING),
    "loss.term.llds.margin": Key(1e-5, "Nats that a token, and the action, must have lost. "
        "The default is for rounding in float32; bfloat16 rounds more.", at_least=0,
        restart=TRAINING),
    "loss.gate.off_policy.delta": Key(0.5, "Nats a token, sampler less policy, from which on.",
        at_least=0, restart=TRAINING),
}
# fmt: on

RULES = (
    Rule(
        "loss.term.name",
        lambda c: (
            "train" in c.stages
            and c.loss.term.name == "llds"
            and c.optimizer.num_minibatches * c.optimizer.num_epochs == 1
        ),
        "'none' with one update a batch (optimizer.num_minibatches=1, optimizer.num_epochs=1): no "
        "likelihood is lost before the first one, so the term is exactly 0",
    ),
)
"""Combinations of keys that are refused."""

WARNINGS = (
    Rule(
        "loss.dppo.anchor",
        lambda c: (
            "train" in c.stages
            and c.loss.name == "dppo"
            and c.loss.dppo.anchor == "old"
            and c.optimizer.num_minibatches * c.optimizer.num_epochs == 1
        ),
        "'rollout' with one update a batch: before the first one no token has moved",
    ),
)
"""Unusual settings, which are not refused."""
