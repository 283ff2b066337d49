"""Trial calls of user code on example inputs, to report errors before a run starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.envs.base import Env, Episode, Reward, ScoredEpisode, Task, Turn
from jaxrl.envs.rewards.combiner import RewardCombiner
from jaxrl.envs.rewards.functions import RewardFunction
from jaxrl.envs.tools.base import InvalidCallError, Tool
from jaxrl.envs.tools.functions import FunctionTool
from jaxrl.objectives.aggregation import token_weights
from jaxrl.objectives.losses import ARRAYS as LOSS_ARRAYS
from jaxrl.objectives.losses import PolicyLoss
from jaxrl.training.method import Method, OptimizerSettings
from jaxrl.training.optimizer import make_schedule
from jaxrl.types import Columns
from jaxrl.utils.callables import (
    NamedFunction,
    UserCodeError,
    format_failure,
    is_dotted_path,
    is_user_code,
    probe_function,
)
from jaxrl.utils.errors import ToolError

SHAPE = (2, 32)
"""Shape `[rows, tokens]` of the example arrays for loss functions."""

MAX_SCHEDULE_STEPS = 100_000
"""Maximum number of steps, evenly spaced over a stage, at which a schedule is evaluated."""

_DTYPES = {"loss_mask": jnp.bool_, "segment_ids": jnp.int32, "positions": jnp.int32}
_DIFFERENTIABLE_ARRAYS = ("logprobs", "entropies", "log_ratios")


def probe_schedule(settings: OptimizerSettings) -> None:
    """Check that a learning-rate schedule returns finite, nonnegative rates.

    Raises:
        UserCodeError: The schedule raised an exception or returned an invalid rate. The message
            names the key.
    """
    schedule, count = settings.schedule, settings.num_updates
    steps = np.linspace(0, count - 1, min(count, MAX_SCHEDULE_STEPS)).astype(np.int32)

    def compute_rates() -> np.ndarray:
        return np.asarray(jax.jit(partial(jax.lax.map, make_schedule(settings)))(steps))

    probe_function(
        schedule.key,
        schedule.name,
        compute_rates,
        expected=f"a finite rate of at least 0 at each of {count} steps",
        is_valid=lambda r: r.ndim == 1 and bool(np.all(np.isfinite(r) & (r >= 0))),
    )


def probe_method(method: Method, max_response_tokens: int) -> None:
    """Call the method's custom functions on arrays with the shapes of a training step.

    Losses, KL estimators and advantage estimators are traced, not executed.

    Raises:
        UserCodeError: A function raised an exception, or returned a value of the wrong type or
            shape.
    """
    loss = method.loss
    for function in (loss.policy_loss, loss.term, loss.token_filter, method.kl.estimator):
        if function is not None and function.is_user_code:
            _probe_loss(function, is_filter=function is loss.token_filter)
    # The advantage estimator, traced on one step's trajectories.
    estimator, count = method.advantage.estimator, method.tasks_per_step * method.group_size
    if estimator.is_user_code:
        columns = Columns(())
        arrays = [
            jax.random.key(0)
            if name == "key"
            else jax.ShapeDtypeStruct((count,), getattr(columns, name).dtype)
            for name in estimator.arguments
        ]
        probe_function(
            estimator.key,
            estimator.name,
            partial(jax.eval_shape, estimator),
            *arrays,
            expected=f"float32[{count}], one advantage per trajectory",
            is_valid=lambda a: a.shape == (count,) and jnp.issubdtype(a.dtype, jnp.floating),
        )
    # The filter and the aggregation are executed, not traced.
    group_filter = method.filter.group_filter
    if group_filter is not None and group_filter.is_user_code:
        index = np.arange(
            (method.filter.tasks_per_batch or method.tasks_per_step) * method.group_size
        )
        columns = Columns(())
        arrays = [
            (index // method.group_size).astype(np.int32)
            if name == "group_ids"
            else (index % 2).astype(getattr(getattr(columns, name, None), "dtype", np.float32))
            for name in group_filter.arguments
        ]
        probe_function(
            group_filter.key,
            group_filter.name,
            lambda *arrays: np.asarray(group_filter(*arrays)),
            *arrays,
            expected=f"bool[{len(index)}], one flag per trajectory",
            is_valid=lambda flags: flags.dtype == bool and flags.shape == index.shape,
        )
    if loss.aggregation.is_user_code:
        counts = np.arange(method.groups_per_minibatch * method.group_size)
        masks = [np.ones(n, bool) for n in counts % (max_response_tokens + 1)]
        probe_function(
            loss.aggregation.key,
            loss.aggregation.name,
            token_weights,
            masks,
            loss.aggregation,
        )


def probe_loss(loss: Callable[..., Any]) -> None:
    """Trace a policy loss that is passed to `api.Trainer`; see `probe_method`.

    Raises:
        UserCodeError: The loss takes an unknown array, raised an exception, or returned an invalid
            value.
    """
    if not callable(loss) or not isinstance(loss, Hashable):
        raise UserCodeError(
            f"the loss is {loss!r:.80}; expected a function, or a callable object with a hash, "
            "such as a frozen dataclass."
        )
    function = NamedFunction.from_callable("loss.name", loss)
    unknown = [name for name in function.arguments if name not in LOSS_ARRAYS]
    if unknown:
        raise UserCodeError(
            f"the loss {function.name!r} takes {', '.join(unknown)}; expected arrays among "
            f"{', '.join(LOSS_ARRAYS)}, and settings as keyword-only parameters with a default."
        )
    _probe_loss(function, is_filter=False)


def _probe_loss(function: NamedFunction, *, is_filter: bool) -> None:
    """Trace a loss, KL estimator or token filter, and its gradient unless it is a filter."""
    arrays = [
        jax.ShapeDtypeStruct(SHAPE, _DTYPES.get(name, jnp.float32)) for name in function.arguments
    ]

    def is_per_token(values: Any, kind: Any = jnp.floating) -> bool:
        shape = getattr(values, "shape", None)
        return shape == SHAPE and bool(jnp.issubdtype(values.dtype, kind))

    def is_valid(result: Any) -> bool:
        if is_filter:
            return is_per_token(result, jnp.bool_)
        if not isinstance(result, PolicyLoss):
            return function.key == "kl.estimator" and is_per_token(result)
        if not isinstance(result.metrics, Mapping):
            return False
        shapes = [getattr(values, "shape", None) for values in result.metrics.values()]
        return is_per_token(result.per_token) and shapes == [SHAPE] * len(shapes)

    # Trace the function itself.
    expected = "a PolicyLoss whose loss and metrics have one value per token"
    if is_filter:
        expected = "a bool per token"
    elif function.key == "kl.estimator":
        expected = "a value per token"
    probe_function(
        function.key,
        function.name,
        partial(jax.eval_shape, function),
        *arrays,
        expected=f"{expected}, {list(SHAPE)} here",
        is_valid=is_valid,
    )
    # Trace its gradient, which can fail even if the function itself does not.
    argnums = tuple(
        i for i, name in enumerate(function.arguments) if name in _DIFFERENTIABLE_ARRAYS
    )
    if is_filter or not argnums:
        return

    def sum_loss(*arrays: jax.Array) -> jax.Array:
        result = function(*arrays)
        return jnp.sum(result.per_token if isinstance(result, PolicyLoss) else result)

    probe_function(
        function.key,
        function.name,
        partial(jax.eval_shape, jax.grad(sum_loss, argnums=argnums)),
        *arrays,
    )


def probe_rewards(c: ResolvedConfig, env: Env, task: Task) -> None:
    """Call each custom reward function on an example episode for `task`.

    Raises:
        UserCodeError: A function raised an exception, or did not return a number.
    """
    names = {part: part for part in c.reward_parts}
    names |= {name.split(".")[-1].split(":")[-1]: name for name in c.reward.weights}
    answer = task.answers[0] if task.answers else "example"
    episode = Episode(task=task, turns=[Turn(text=f"<answer>{answer}</answer>")])
    reward = Reward(parts=dict.fromkeys(env.reward_parts, 0.0), final_answer=answer)
    for part, function in c.reward_parts.items():
        if not isinstance(function, RewardFunction):
            continue  # calls to judges cost money
        # A part may return None for an episode to which it does not apply.
        combine = RewardCombiner(
            weights=dict.fromkeys(env.reward_parts[:1], 1.0),
            custom_parts={part: function},
            deadline_s=c.reward.deadline_s,
        )
        [[result]] = combine([[ScoredEpisode(episode=episode, reward=reward)]])
        if isinstance(result, BaseException):
            text = f"config.reward.weights names {names.get(part, part)!r}, which failed on an "
            raise UserCodeError(f"{text}example: {format_failure(result)}.") from result


def probe_tools(c: ResolvedConfig, tools: Sequence[Tool], engine: Tool | None) -> None:
    """Call each custom tool and the custom search engine on an example argument.

    A tool may reject the example with an `InvalidCallError` or `ToolError`.

    Raises:
        UserCodeError: A tool raised any other exception, or did not return a string.
    """
    tools_by_name = {tool.name: tool for tool in tools}
    for name, factory in zip(c.env.search.tools, c.tools, strict=True):
        tool = tools_by_name[factory.name]
        if isinstance(tool, FunctionTool):
            example = json.dumps(_make_example(tool.parameters))
        else:
            example = "example"
        if isinstance(tool, FunctionTool) or is_user_code(type(tool)):
            _probe_tool("env.search.tools", name, tool, example)
    if engine is not None and is_dotted_path(c.search.engine) and c.search.replay != "only":
        _probe_tool("search.engine", c.search.engine, engine, "example")


def _probe_tool(key: str, name: str, tool: Tool, example: str) -> None:
    def run_tool() -> Any:
        try:
            return tool.run(example)
        except (InvalidCallError, ToolError) as error:
            return str(error)
        except Exception as error:
            text = f"config.{key} names {name!r}, which failed on the call {example!r}: "
            hint = "; return an error message for calls that it rejects" * (key != "search.engine")
            raise ValueError(f"{text}{format_failure(error)}{hint}.") from error

    probe_function(
        key, name, run_tool, expected="text", is_valid=lambda result: isinstance(result, str)
    )


def _make_example(schema: Mapping[str, Any]) -> Any:
    """Build an example value that matches a JSON schema, with required properties only."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: _make_example(properties[name]) for name in schema.get("required", ())}
    examples = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "null": None}
    return examples.get(kind, "example") if isinstance(kind, str) else "example"
