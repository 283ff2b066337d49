"""Build all objects of a run from a resolved configuration."""

from __future__ import annotations

import dataclasses
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.builders import capacity
from jaxrl.builders.environment import (
    build_environments,
    build_random_search_engines,
    build_rewards,
    build_search_engines,
    build_tools,
    check_price_names,
)
from jaxrl.builders.method import (
    build_from_section,
    build_method,
    build_optimizer_settings,
    build_policy_architecture,
    compute_batch_shape,
    find_frozen_entries,
)
from jaxrl.builders.probe import probe_method, probe_rewards, probe_schedule, probe_tools
from jaxrl.builders.resolved import NO_ENGINE, ResolvedConfig
from jaxrl.config.environments import add_environment_to_errors
from jaxrl.config.keys import import_optional
from jaxrl.config.registry import instantiate
from jaxrl.config.schema import KEYS, LOCAL_MODEL
from jaxrl.data.stream import Mixture, Source, Stream
from jaxrl.data.tasks import Tasks, check_data_sources, describe_overlap, open_tasks, split_holdout
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Env, Task
from jaxrl.envs.rewards.combiner import EnvironmentRewards
from jaxrl.envs.search.base import EmptySearch
from jaxrl.logs.eval_summary import TOTAL_REWARD
from jaxrl.models.architecture import Architecture
from jaxrl.models.attention.choice import select_kernels
from jaxrl.models.hf_weights import load_hf, open_hf, save_hf
from jaxrl.models.policy import Model
from jaxrl.models.registry import read_architecture
from jaxrl.runtime.checkpoint import find_latest_complete_step
from jaxrl.runtime.compilation import clear_cache_on_code_change
from jaxrl.runtime.sharding import check_even_split, make_local_mesh, make_mesh
from jaxrl.runtime.weight_memory import count_elements
from jaxrl.sampling.contexts import ContextRule
from jaxrl.sampling.decode import should_scan_layers
from jaxrl.sampling.demonstrations import read_demonstrations
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.episodes import BaseRollout, ReplySchedule, TokenLimits
from jaxrl.sampling.interfaces import PROCESSOR, ExternalModel, ImageProcessor
from jaxrl.sampling.next_token import FULL, GREEDY, TOP_P, select_sampling_method
from jaxrl.sampling.rollout import Rollout
from jaxrl.sampling.shared_rollout import SharedRollout
from jaxrl.sampling.stop_strings import StopAutomaton, join_automata
from jaxrl.sft import supervised_loss
from jaxrl.training.method import Method
from jaxrl.training.optimizer import make_optimizer, make_schedule
from jaxrl.training.policy_loss import make_update_step
from jaxrl.training.run_state import Components, Stage
from jaxrl.training.settings import CheckpointSettings, EvaluationSettings, LedgerSettings, Settings
from jaxrl.training.update import UpdateStep
from jaxrl.types import Params

Show = Callable[[str], None]
Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RunComponents(Components):
    """Components of all stages, plus the tokenizer and image processor for other callers."""

    tokenizer: Tokenizer
    processor: ImageProcessor | None  # None if the model does not support images


def build(
    c: ResolvedConfig,
    show: Show = lambda _: None,
    *,
    workdir: Path | None = None,
    log: Log = lambda _: None,
    now: datetime | None = None,
    halves_micro_rows: bool = False,
) -> RunComponents:
    """Build and check everything that the configured stages need.

    The search index is built last, after all cheaper checks.

    Args:
        c: Resolved configuration. A `num_steps` of 0 is overwritten with the computed number.
        show: Function that displays a status message.
        workdir: Folder of the run. Recordings are stored there by default.
        log: Function that logs a message.
        now: Time passed to the chat template; the current time by default.
        halves_micro_rows: True to halve the train stage's micro-batches if memory runs out.

    Raises:
        FileNotFoundError, ValueError: A file, the model or a combination of settings is invalid.
        OutageError: The search engine's server does not respond.
    """
    # The model: local, or behind an endpoint and therefore without weights.
    clear_cache_on_code_change()
    mesh = make_mesh(**c.mesh)
    external = _build_external_model(c, workdir, log)
    architecture, tokenizer = read_model_and_tokenizer(
        c, mesh, is_local=external is None, now=now, log=log
    )
    policy = build_policy_architecture(c, architecture) if external is None else architecture
    if policy.wrapper is not None:
        policy.wrapper.check_files_and_settings()
    processor = build_image_processor(c, tokenizer, architecture)
    if c.has_contexts and architecture.tower is not None:
        raise ValueError(
            f"config.rollout.context.name is {c.rollout.context.name!r}, but the model of "
            "config.model.path supports images; expected 'none', or a model without image support."
        )
    tools = {name: build_tools(environment, log) for name, environment in c.environments.items()}
    check_price_names(c, tools)
    # The control environments, whose search engines find nothing. All checks use these
    # environments, because the index is built after the checks.
    empty_engines = {
        name: None if environment.search.engine == NO_ENGINE else EmptySearch()
        for name, environment in c.environments.items()
    }
    control_envs = build_environments(c, empty_engines, tools)
    chat_tools = {name: getattr(env, "chat_tools", ()) for name, env in control_envs.items()}
    for schemas in filter(None, chat_tools.values()):
        tokenizer.render_results([""], schemas)  # raises if the chat template cannot render them
    automata = join_automata(
        [StopAutomaton(tokenizer.vocab_bytes, env.stop_strings) for env in control_envs.values()]
    )
    # Data: tasks and demonstrations.
    tasks, eval_tasks = open_all_tasks(c, show)
    contexts = build_from_section(ContextRule, c.rollout.context) if c.has_contexts else None
    limits = build_from_section(
        TokenLimits, c.rollout, max_image_tokens=c.max_image_tokens, context=contexts
    )
    demonstrations: list[Source[Any]] = []
    for name, environment in c.environments.items() if "sft" in c.stages else ():
        names = [tool.name for tool in tools[name]]
        with add_environment_to_errors(name):
            items = read_demonstrations(
                environment.sft.source,
                tokenizer,
                limits,
                protocol=environment.protocol(names),
                tools=("search", *names),
                chat_tools=chat_tools[name],
                processor=processor,
            )
        demonstrations.append(Source(items=items, weight=environment.weight, name=name))
    # Sampler, model and rewards.
    engine = None
    if external is None:
        [engine_class] = {getattr(env, "engine_kind", Engine) for env in control_envs.values()}
        engine = build_engine(c, policy, mesh, automata[0], tokenizer, engine_class=engine_class)
    model = build_model(c, mesh, policy, tokenizer)
    schedule = build_reply_schedule(c, mesh.devices.flat[0].platform)
    rewards = {name: build_rewards(e, workdir, log) for name, e in c.environments.items()}
    for split, mixture in (("train", tasks), ("eval", eval_tasks)):
        for source in mixture.sources:
            task = source.items[0]
            with add_environment_to_errors(name := task.environment):
                rewards[name].check_task(task, f"config.tasks.{split}.source")
                probe_rewards(c.environments[name], control_envs[name], task)
    reward_fn = EnvironmentRewards(rewards) if c.members else rewards[""]

    def make_local_rollout(
        envs: Mapping[str, Env], image_processor: ImageProcessor | None = processor
    ) -> Any:
        arguments = (tokenizer, limits, schedule, reward_fn, image_processor)
        if external is not None:
            return external.make_rollout(envs, *arguments)
        if c.has_custom_rollout:
            custom_env: Any = envs[""]
            return custom_env.make_rollout(engine, *arguments, log=log)
        assert engine is not None
        automata_by_name = dict(zip(c.environments, automata, strict=True))
        return Rollout(engine, envs, tokenizer, automata_by_name, *arguments[1:])

    def make_shared_rollout(
        envs: Mapping[str, Env], image_processor: ImageProcessor | None = processor
    ) -> SharedRollout:
        # Groups from other processes arrive without images, so the processor reloads them.
        return SharedRollout(
            make_local_rollout(envs, image_processor),
            restore=image_processor.reload_images if image_processor else list,
        )

    # Drop or reject tasks with overlong prompts.
    control_rollout = make_local_rollout(control_envs)
    tasks, notes = _filter_sources(tasks, control_rollout, c, show)
    eval_tasks, eval_notes = _filter_sources(eval_tasks, control_rollout, c, show)
    tasks, audit_notes = _audit_tasks(c, tasks, workdir, show)
    notes += audit_notes
    notes += [*eval_notes, describe_overlap(tasks, eval_tasks), _set_num_steps(c, tasks)]
    if engine:
        notes = [*collect_template_notes(tokenizer), *notes]
    # Training stages, whose schedules need the number of steps.
    method = build_method(c)
    stages = build_stages(c, model, method, halves_micro_rows=halves_micro_rows)
    # The environments with the real search engines, and the rollouts of control suites. If there
    # are several environments, the control suites skip those without a search engine.
    searches = build_search_engines(c, show, workdir, log)
    control_environments = {"empty_search": list(searches if c.members else control_envs)}
    controls = {"empty_search": make_shared_rollout(control_envs)}
    if "random_search" in c.suites:
        random_engines = build_random_search_engines(c, searches)
        control_environments["random_search"] = list(random_engines)
        controls["random_search"] = make_shared_rollout(
            build_environments(c, random_engines, tools)
        )
    for name, environment in c.environments.items():
        with add_environment_to_errors(name):
            engine_to_probe = searches[name].engine if name in searches else None
            probe_tools(environment, tools[name], engine_to_probe)
    envs = control_envs | build_environments(c, searches, tools)
    if "blank_images" in c.suites:
        if processor is None:
            raise ValueError(
                "config.eval has the suite 'blank_images', but the model in config.model.path "
                "does not support images; remove the suite."
            )
        controls["blank_images"] = make_shared_rollout(envs, processor.make_blank_processor())
    return RunComponents(
        mesh=mesh,
        model=model,
        method=method,
        stages=stages,
        export=partial(export_model, model, c.model.path),
        tokenizer=tokenizer,
        tasks=tasks,
        eval_tasks=list(eval_tasks),
        demonstrations=Mixture(demonstrations),
        sampler=engine,
        external=external.display_name if external else "",
        rollout=make_shared_rollout(envs),
        controls=controls,
        control_environments=control_environments,
        # Rewards of several environments are sums of different parts, so only their totals compare.
        reward_weights={TOTAL_REWARD: 1.0} if c.members else c.reward_weights,
        prompt_time=tokenizer.now.isoformat() if tokenizer.reads_clock else "",
        is_trigger=make_trigger_mask(tokenizer, c.shaping.trigger_words),
        notes=tuple(filter(None, notes)),
        processor=processor,
    )


def build_run_settings(c: ResolvedConfig) -> Settings:
    """Create the settings that all stages share."""
    # `depends_on` holds every value that affects evaluation results. Results are reused if it is
    # unchanged.
    endpoint = c.policy.get(c.policy.name)
    sections = ("seed", "model", "images", "env", "prompt", "search", "rollout", "reward", "eval")
    values = c.recorded_config.to_dict()
    copied = c.recorded_config.to_dict()  # keys are removed from this copy
    depends_on = {name: copied[name] for name in sections if name in copied}
    depends_on.get("images", {}).pop("cache_mib", None)
    if c.members:  # without their paths, which may change
        depends_on["environments"] = {
            name: {
                key: value
                for key, value in environment.recorded_config.to_dict().items()
                if key in ("env", "prompt", "search", "rollout", "reward")
                or (key == "tasks" and environment.tasks.eval.holdout)
            }
            for name, environment in c.members.items()
        }
    if c.policy.name != LOCAL_MODEL:
        depends_on["policy"] = copied["policy"]
        for key in ("prompt_price", "completion_price", "replay", "replay_folder"):
            del depends_on["policy"]["openai"][key]  # these do not affect completions
    if c.rollout.max_cost:
        depends_on["prices"] = c.ledger.prices
    if c.tasks.eval.holdout and not c.members:
        depends_on["tasks"] = copied["tasks"]  # they decide which tasks are held out
    return Settings(
        stages=c.stages,
        seed=c.seed,
        max_response_tokens=c.rollout.max_response_tokens,
        max_failed_steps=c.rollout.max_failed_steps,
        evaluation=build_from_section(
            EvaluationSettings,
            c.eval,
            correct=c.reward.correct,
            has_python=any("python" in e.env.search.tools for e in c.environments.values()),
            tool_environments=[name for name, e in c.environments.items() if e.is_multi_turn],
            section=c.eval.to_dict(),
            depends_on=depends_on,
        ),
        checkpoint=build_from_section(CheckpointSettings, c.checkpoint),
        ledger=build_from_section(LedgerSettings, c.ledger),
        model_path=c.model.path,
        architecture=c.model.architecture,
        log_every_steps=c.log.every_steps,
        num_logged_trajectories=c.log.trajectories,
        tokens=c.log.tokens,
        replay_folder=endpoint.replay_folder if endpoint and endpoint.replay == "record" else None,
        trackers={
            name: partial(
                instantiate, "log.trackers", cls, {}, project=c.log.project, config=values
            )
            for name, cls in c.trackers.items()
        },
        values=values,
    )


def build_image_processor(
    c: ResolvedConfig, tokenizer: Tokenizer, model: Architecture
) -> ImageProcessor | None:
    """Create the image processor; return None if the model does not support images.

    Raises:
        ValueError: preprocessor_config.json does not match the model's config.json.
    """
    if tokenizer.image_id is None or model.tower is None:
        return None
    processor: Any = pkgutil.resolve_name(PROCESSOR)(c.model.path, **c.get("images", {}))
    patches = processor.num_values_per_patch, processor.num_patches_per_token
    expected = model.tower.num_values_per_patch, model.tower.num_patches_per_token
    if patches != expected:
        raise ValueError(
            f"preprocessor_config.json in {c.model.path!r} makes patches of {patches[0]} values, "
            f"{patches[1]} per token; the model's config.json expects {expected[0]} and "
            f"{expected[1]} (patch_size, merge_size, temporal_patch_size). Copy the model's file."
        )
    return processor


def _build_external_model(
    c: ResolvedConfig, workdir: Path | None, log: Log
) -> ExternalModel | None:
    """Create the client for a model behind an endpoint; return None for a local model.

    Raises:
        ValueError: The API key is not set, or the workdir contains checkpoints of a local model.
    """
    if c.policy_class is None:
        return None
    if workdir is not None and find_latest_complete_step(workdir / "checkpoints") is not None:
        raise ValueError(
            f"config.policy.name is {c.policy.name!r}, but {workdir} contains checkpoints of a "
            "local model; set --workdir to another folder."
        )
    settings, process = c.policy[c.policy.name].to_dict(), jax.process_index()
    external: ExternalModel = c.policy_class(settings, workdir=workdir, process=process, log=log)
    return external


def read_model_and_tokenizer(
    c: ResolvedConfig,
    mesh: Mesh,
    *,
    is_local: bool,
    now: datetime | None = None,
    log: Log = lambda _: None,
) -> tuple[Architecture, Tokenizer]:
    """Read the model architecture and tokenizer, and check them against the config and devices.

    Args:
        c: Resolved configuration.
        mesh: Mesh of all devices.
        is_local: True if the model runs on these devices, False if it is behind an endpoint.
        now: Time passed to the chat template; the current time by default.
        log: Function that logs a message about the weights.

    Raises:
        ValueError: The model, tokenizer, configuration and devices are incompatible.
    """
    # The architecture. Checks against devices and config apply to a local model only.
    folder = c.model.path
    model = read_architecture(folder, c.model.architecture)
    if is_local:
        check_even_split(mesh, model)
        for key, supported in (
            ("balance_coef", model.statistics_reader),
            ("replay", model.recorded_specs),
            ("freeze_tower", model.tower),
        ):
            if c.model[key] and not supported:
                problem = "does not support images" if key == "freeze_tower" else "has no experts"
                raise ValueError(
                    f"config.model.{key} is {c.model[key]}, but the model of config.model.path "
                    f"{problem}; set it to {KEYS[f'model.{key}'].default}."
                )
        capacity.check_row_counts(c, mesh, jax.process_count())
        capacity.check_context_length(c, model)
    # The tokenizer, then the weight files.
    tokenizer = Tokenizer.from_folder(
        folder,
        eos_tokens=c.model.eos_tokens,
        template_arguments=c.prompt.chat_template_kwargs,
        now=now,
    )
    if is_local:
        if tokenizer.num_tokens > model.vocab_size:
            raise ValueError(
                f"the tokenizer in {folder!r} has {tokenizer.num_tokens} ids, but the model has "
                f"{model.vocab_size} (vocab_size in config.json); use the model's own tokenizer."
            )
        open_hf(folder, c.model.architecture, log)
    return model, tokenizer


def collect_template_notes(tokenizer: Tokenizer) -> list[str]:
    """Return log messages about the chat template, based on the prompts rendered so far."""
    notes = []
    if end := tokenizer.unlisted_end_token:
        known = ", ".join(tokenizer.decode([id]) for id in tokenizer.eos_ids)
        notes.append(
            f"warning: the chat template ends messages with {end}, but only {known} stops the "
            f"sampler; the model may continue after {end}. Set config.model.eos_tokens to "
            f"({end!r},)"
        )
    if tokenizer.reads_clock:
        notes.append(
            f"the chat template reads the time, which is fixed to {tokenizer.now:%Y-%m-%d %H:%M}"
        )
    if default_system := tokenizer.dropped_system_message:
        notes.append(
            f"the chat template's default system message {default_system!r:.200} is removed from "
            "prompts. To add a system message, set config.prompt.system or put it into the chats"
        )
    return notes


def build_model(c: ResolvedConfig, mesh: Mesh, policy: Architecture, tokenizer: Tokenizer) -> Model:
    """Create the `Model` for an architecture, without parameters."""
    return Model(
        policy.with_kernels(mesh, experts=c.model.experts, check_dtype=c.model.dtype),
        mesh,
        num_tokens=tokenizer.num_tokens,
        dtype=jnp.dtype(c.model.dtype),
        attention=select_kernels(c.model.attention, mesh, policy, check_dtype=c.model.dtype),
        remat=c.model.remat,
        scan_layers=c.model.scan_layers,
        logits_chunk_tokens=c.model.logits_chunk_tokens,
        frozen=find_frozen_entries(c, policy),
    )


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """Frozen model with its parameters."""

    model: Model
    params: Params


def load_frozen_model(c: ResolvedConfig, folder: str, tokenizer: Tokenizer) -> FrozenModel:
    """Load a model from a folder onto the devices, for scoring.

    Args:
        c: Resolved configuration; its mesh, dtype and kernels are used.
        folder: Model folder in Hugging Face format.
        tokenizer: Tokenizer of the policy.

    Raises:
        ValueError, OSError: The folder contains no model, or its tokenizer is different.
    """
    architecture, mesh = read_architecture(folder, c.model.architecture), make_mesh(**c.mesh)
    other = Tokenizer.from_folder(folder)
    if list(other.vocab_bytes) != list(tokenizer.vocab_bytes):
        raise ValueError(
            f"the tokenizer in {folder} differs from the one in config.model.path; a scorer needs "
            "the same ids."
        )
    model = build_model(c, mesh, architecture, tokenizer)
    params = load_hf(folder, mesh, architecture=c.model.architecture)
    model.base = {name: params.pop(name) for name in model.frozen.make_abstract_params()}
    return FrozenModel(model=model, params=params)


def export_model(model: Model, source: str, params: Params, parent: Path) -> None:
    """Export a trained model in Hugging Face format. An adapter is also exported separately.

    Args:
        model: Model to export.
        source: Folder of the model from which training started.
        params: Trained parameters.
        parent: Folder in which the export folders are created.
    """
    if model.architecture.wrapper is not None:
        model.architecture.wrapper.export(params, parent, source)
    else:
        save_hf(model.merge(params), model.architecture, parent / "export", source=source)


def build_stages(
    c: ResolvedConfig, model: Model, method: Method, *, halves_micro_rows: bool = False
) -> dict[str, Stage]:
    """Create the configured training stages and call their custom functions on example inputs.

    With `halves_micro_rows`, the train stage halves its micro-batches if it runs out of memory.

    Raises:
        UserCodeError: A custom function failed. The message names its key.
    """
    stages = {}
    num_params = count_elements(model.architecture.make_abstract_params())
    for name, num_steps in c.num_steps_by_stage.items():
        settings = build_optimizer_settings(c, name)
        probe_schedule(settings)
        optimizer, is_train = make_optimizer(settings), name == "train"
        shape = compute_batch_shape(
            c, name, model.num_prompt_shards, model.num_pieces, model.architecture
        )
        platform = model.mesh.devices.flat[0].platform
        stages[name] = Stage(
            num_steps=num_steps,
            batch_size=(
                method.groups_per_minibatch * method.group_size if is_train else c.sft.batch_size
            ),
            optimizer=optimizer,
            schedule=make_schedule(settings),
            settings=settings,
            shape=shape.with_size_saving(num_params, platform, model.mesh.size),
            update=(
                make_update_step(model, method, optimizer)
                if is_train
                else UpdateStep(
                    model,
                    supervised_loss,
                    optimizer,
                    balance_coef=method.balance_coef,
                    offload=settings.offload,
                    shares_programs=not settings.schedule.is_user_code,
                )
            ),
            halves_micro_rows=is_train and halves_micro_rows,
        )
    if "train" in stages:
        probe_method(method, c.rollout.max_response_tokens)
    return stages


def build_reply_schedule(c: ResolvedConfig, platform: str) -> ReplySchedule:
    """Create the schedule that decides when observations enter the sampler."""
    is_deterministic = c.rollout.deterministic
    return ReplySchedule(
        deterministic=platform == "cpu" if is_deterministic is None else is_deterministic,
        lag_chunks=c.rollout.observation_lag_chunks,
        deadline_s=c.env.step_deadline_s,
    )


def build_engine(
    c: ResolvedConfig,
    policy: Architecture,
    mesh: Mesh,
    automaton: StopAutomaton,
    tokenizer: Tokenizer,
    *,
    engine_class: type[Engine] = Engine,
) -> Engine:
    """Create a sampling engine of class `engine_class`."""
    # The cache has the configured size, or all memory that the plan leaves free.
    rollout, length = c.rollout, c.context_tokens
    sampling_mesh = make_local_mesh(mesh, c.mesh.rollout_devices)
    kernels = select_kernels(c.model.attention, sampling_mesh, policy, check_dtype=c.model.dtype)
    page_tokens, platform = kernels.page_tokens, sampling_mesh.devices.flat[0].platform
    cache = capacity.CacheSizes.from_config(
        c, policy.unwrapped, mesh, jax.process_count(), page_tokens
    )
    num_pages = cache.compute_num_pages(c, platform)
    if num_pages is None:
        num_pages = compute_num_cache_pages(c, policy.unwrapped, page_tokens)
    engine = engine_class(
        policy.with_kernels(sampling_mesh, experts=c.model.experts, check_dtype=c.model.dtype),
        sampling_mesh,
        automaton,
        num_tokens=tokenizer.num_tokens,
        eos_ids=tokenizer.eos_ids,
        num_rows=rollout.max_num_seqs // jax.process_count(),
        num_pages=num_pages,
        num_states=cache.num_states,
        max_total_tokens=length,
        chunk_tokens=rollout.chunk_tokens,
        max_units=c.max_image_tokens,
        dtype=jnp.dtype(c.model.dtype),
        kernels=kernels,
        records=c.model.replay and "train" in c.stages,
        train_mesh=mesh,
        scan_layers=should_scan_layers(
            c.model.scan_layers,
            platform,
            has_adapter=policy.wrapper is not None,
        ),
        kinds=list_sampling_methods(c),
    )
    if engine.recorded_specs:
        engine.check_recorded_arrays()  # a custom architecture may not record what it declares
    return engine


def compute_num_cache_pages(c: ResolvedConfig, model: Architecture, page_tokens: int) -> int:
    """Return the number of KV-cache pages that fit in the memory the plan leaves free."""
    page_counter = import_optional(PAGE_COUNTER)
    if page_counter is None:
        raise ValueError(
            "config.rollout.cache_gib is 0, so the memory plan sets the size, but "
            "jaxrl/extras/plan is missing; set it to GiB per device."
        )
    return int(page_counter(c, model, page_tokens))


PAGE_COUNTER = "jaxrl.extras.plan.fitting:compute_num_cache_pages"
"""Function that computes how many cache pages fit into a device's free memory."""


AUDIT_TASKS = "jaxrl.extras.audit.startup:audit_tasks"
"""Function that checks training tasks against the corpus, and may drop some of them."""


def list_sampling_methods(c: ResolvedConfig) -> list[str]:
    """Return the sampling methods that the configured stages use, or else those of a chat."""
    rollout, evaluation = c.rollout, c.eval
    kinds = []
    if "train" in c.stages:
        kinds.append(select_sampling_method(rollout.temperature, rollout.top_p))
    suites = c.suites
    if "greedy" in suites or not c.stages:
        kinds.append(GREEDY)
    if suites - {"greedy"} or not c.stages:
        kinds.append(select_sampling_method(evaluation.temperature, evaluation.top_p))
    if TOP_P in kinds and kinds[0] != FULL:
        kinds = [kind for kind in kinds if kind != FULL]  # full sampling is top-p with p = 1
    return list(dict.fromkeys(kinds)) or [FULL]


def open_all_tasks(c: ResolvedConfig, show: Show) -> tuple[Mixture[Task], Mixture[Task]]:
    """Open the training tasks and held-out tasks of the configured stages.

    The weight of an environment is divided among its training sources.
    """
    if not c.members:
        return _open_tasks(c, show)
    splits: tuple[list[Source[Task]], list[Source[Task]]] = [], []
    for name, environment in c.members.items():
        with add_environment_to_errors(name):
            tasks, eval_tasks = _open_tasks(environment, show)
        total = sum(Fraction(str(source.weight)) for source in tasks.sources)
        for split, mixture in zip(splits, (tasks, eval_tasks), strict=True):
            for source in mixture.sources:
                weight = source.weight
                if mixture is tasks:
                    weight = Fraction(str(environment.weight)) * Fraction(str(weight)) / total
                full_name = name if len(mixture.sources) == 1 else f"{name}/{source.name}"
                split.append(dataclasses.replace(source, weight=weight, name=full_name))
    return Mixture(splits[0]), Mixture(splits[1])


def _open_tasks(c: ResolvedConfig, show: Show) -> tuple[Mixture[Task], Mixture[Task]]:
    """Open the tasks of one environment."""
    tasks: Mixture[Task] = Mixture([])
    eval_tasks: Mixture[Task] = Mixture([])
    is_training = "train" in c.stages
    if is_training and not c.tasks.eval.holdout:
        tasks = open_tasks(c.task_sources["train"], show)
    if is_training or "evaluate" in c.stages:
        eval_tasks = open_tasks(c.task_sources["eval"], show)
        if c.tasks.eval.holdout:
            rest, eval_tasks = split_holdout(eval_tasks, c.tasks.eval.holdout, seed=c.seed)
            tasks = rest if is_training else tasks
        check_data_sources(eval_tasks, "config.tasks.eval.source")
        count = c.eval.max_tasks  # of each source; 0: all
        truncated = [
            Source(items=items.select(np.arange(len(items)) < count), weight=s.weight, name=s.name)
            if count and isinstance(items := s.items, Tasks)
            else s
            for s in eval_tasks.sources
        ]
        eval_tasks = Mixture(truncated)
    return tasks, eval_tasks


def _set_num_steps(c: ResolvedConfig, tasks: Mixture[Task]) -> str:
    """Replace `num_steps=0` in place with the number of steps in `num_epochs`.

    The number is fixed at the start, because learning-rate schedules need it. If `filter.name`
    makes steps draw more tasks, training runs for more than `num_epochs` epochs.

    Returns:
        Log message; "" if the number was already set.
    """
    if "train" not in c.stages or c.num_steps:
        return ""
    length, tasks_per_step = Stream(tasks, seed=0).epoch_length, c.rollout.tasks_per_step
    c.config.num_steps = math.ceil(c.num_epochs * length / tasks_per_step)
    return (
        f"config.num_epochs={c.num_epochs}: {c.num_steps:,} steps of {tasks_per_step} tasks, from "
        f"{length:,} per epoch"
    )


def _filter_sources(
    tasks: Mixture[Task], rollout: BaseRollout, c: ResolvedConfig, show: Show
) -> tuple[Mixture[Task], list[str]]:
    """Apply `filter_overlong_prompts` to each source; return the tasks and log messages."""
    sources, notes = [], []
    if len(tasks.sources) > 1:
        total = sum(source.weight for source in tasks.sources)
        shares = (
            f"{s.name} {len(s.items):,} ({float(s.weight / total):.1%} of draws)"
            for s in tasks.sources
        )
        notes.append(f"tasks: {', '.join(shares)}")
    for source in tasks.sources:
        items = source.items
        show(f"measuring the prompts of {source.name}, tasks {len(items):,}")
        key = items.key if isinstance(items, Tasks) else "config.tasks"
        filtered, note = filter_overlong_prompts(items, rollout, c, f"{key}.source")
        sources.append(dataclasses.replace(source, items=filtered))
        notes.append(note)
    return Mixture(sources), notes


def _audit_tasks(
    c: ResolvedConfig, tasks: Mixture[Task], workdir: Path | None, show: Show
) -> tuple[Mixture[Task], list[str]]:
    """Audit the training tasks of environments with a corpus; return tasks and log messages."""
    audit_tasks = import_optional(AUDIT_TASKS)
    sources, notes = list[Source[Task]](), list[str]()
    for name, environment in c.environments.items():
        selected = Mixture([s for s in tasks.sources if s.items[0].environment == name])
        if audit_tasks and selected and environment.corpus_section:
            with add_environment_to_errors(name):
                selected, lines = audit_tasks(environment, selected, workdir=workdir, show=show)
            notes += [f"{name}: {line}" if name else line for line in lines]
        sources += selected.sources
    return Mixture(sources), notes


def filter_overlong_prompts(
    tasks: Sequence[Task], rollout: BaseRollout, c: ResolvedConfig, key: str
) -> tuple[Sequence[Task], str]:
    """Drop tasks with overlong prompts; keep all tasks if prompts are truncated.

    Args:
        tasks: Tasks of one source.
        rollout: Rollout that checks the length of prompts.
        c: Resolved configuration.
        key: Config key of the source, for messages.

    Returns:
        Remaining tasks, and a log message or "".

    Raises:
        ValueError: A prompt is too long and `rollout.overlong_prompts` is "refuse", or all tasks
            would be dropped.
    """
    limit = c.rollout.max_prompt_tokens
    fits = np.zeros(len(tasks), bool)
    for index, task in enumerate(tasks):
        try:
            fits[index] = rollout.prompt_fits(task)
        except ValueError as error:
            location = tasks.location(index) if isinstance(tasks, Tasks) else key
            raise ValueError(f"{location}: {error}") from error
    count = len(tasks) - int(fits.sum())
    if count == 0:
        return tasks, ""
    problem = f"{count} of {len(tasks)} tasks have prompts of more than {limit} tokens"
    if c.rollout.max_image_tokens:
        problem += f", or {c.rollout.max_image_tokens} of images"
    if c.rollout.overlong_prompts == "truncate_left":
        return tasks, f"{key}: {problem}; their last {limit} tokens are kept"
    if not fits.any():
        raise ValueError(
            f"{key}: {problem}, and config.rollout.overlong_prompts='drop' would leave none; raise "
            "config.rollout.max_prompt_tokens, or set overlong_prompts to 'truncate_left'."
        )
    note = f"{key}: {problem} and are left out"
    if isinstance(tasks, Tasks):
        return tasks.select(fits), note
    return [task for task, fits_limit in zip(tasks, fits, strict=True) if fits_limit], note


def make_trigger_mask(tokenizer: Tokenizer, words: Sequence[str]) -> np.ndarray | None:
    """Return a mask, bool [V], that is True for tokens whose text is in `words`.

    Case and surrounding whitespace are ignored. Returns None if `words` is empty.

    Raises:
        ValueError: No token matches any of the words.
    """
    if not words:
        return None
    expected = {word.strip().lower() for word in words}
    texts = [data.decode("utf-8", errors="replace") for data in tokenizer.vocab_bytes]
    is_trigger = np.array([text.strip().lower() in expected for text in texts], bool)
    if not is_trigger.any():
        raise ValueError(
            f"config.shaping.trigger_words is {tuple(words)!r}, but the tokenizer has none of "
            "these words as a single token; no token would ever count."
        )
    return is_trigger
