"""A small world in which all groups of samples and their probabilities can be listed.

Expectations are finite sums, so tests need neither sampling nor statistical tolerances.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

VOCAB = 3
END = VOCAB - 1  # ends a sequence; the last position ends it too


@dataclass(frozen=True)
class World:
    """All M sequences of up to T tokens; a policy's next token depends on all tokens before it.

    `tokens` and `mask` are [M, T]; `contexts` [M, T] numbers the prefixes, C in all.
    A policy's parameters are its logits [C, V].
    """

    tokens: np.ndarray
    mask: np.ndarray
    contexts: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.contexts.max()) + 1, VOCAB

    @property
    def lengths(self) -> np.ndarray:
        return self.mask.sum(axis=1)

    def compute_token_logprobs(self, logits):
        table = jax.nn.log_softmax(logits)
        return jnp.where(self.mask, table[self.contexts, self.tokens], 0.0)

    def probs(self, logits):
        return jnp.exp(self.compute_token_logprobs(logits).sum(axis=1))

    def token_scores(self, logits) -> np.ndarray:
        """Return the gradient of each token's log-probability, [M, T, C, V]."""
        probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        scores = np.zeros((*self.tokens.shape, *self.shape))
        for i, t in np.argwhere(self.mask):
            context = self.contexts[i, t]
            scores[i, t, context] -= probs[context]
            scores[i, t, context, self.tokens[i, t]] += 1
        return scores

    def scores(self, logits) -> np.ndarray:
        """Return the gradient of each sequence's log-probability, [M, C, V]."""
        return self.token_scores(logits).sum(axis=1)

    def reach(self, logits):
        """Return the probability that each context occurs, [C]."""
        occurs = np.zeros((len(self.tokens), self.shape[0]))
        for row, mask, contexts in zip(occurs, self.mask, self.contexts, strict=True):
            row[contexts[mask]] = 1
        return self.probs(logits) @ occurs

    def groups(self, size: int) -> np.ndarray:
        """Return every group of `size` samples, in order, as rows of sequence numbers."""
        return np.array(list(itertools.product(range(len(self.tokens)), repeat=size)))

    def group_probs(self, logits, groups: np.ndarray) -> np.ndarray:
        return np.asarray(self.probs(logits))[groups].prod(axis=1)


def enumerate_world(num_tokens: int) -> World:
    sequences = [
        sequence[: sequence.index(END) + 1] if END in sequence else sequence
        for sequence in itertools.product(range(VOCAB), repeat=num_tokens)
    ]
    sequences = sorted(set(sequences))
    prefixes = sorted({sequence[:t] for sequence in sequences for t in range(len(sequence))})
    shape = (len(sequences), num_tokens)
    tokens, mask, contexts = np.zeros(shape, int), np.zeros(shape, bool), np.zeros(shape, int)
    for i, sequence in enumerate(sequences):
        for t, token in enumerate(sequence):
            tokens[i, t], mask[i, t], contexts[i, t] = token, True, prefixes.index(sequence[:t])
    return World(tokens, mask, contexts)


def expected_policy_gradient(
    world: World, logits, groups: np.ndarray, advantages: np.ndarray
) -> np.ndarray:
    """Return the expected mean of `advantage * gradient of log-probability` over a group."""
    weights = world.group_probs(logits, groups)[:, None] * advantages / groups.shape[1]
    return np.einsum("gn,gncv->cv", weights, world.scores(logits)[groups])


def expected_turn_gradient(
    world: World, logits, groups: np.ndarray, advantages: np.ndarray
) -> np.ndarray:
    """Like `expected_policy_gradient`, but each token is a turn with its own advantage.

    `advantages` are [G, n, T].
    """
    weights = world.group_probs(logits, groups)[:, None, None] * advantages / groups.shape[1]
    return np.einsum("gnt,gntcv->cv", weights, world.token_scores(logits)[groups])


def expected_loss_gradient(
    world: World, logits, groups: np.ndarray, loss: Callable[..., jax.Array], *extra: np.ndarray
) -> np.ndarray:
    """Return the expected gradient of `loss(logits, group [n], *extra of the group)`.

    Samples are fixed while differentiating, as in training.
    """
    weights = world.group_probs(logits, groups)
    over_groups = jax.vmap(loss, in_axes=(None,) + (0,) * (1 + len(extra)))
    total = jax.jit(jax.grad(lambda x: weights @ over_groups(x, groups, *extra)))
    return np.asarray(total(logits))


def binomial(n: int, c: int, p: float) -> float:
    return math.comb(n, c) * p**c * (1 - p) ** (n - c)
