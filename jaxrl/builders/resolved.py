"""Resolved configurations: every name in the config is resolved to an object."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.environments import add_environment_to_errors, split_config
from jaxrl.config.keys import reject_value
from jaxrl.config.registry import (
    check_settings,
    instantiate,
    resolve,
    resolve_aliases,
    resolve_entry_points,
    resolve_reward_entry_points,
    select_function_settings,
    select_settings,
)
from jaxrl.config.schema import KEYS, LOCAL_MODEL
from jaxrl.data.tasks import TaskSource, resolve_sources
from jaxrl.envs.base import ENVS, Env
from jaxrl.envs.protocol import PROTOCOLS, Protocol
from jaxrl.envs.rewards.combiner import JUDGE, REWARD_PARTS, RewardPart
from jaxrl.envs.search.base import ENGINE_ALIASES, ENGINES
from jaxrl.envs.search_env import SearchEnv, get_stop_strings
from jaxrl.envs.tools.base import SANDBOXES, TOOLS, Tool
from jaxrl.logs.trackers import TRACKERS
from jaxrl.objectives import advantages, aggregation, filters, kl, losses
from jaxrl.sampling.interfaces import POLICIES
from jaxrl.training import optimizer, watch
from jaxrl.utils.callables import NamedFunction, get_short_name, is_dotted_path, probe_function

NO_ENGINE = "none"
"""Value of `search.engine` that disables search."""

CORPUS_SECTIONS = {"local": "local", "dense": "dense", "hybrid": "dense"}
"""Section of `config.search` that names the corpus, by engine."""

ADAPTERS = {"model.lora.rank": "jaxrl.extras.lora.adapter:wrap_with_lora"}
"""Functions that add an adapter to a model, by the key that enables it if above 0."""


@dataclass(frozen=True, kw_only=True)
class ToolFactory:
    """Factory for a configured tool. The model calls the tool by `name`."""

    name: str
    make: Callable[[], Tool]


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """Configuration with every name resolved. Sections of `config` are also attributes.

    Attributes:
        config: Validated configuration.
        env_class: Class that `env.name` selects.
        protocol: Function that maps tool names to the protocol.
        engine_class: Class that `search.engine` selects; None for "none".
        tools: Factories for `env.search.tools`.
        environment_parts: Names of the reward parts that the environment computes.
        reward_parts: All other reward parts, by their name in the logs.
        reward_weights: Weight of each reward part, in summation order.
        policy_class: Client class for a model behind an endpoint; None for a local model.
        task_sources: Sources of `tasks.train` and `tasks.eval`, if a configured stage reads them.
        estimator, policy_loss, loss_term, token_filter, aggregation, kl_estimator, group_filter,
            trajectory_filter, detector: Functions of the method; None if the name is "none".
        schedules: Learning-rate schedule of each stage.
        trackers: Class of each tracker, by configured name.
        hub_names: Hub names with commits, by key; `config` contains their local paths.
        weight: Relative share of the tasks drawn from this environment.
        members: Complete configuration of each environment by name, if there are several. In that
            case, read the fields that belong to an environment from its member only.
    """

    config: ConfigDict
    env_class: type[Env]
    protocol: Callable[[Sequence[str]], Protocol]
    engine_class: type[Tool] | None
    tools: Sequence[ToolFactory]
    environment_parts: Sequence[str]
    reward_parts: Mapping[str, RewardPart]
    reward_weights: Mapping[str, float]
    policy_class: type | None
    task_sources: Mapping[str, Sequence[TaskSource]]
    estimator: NamedFunction
    policy_loss: NamedFunction
    loss_term: NamedFunction | None
    token_filter: NamedFunction | None
    aggregation: NamedFunction
    kl_estimator: NamedFunction
    group_filter: NamedFunction | None
    trajectory_filter: NamedFunction | None
    detector: NamedFunction | None
    schedules: Mapping[str, NamedFunction]
    trackers: Mapping[str, type]
    hub_names: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    members: Mapping[str, ResolvedConfig] = field(default_factory=dict)

    def __getattr__(self, section: str) -> Any:
        return getattr(self.config, section)

    def __getitem__(self, key: str) -> Any:
        return self.config[key]

    def with_values(self, values: Mapping[str, Any]) -> ResolvedConfig:
        """Return a copy with new values, by dotted key. Resolved names cannot be replaced."""
        config = self.config.copy_and_resolve_references()
        config.update_from_flattened_dict(dict(values))
        return replace(self, config=config)

    @property
    def recorded_config(self) -> ConfigDict:
        """Configuration as recorded by a run, with Hub names instead of local paths."""
        return self.with_values(self.hub_names).config

    @property
    def environments(self) -> Mapping[str, ResolvedConfig]:
        """Configuration of each environment by name. A single environment has the name ""."""
        return self.members or {"": self}

    @property
    def has_custom_rollout(self) -> bool:
        """True if an environment implements `make_rollout`."""
        return any(hasattr(c.env_class, "make_rollout") for c in self.environments.values())

    def env_accepts(self, name: str) -> bool:
        """Return True if the environment's constructor has a parameter `name`."""
        return name in inspect.signature(self.env_class).parameters

    @property
    def has_search(self) -> bool:
        """True if an engine is configured and the environment's constructor accepts one."""
        return self.env_accepts("engine") and self.config.search.engine != NO_ENGINE

    @property
    def is_multi_turn(self) -> bool:
        """True if a turn can end with a stop string, followed by an observation."""
        return any(c.env_class.stop_strings for c in self.environments.values())

    @property
    def suites(self) -> set[str]:
        """Names of the evaluation suites that the configured stages run."""
        suites = {"train": self.config.eval.suites, "evaluate": self.config.eval.final_suites}
        return {suite for stage in self.config.stages for suite in suites.get(stage, ())}

    @property
    def needs_live_engine(self) -> bool:
        """True if the run needs a live search engine, not only a recording.

        The suite `random_search` always needs one, because it samples the engine's documents.
        """
        is_live = self.config.search.replay != "only" or "random_search" in self.suites
        return self.has_search and is_live

    @property
    def corpus_section(self) -> str:
        """Section of `config.search` that contains the corpus; "" if the run needs no corpus."""
        return CORPUS_SECTIONS.get(self.config.search.engine, "") if self.needs_live_engine else ""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a turn, except the tags of MCP tools."""
        if not issubclass(self.env_class, SearchEnv):
            return tuple(self.env_class.stop_strings)
        names = [tool.name for tool in self.tools]
        return get_stop_strings(self.protocol(names), names)

    @property
    def correctness_part(self) -> str:
        """Name of the environment's reward part that decides correctness.

        If `reward.correct` names one of `reward_parts`, `RewardCombiner` decides correctness.
        """
        parts, correct = self.environment_parts, self.config.reward.correct
        if correct in parts:
            return str(correct)
        return "exact_match" if "exact_match" in parts else parts[-1]

    @property
    def has_contexts(self) -> bool:
        """True if a trajectory may span several contexts."""
        return bool(self.config.rollout.context.name != "none")

    @property
    def context_tokens(self) -> int:
        """Maximum context length of the sampler in tokens."""
        rollout = self.config.rollout
        return int(rollout.context.max_tokens if self.has_contexts else rollout.max_total_tokens)

    @property
    def max_image_tokens(self) -> int:
        """Maximum number of image tokens in a trajectory.

        Without tools, all images are in the prompt.
        """
        rollout = self.config.rollout
        max_tokens = rollout.max_total_tokens if self.is_multi_turn else rollout.max_prompt_tokens
        return int(min(rollout.max_image_tokens or max_tokens, max_tokens))

    @property
    def overlong_limit(self) -> int:
        """Response length in tokens at which the overlong penalty reaches its maximum.

        With tools, the response includes observations, which `rollout.max_response_tokens` does
        not count, so the default limit is `max_total_tokens` minus the longest prompt.
        """
        rollout = self.config.rollout
        remaining = rollout.max_total_tokens - rollout.max_prompt_tokens
        limit = remaining if self.is_multi_turn else rollout.max_response_tokens
        return int(self.config.shaping.overlong_max_tokens or limit)

    @property
    def num_steps_by_stage(self) -> dict[str, int]:
        """Number of steps of each configured training stage."""
        return count_training_steps(self.config)

    def count_updates(self, stage: str) -> int:
        """Return the total number of optimizer steps in a stage."""
        if stage == "sft":
            return int(self.config.sft.num_steps)
        optimizer = self.config.optimizer
        return int(self.config.num_steps * optimizer.num_minibatches * optimizer.num_epochs)

    def get_optimizer_section(self, stage: str) -> ConfigDict:
        """Return the config section of a stage's optimizer."""
        return self.config.sft.optimizer if stage == "sft" else self.config.optimizer


def count_training_steps(config: Any) -> dict[str, int]:
    """Return the number of steps of each configured training stage."""
    steps = {"sft": config.sft.num_steps, "train": config.num_steps}
    return {stage: steps[stage] for stage in config.stages if stage in steps}


def get_adapter_key(config: Any) -> str:
    """Return the key that enables the adapter; "" if none is enabled."""
    return next((key for key in ADAPTERS if key in KEYS and config[key]), "")


def find_fixed_keys(c: Any, run_config: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values must not change when a run resumes from its checkpoints.

    Args:
        c: New configuration.
        run_config: Values that the run has used so far, by dotted key.
    """
    fixed = [*ADAPTERS]
    fixed += [key for key, entry in KEYS.items() if entry.is_fixed and entry.is_fixed(c)]
    if not get_adapter_key(c):
        fixed.append("model.freeze_tower")
    if "train" in c.stages:
        fixed.append("kl.anchor")
        if run_config.get("kl.coef") == 0:
            fixed.append("kl.coef")  # the checkpoints contain no reference policy
        if c.checkpoint.keep_best:  # values of different metrics cannot be ranked together
            fixed += ["eval.best_metric"]
            names = (run_config.get("environments") or {}) | c["environments"]
            for prefix in ("", *(f"environments.{name}." for name in names)):
                fixed += [f"{prefix}tasks.eval.{name}" for name in ("source", "sources", "holdout")]
    return fixed


def resolve_names(config: ConfigDict, *, needs_data: bool = True) -> ResolvedConfig:
    """Resolve every name in a configuration.

    Args:
        config: Configuration with valid values. Entry-point names in it are replaced with dotted
            paths, in place.
        needs_data: True to also resolve the task sources of the configured stages.

    Raises:
        ValueError: A name cannot be resolved. The message names the key.
    """
    members = {}
    for name, (weight, member) in split_config(config).items():
        with add_environment_to_errors(name):
            resolved = _resolve_names(member, needs_data=needs_data, environment=name)
            members[name] = replace(resolved, weight=weight)
    resolved = _resolve_names(config, needs_data=needs_data and not members)
    return replace(resolved, members=members)


def _resolve_names(
    config: ConfigDict, *, needs_data: bool, environment: str = ""
) -> ResolvedConfig:
    # The environment comes first: its reward parts decide which other parts to resolve.
    resolve_entry_points(config)
    resolve_aliases(config, "search.engine", ENGINE_ALIASES)
    env_class = _resolve_env_class(config)
    make_protocol, protocol = _resolve_protocol(config)
    environment_parts = env_class.reward_parts or protocol.reward_parts
    resolve_reward_entry_points(config, environment_parts)
    reward_parts, names = _resolve_reward_parts(config, environment_parts)
    weights = {names[name]: float(weight) for name, weight in config.reward.weights.items()}
    order = [part for part in (*environment_parts, *reward_parts) if part in weights]
    # The other names resolve independently.
    policy = config.policy.name
    none: dict[str, Any] = {"none": None}
    loss = config.loss
    length = {"max_response_tokens": config.rollout.max_response_tokens}
    clip = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    return ResolvedConfig(
        config=config,
        env_class=env_class,
        protocol=make_protocol,
        engine_class=_resolve_engine_class(config),
        tools=tuple(_make_tool_factory(config, name) for name in config.env.search.tools),
        environment_parts=environment_parts,
        reward_parts=reward_parts,
        reward_weights={part: weights[part] for part in order}
        | {part: weight for part, weight in weights.items() if part not in order},
        policy_class=(
            None
            if policy == LOCAL_MODEL
            else resolve("policy.name", policy, POLICIES, example="my_policy.Policy")
        ),
        task_sources={
            kind: resolve_sources(config, kind, environment)
            for kind, stages in (("train", {"train"}), ("eval", {"train", "evaluate"}))
            if needs_data and stages & set(config.stages)
        },
        estimator=_bind_function(
            config, "advantage.name", advantages.ESTIMATORS, advantages.COLUMNS
        ),
        policy_loss=_bind_function(config, "loss.name", losses.LOSSES, losses.ARRAYS, **clip),
        loss_term=_bind_function(config, "loss.term.name", none | losses.LOSS_TERMS, losses.ARRAYS),
        token_filter=_bind_function(
            config, "loss.token_filter.name", none | losses.TOKEN_FILTERS, losses.ARRAYS
        ),
        group_filter=_bind_function(config, "filter.name", none | filters.FILTERS, filters.COLUMNS),
        detector=_bind_function(config, "watch.name", none | watch.DETECTORS, watch.ARGUMENTS),
        trajectory_filter=_bind_function(
            config, "filter.trajectories", none | filters.TRAJECTORY_FILTERS, ("trajectory",)
        ),
        aggregation=_bind_function(
            config, "loss.aggregation", aggregation.AGGREGATIONS, aggregation.ARRAYS, **length
        ),
        kl_estimator=_bind_function(config, "kl.estimator", kl.KL_ESTIMATORS, kl.ARRAYS),
        schedules={
            stage: _bind_function(
                config, f"{section}.schedule", optimizer.SCHEDULES, optimizer.ARGUMENTS
            )
            for stage, section in (("train", "optimizer"), ("sft", "sft.optimizer"))
        },
        trackers={name: _resolve_tracker(name) for name in config.log.trackers},
    )


def _resolve_tracker(name: str) -> type:
    cls = resolve("log.trackers", name, TRACKERS, example="my_tracker.MyTracker")
    methods = (getattr(cls, method, None) for method in ("write", "close"))
    if not isinstance(cls, type) or not all(map(callable, methods)):
        reject_value("log.trackers", name, "a class with write and close, as in logs/writers.py")
    return cls


def check_tracker_packages(config: ResolvedConfig) -> None:
    """Raise a ValueError if the package that a tracker needs is not installed."""
    for name, cls in config.trackers.items():
        package = getattr(cls, "package", "")
        if package and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"config.log.trackers names {name!r}, but {package} is not installed; run "
                f"pip install -e '.[{package}]', or remove the name."
            )


def _resolve_env_class(config: ConfigDict) -> type[Env]:
    cls = resolve("env.name", config.env.name, ENVS, example="my_env.MyEnv")
    check_settings("env", config.env, config.env.name)
    required = ("stop_strings", "reward_parts", "start", "step", "score")
    # Members inherited from `Env` are declarations without an implementation.
    missing = [name for name in required if getattr(cls, name, None) is getattr(Env, name, None)]
    if not isinstance(cls, type) or missing:
        raise ValueError(
            f"config.env.name is {config.env.name!r}, which lacks {', '.join(missing)}; expected a "
            f"class with {', '.join(required)}, as in jaxrl/envs/base.py."
        )
    for name in ("stop_strings", "reward_parts"):
        _check_string_tuple("env.name", config.env.name, name, getattr(cls, name))
    return cls


def _resolve_protocol(config: ConfigDict) -> tuple[Callable[[Sequence[str]], Protocol], Protocol]:
    """Return the function that maps tool names to a protocol, and its result without tools."""
    key, name = "env.search.protocol", config.env.search.protocol
    function = resolve(key, name, PROTOCOLS, example="my_protocol.make")
    if not callable(function):
        reject_value(key, name, "a function from names of tools to a protocol")
    section = config.env.search.get(name)
    make = partial(function, **(section.to_dict() if section else {}))
    protocol: Protocol = probe_function(
        key,
        name,
        make,
        (),
        expected="a jaxrl.envs.protocol.Protocol",
        is_valid=lambda result: isinstance(result, Protocol),
    )
    for attribute in ("tags", "tools", "stop_strings", "reward_parts"):
        _check_string_tuple(key, name, attribute, getattr(protocol, attribute))
    return make, protocol


def _resolve_engine_class(config: ConfigDict) -> type[Tool] | None:
    key, name = "search.engine", config.search.engine
    entry = None if name == NO_ENGINE else resolve(key, name, ENGINES, example="my_engine.Engine")
    check_settings("search", config.search, name)
    if entry is None:
        return None
    return _check_tool_class(key, name, entry)


def _make_tool_factory(config: ConfigDict, name: str) -> ToolFactory:
    key, search = "env.search.tools", config.env.search
    if name == "python" and "python" in search:
        key, section = "env.search.python.sandbox", search.python
        sandbox_class = resolve(key, section.sandbox, SANDBOXES, example="my_sandbox.Sandbox")
        cls = _check_tool_class(key, section.sandbox, sandbox_class)
        settings = {
            "timeout_s": section.timeout_s,
            "max_memory": int(section.memory_mib * 2**20),
            "max_output": section.max_output,
        }
        make = partial(instantiate, "env.search.python", cls, settings)
        return ToolFactory(name=cls.name, make=make)
    entry = resolve(key, name, TOOLS, example="my_tool.Calculator")
    if inspect.isfunction(entry):
        # Imported late: it loads transformers and pydantic.
        from jaxrl.envs.tools.functions import FunctionTool

        try:
            tool = FunctionTool(entry, deadline_s=search.tool_deadline_s)
        except (ValueError, ImportError) as error:
            raise ValueError(f"config.{key} names {name!r}: {error}") from error
        return ToolFactory(name=tool.name, make=lambda: tool)
    cls = _check_tool_class(key, name, entry)
    return ToolFactory(name=cls.name, make=partial(instantiate, key, cls, {}))


def _check_tool_class(key: str, name: str, cls: Any) -> type[Tool]:
    is_tool = isinstance(cls, type) and issubclass(cls, Tool) and not inspect.isabstract(cls)
    strings = [text for text in ("name", "blank") if isinstance(getattr(cls, text, None), str)]
    if not is_tool or len(strings) < 2:
        expected = "a subclass of jaxrl.envs.tools.base.Tool that defines name, blank and run"
        if key == "search.engine":
            expected = "a subclass of jaxrl.envs.search.base.SearchEngine that defines run"
        function = ", or a function" * (key == "env.search.tools")
        raise ValueError(f"config.{key} names {name!r}; expected {expected}{function}.")
    return cls


def _resolve_reward_parts(
    config: ConfigDict, environment_parts: Sequence[str]
) -> tuple[dict[str, RewardPart], dict[str, str]]:
    """Resolve the reward parts that the environment does not compute.

    Returns:
        Reward parts by logged name, and logged names by configured name. The logged name of a
        function is the last component of its dotted path, or the full path if two functions share
        that component.
    """
    # Logged names. A part that only decides correctness needs no weight.
    reward = config.reward
    short_names = [get_short_name(name) for name in reward.weights if is_dotted_path(name)]
    configured_names = list(reward.weights)
    if reward.correct in {*REWARD_PARTS, *reward.judges}:
        configured_names.append(reward.correct)
    names = {
        name: get_short_name(name)
        if short_names.count(get_short_name(name)) == 1 and is_dotted_path(name)
        else name
        for name in configured_names
    }
    for key in ("settings", "judges"):
        unused = [name for name in reward[key] if name not in names]
        if unused:
            raise ValueError(
                f"config.reward.{key} has {unused[0]!r}; expected a name in config.reward.weights."
            )
    # Objects: user functions, judges and built-in parts.
    parts: dict[str, RewardPart] = {}
    for name, part in names.items():
        if part in environment_parts:
            if name != part:
                raise ValueError(
                    f"config.reward.weights names {name!r}, but the environment already has a part "
                    f"{part!r}; rename the function."
                )
        elif is_dotted_path(name):
            from jaxrl.envs.rewards.functions import (
                build_reward_part,  # imported late: few runs need it
            )

            parts[part] = build_reward_part(
                name,
                resolve("reward.weights", name, {}, example="my_reward.brevity"),
                part=part,
                settings=reward.settings.get(name, {}),
                answer_is_text=config.env.name == "math",
            )
        elif name in reward.judges:
            parts[part] = _build_judge(config, name)
        elif name in REWARD_PARTS:
            cls = resolve("reward.weights", name, REWARD_PARTS, example="my_reward.brevity")
            try:
                parts[part] = instantiate(f"reward.{name}", cls, dict(reward.get(name, {})))
            except ImportError as error:
                raise ValueError(f"config.reward names {name!r}, but {error}") from error
    return parts, names


def _build_judge(config: ConfigDict, name: str) -> RewardPart:
    key, settings = f"reward.judges[{name!r}]", config.reward.judges[name]
    if not re.fullmatch(r"[a-z]\w*", name) or name in REWARD_PARTS:
        raise ValueError(f"config.{key}: expected an unused name of letters, digits and _.")
    try:
        judge, settings_class = map(pkgutil.resolve_name, JUDGE)
        part: RewardPart = judge(name, instantiate(key, settings_class, settings))
        return part
    except TypeError as error:
        raise ValueError(f"config.{key}: {error}.") from error


def _bind_function(
    config: ConfigDict,
    key: str,
    table: Mapping[str, Any],
    arrays: Sequence[str],
    **common: Any,
) -> Any:
    """Resolve a function of the training method and bind its settings.

    Args:
        config: Configuration with valid values.
        key: Key of the name. If it ends in `.name`, the section has `settings` and a
            subsection for each built-in name; otherwise the function has no settings.
        table: Built-in functions by name. A value of None disables the function.
        arrays: Names of the positional arguments that the function may take.
        common: Settings passed to every function of this kind that accepts them.

    Returns:
        A `NamedFunction`; None if the name is disabled in `table`.
    """
    section, _, last = key.rpartition(".")
    name, settings, settings_key = config[section][last], {}, key
    if last == "name":
        check_settings(section, config[section], name)
        settings, settings_key = select_settings(config[section]), f"{section}.settings"
    if name in table and table[name] is None:
        return None
    function = _resolve_function(key, name, table, arrays)
    values = select_function_settings(settings_key, name, function, settings, **common)
    return NamedFunction(key=key, name=name, function=function, settings=values)


def _resolve_function(
    key: str, name: str, table: Mapping[str, Any], arrays: Sequence[str]
) -> Callable[..., Any]:
    """Resolve a function and check that its positional parameters are in `arrays`.

    Raises:
        ValueError: The object is not a function, or takes other parameters.
    """
    function: Callable[..., Any] = resolve(key, name, table, example="my_module.my_function")
    expected = f"a function of some of {', '.join(arrays)}, with settings after a *"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.{key} names {name!r}: {error}; expected {expected}.") from error
    unknown = [
        p
        for p in parameters
        if p.kind is not p.KEYWORD_ONLY
        and not (p.kind is p.POSITIONAL_OR_KEYWORD and p.name in arrays)
    ]
    if unknown:
        takes = str(unknown[0])
        raise ValueError(
            f"config.{key} names {name!r}, which takes {takes!r}; expected {expected}."
        )
    return function


def _check_string_tuple(key: str, name: str, field: str, strings: Any) -> None:
    """Raise a ValueError unless `strings`, a field of the object `name`, is a tuple of strings."""
    if not isinstance(strings, tuple) or not all(isinstance(t, str) and t for t in strings):
        raise ValueError(
            f"config.{key} names {name!r}, whose {field} is {strings!r}; expected a tuple "
            "of strings, such as ('</answer>',)."
        )
