"""One objective on a batch: its advantages, weights and losses by token, and its gradient."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jaxrl.logs.steps import merge
from jaxrl.models.policy import Model
from jaxrl.objectives.metrics import mean
from jaxrl.runtime.sharding import batch_sharding, num_batch_shards
from jaxrl.session import Stage
from jaxrl.training import rewards
from jaxrl.training.controllers import Controllers, advance
from jaxrl.training.estimators import Estimator
from jaxrl.training.measure import make_measure, unpack
from jaxrl.training.minibatches import divide, make_minibatches, put_minibatches
from jaxrl.training.packing import Packed
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.settings import Method, is_measured
from jaxrl.training.update import MicroBatches, ScoreStep, TokenLoss
from jaxrl.types import Batch, Group, GroupStats, Params, Trajectory, members


class TokenPass:
    """`read(params, batch, packed)`: by name float32 [A, b, T], of each token.

    `losses` add up to the loss. `coefficients` are their derivatives by the token's own
    log-probability, so that the gradient is the sum over tokens of coefficient times
    `d logprob / d params`; an entropy term, and the balance of experts, are beside it.
    """

    def __init__(self, model: Model, token_loss: TokenLoss, *, temperature: float):
        """Compiles nothing yet; arguments as of `update.Gradient`."""
        self._mesh, self._model = model.mesh, model

        def add(params: Params, sums: Any, micro: Batch, index: jax.Array, quarters: int) -> Any:
            logprobs, entropies = model.token_logprobs(
                params, micro, temperature=temperature, quarters=quarters
            )
            losses, coefficients = token_terms(token_loss, logprobs, entropies, micro)
            terms = {"losses": losses, "coefficients": coefficients}
            return {name: sums[name].at[index].set(values) for name, values in terms.items()}

        self._add = MicroBatches(model, "comparison", add)

    def __call__(self, params: Params, batch: Batch, packed: Packed) -> dict[str, jax.Array]:
        """Reads `packed`, which lies on the devices as `batch`."""
        shape, sharding = batch.token_ids.shape, batch_sharding(self._mesh)
        sums = {
            name: jnp.zeros(shape, jnp.float32, device=sharding)
            for name in ("losses", "coefficients")
        }
        return self._add(self._model.whole(params), sums, batch, packed)


def token_terms(
    token_loss: TokenLoss, logprobs: jax.Array, entropies: jax.Array, micro: Batch
) -> tuple[jax.Array, jax.Array]:
    """Weighted losses of a micro-batch, and their derivatives by `logprobs`: [b, T] each."""

    def total(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = token_loss(logprobs, entropies, micro)[0] * micro.token_weights
        return values.sum(), values

    coefficients, losses = jax.grad(total, has_aux=True)(logprobs)
    return losses, coefficients


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch as an objective sees it.

    Attributes:
        groups: with their advantages.
        kept: of each mini-batch, the trajectories with a loss by their places among `members`.
        minibatches: on the host.
        batches: on the devices.
    """

    groups: list[Group]
    kept: list[dict[int, Trajectory]]
    minibatches: list[Packed]
    batches: list[Batch]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measures of an objective on a batch.

    Attributes:
        numbers: by name.
        gradient: the mean over its mini-batches, as the parameters are.
        coefficients: of the tokens of all trajectories, one after another, float32; 0 without a
            loss. They are divided by the number of mini-batches, as the gradient is.
    """

    numbers: dict[str, float]
    gradient: Params
    coefficients: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A method, with what computes it.

    Attributes:
        method: the objective's settings.
        model: the policy.
        stage: whose update has the gradient.
        controllers: before the step.
        is_trigger: see `session.Components`.
        charges_kl: the recorded rewards are without the KL term that `kl.place` puts there.
    """

    method: Method
    model: Model
    stage: Stage
    controllers: Controllers
    is_trigger: np.ndarray | None
    charges_kl: bool

    def prepare(
        self,
        groups: Sequence[Group],
        params: Params,
        ref_params: Params | None,
        *,
        step: int,
        stage_step: int,
        is_moved: bool,
    ) -> Prepared:
        """Does with recorded groups what a training step does before its update.

        Args:
            groups: with their rewards.
            params: before the updates; old log-probabilities are theirs.
            ref_params: the reference; None where there is none.
            step: over all stages, that are done.
            stage_step: likewise, of the stage.
            is_moved: the parameters will have moved where the loss is read.
        """
        model, shape = self.model, self.stage.shape
        # Of several epochs an update is given the old log-probabilities: they are not its own. And
        # all trajectories are packed, in their order; those without a signal add nothing.
        epochs = max(self.method.optimizer.num_epochs, 2 if is_moved else 1)
        optimizer = replace(self.method.optimizer, num_epochs=epochs, skip_signal_free=False)
        method = replace(self.method, optimizer=optimizer)
        score = ScoreStep(model, temperature=method.temperature)
        groups = list(groups)
        if is_measured(method.kl):
            assert ref_params is not None
            groups = make_measure(score, model.mesh, shape, method)(groups, params, ref_params)
        tried = list(map(GroupStats.of, groups))
        moved, groups = advance(self.controllers, groups, tried, method, self.is_trigger)
        current = replace(moved, kl=self.controllers.kl)
        if self.charges_kl:
            groups = rewards.charge_kl(groups, current, method)
        groups = Estimator(method.advantage, method.seed)(groups, step, stage_step)
        minibatches = make_minibatches(
            groups, shape, method, controllers=current, num_shards=num_batch_shards(model.mesh)
        )
        batches = put_minibatches(minibatches, model.mesh, score, params, ref_params, method)
        kept = [kept for kept, _ in divide(groups, current, method)]
        return Prepared(groups=groups, kept=kept, minibatches=minibatches, batches=batches)

    def measure(self, prepared: Prepared, params: Params) -> Measured:
        """Reads the objective of a prepared batch at `params`.

        Raises:
            ValueError: no trajectory has a loss.
        """
        read = TokenPass(
            self.model, make_policy_loss(self.method), temperature=self.method.temperature
        )
        gradient: Params | None = None
        metrics: list[dict[str, Any]] = []
        tokens: dict[str, dict[int, np.ndarray]] = {}
        each = zip(prepared.minibatches, prepared.batches, prepared.kept, strict=True)
        for packed, batch, kept in each:
            if not packed.num_counted:  # no update either
                continue
            sums = self.stage.update.gradient(params, batch, packed)
            if gradient is not None:
                gradient = jax.tree.map(jnp.add, gradient, sums.gradients)
            else:
                gradient = sums.gradients
            metrics.append(
                jax.device_get(sums.finished_metrics(self.model.architecture.statistics))
            )
            by_name = {"weights": packed.batch.token_weights, **read(params, batch, packed)}
            for name, values in by_name.items():
                pieces = unpack(packed, np.asarray(values), [*kept.values()])
                tokens.setdefault(name, {}).update(zip(kept, pieces, strict=True))
        if gradient is None:
            raise ValueError(
                "no trajectory of the batch has a loss: its environment failed in all of them, or "
                "config.filter.trajectories leaves all out."
            )
        count, trajectories = len(metrics), members(prepared.groups)
        if count > 1:
            gradient = jax.tree.map(lambda leaf: leaf / count, gradient)
        nothing = [np.zeros(len(t.token_ids), np.float32) for t in trajectories]
        weights, losses, coefficients = (
            [tokens[name].get(index, zeros) / count for index, zeros in enumerate(nothing)]
            for name in ("weights", "losses", "coefficients")
        )
        by_token = np.concatenate(coefficients)
        num_trained = sum(t.num_sampled for kept in prepared.kept for t in kept.values())
        numbers = {
            **advantage_numbers([t for t in trajectories if t.is_scored]),
            **weight_numbers(trajectories, weights),
            "loss": float(np.concatenate(losses).sum(dtype=np.float64)),
            **merge(metrics),
            "coefficients/abs_sum": float(np.abs(by_token).sum(dtype=np.float64)),
            "coefficients/nonzero_share": int(np.count_nonzero(by_token)) / max(num_trained, 1),
        }
        return Measured(numbers=numbers, gradient=gradient, coefficients=by_token)


def advantage_numbers(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Mean and spread of the trajectories' advantages, and the share that has a signal."""
    values = [t.required("advantage") for t in scored]
    return {
        "advantages/mean": mean(values),
        "advantages/std": float(np.std(values)) if values else np.nan,
        "advantages/min": min(values, default=np.nan),
        "advantages/max": max(values, default=np.nan),
        "advantages/nonzero_share": mean([t.has_signal for t in scored]),
    }


def weight_numbers(
    trajectories: Sequence[Trajectory], weights: Sequence[np.ndarray]
) -> dict[str, float]:
    """Sum of the tokens' weights, the largest, and the shares that outcomes have in the sum.

    Args:
        trajectories: all of the batch.
        weights: of each, float32 [L].
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for trajectory, values in zip(trajectories, weights, strict=True):
        total = float(values.sum(dtype=np.float64))
        sums[str(trajectory.outcome)] += total
        sums["correct"] += total * trajectory.is_correct
    correct, total = sums.pop("correct", 0.0), sum(sums.values())
    return {
        "weights/sum": total,
        "weights/max": max(float(values.max(initial=0.0)) for values in weights),
        "weights/share/correct": correct / total if total else np.nan,
        **{f"weights/share/{name}": sums[name] / total for name in sorted(sums) if total},
    }


@jax.jit
def _products(one: Params, other: Params) -> Any:
    """Inner products of two trees by path; those of layers are [L]."""

    def product(path: tuple[str, ...], a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a * b, axis=tuple(range(path[0] == "blocks", a.ndim)))

    others = flatten_dict(other)
    return {path: product(path, a, others[path]) for path, a in flatten_dict(one).items()}


def inner_products(one: Params, other: Params, model: Model) -> dict[str, float]:
    """Inner products of two gradients, by layer (`layer 0`, …) and by each other entry."""
    architecture = model.architecture.plain
    sums: dict[str, float] = {}
    for path, products in jax.device_get(_products(one, other)).items():
        names = [path[0]]
        if path[0] == "blocks":
            layers = architecture.stacks.get(path[1], range(architecture.num_layers))
            names = [f"layer {layer}" for layer in layers]
        for name, value in zip(names, np.atleast_1d(products), strict=True):
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def relate(one: Measured, other: Measured, model: Model) -> dict[str, Any]:
    """Norms of two gradients and the cosine between them, whole and by layer; signs of tokens.

    Cosines are NaN where a norm is 0. `opposite_share` counts tokens whose coefficients differ in
    sign, `one_only_share` those that have one in one objective alone; both are shares of the tokens
    that have a coefficient in either.
    """
    squares = [inner_products(x.gradient, x.gradient, model) for x in (one, other)]
    across = inner_products(one.gradient, other.gradient, model)
    layers = {
        name: {
            "norm": [math.sqrt(square[name]) for square in squares],
            "cosine": _cosine(across[name], *(square[name] for square in squares)),
        }
        for name in across
    }
    totals = [sum(square.values()) for square in squares]
    first, second = np.sign(one.coefficients), np.sign(other.coefficients)
    num_moved = max(int(np.count_nonzero((first != 0) | (second != 0))), 1)
    return {
        "norm": [math.sqrt(total) for total in totals],
        "cosine": _cosine(sum(across.values()), *totals),
        "layers": layers,
        "opposite_share": int(np.count_nonzero(first * second < 0)) / num_moved,
        "one_only_share": int(np.count_nonzero((first == 0) != (second == 0))) / num_moved,
    }


def _cosine(product: float, one: float, other: float) -> float:
    return product / (math.sqrt(one) * math.sqrt(other)) if one and other else math.nan
