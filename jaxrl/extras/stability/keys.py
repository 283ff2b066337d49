"""Config keys for the losses, loss terms and masks in this folder."""

from jaxrl.config.keys import TRAINING, Key, Rule

# fmt: off
KEYS = {
    "loss.dppo.divergence": Key("tv", "`tv`: difference of probabilities; `kl`: nats.",
        one_of=("tv", "kl"), restart=TRAINING),
    "loss.dppo.anchor": Key("old", "Divergence from the policy before the update (`old`) or from "
        "the sampler (`rollout`).", one_of=("old", "rollout"), restart=TRAINING),
    "loss.dppo.cap": Key(20.0, "Maximum ratio as a weight of a token's gradient.", at_least=1,
        restart=TRAINING),
    "loss.term.llds.level": Key("action", "Unit that must have lost likelihood: an `action` (a "
        "turn) or the `response`.", one_of=("action", "response"),
        restart=TRAINING),
    "loss.term.llds.margin": Key(1e-5, "Nats that a token, and its action, must have lost. The "
        "default covers rounding in float32.", at_least=0,
        restart=TRAINING),
    "loss.token_filter.off_policy.delta": Key(0.5, "Nats per token, sampler minus policy, above "
        "which a trajectory is removed.",
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
"""Invalid combinations of keys."""
