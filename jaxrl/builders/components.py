"""Objects of a run, made from a configuration.

Everything that can be refused is refused here, before any long work.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl.builders import capacity, environment, toolbox
from jaxrl.builders.method import (
    batch_shape,
    filled,
    frozen_of,
    method_of,
    optimizer_of,
    policy_of,
    records_arrays,
    stage_steps,
)
from jaxrl.config.keys import optional
from jaxrl.config.registry import chosen, made
from jaxrl.config.schema import OWN_MODEL
from jaxrl.config.settings import Checkpointing, Costs, Evaluation, Settings
from jaxrl.data.stream import Mixture, Source
from jaxrl.data.tasks import Tasks, check_data_sources, open_tasks, overlap_note, sources_of
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Env, Prompt, Task
from jaxrl.envs.images import UnreadableError
from jaxrl.envs.rewards.combiner import Payment
from jaxrl.envs.search.base import DocumentSearch, EmptySearch
from jaxrl.envs.search.corpus import check_corpus, index_folder, is_indexed, num_lines, read_corpus
from jaxrl.envs.search.resilient import Policy, ResilientSearch, ask_first
from jaxrl.envs.tools.base import Tool
from jaxrl.envs.tools.budget import SEARCH, Budget
from jaxrl.models.architecture import Architecture
from jaxrl.models.attention.choice import choose
from jaxrl.models.hf_weights import check_hf, save_hf
from jaxrl.models.layers import HOST_MEMORY
from jaxrl.models.policy import Model
from jaxrl.models.registry import read_model
from jaxrl.runtime.checkpoint import newest_whole
from jaxrl.runtime.compilation import forget_if_edited
from jaxrl.runtime.sharding import check_model_fits, local_mesh, make_mesh
from jaxrl.sampling.contexts import Contexts
from jaxrl.sampling.decode import scans
from jaxrl.sampling.demonstrations import Demonstration, read_demonstrations
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.episodes import EpisodePlayer, Limits, Schedule
from jaxrl.sampling.interfaces import POLICIES, PROCESSOR, External, Processor, RolloutFunction
from jaxrl.sampling.next_token import GREEDY, NUCLEUS, PLAIN, kind_of
from jaxrl.sampling.rollout import Rollout
from jaxrl.sampling.sharing import shared
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.sft import supervised_loss
from jaxrl.training.collect import check_filter
from jaxrl.training.estimators import Estimator
from jaxrl.training.method import Method
from jaxrl.training.minibatches import check_aggregation
from jaxrl.training.optimizer import check_schedule, learning_rate, make_optimizer
from jaxrl.training.policy_loss import check_update, make_policy_loss
from jaxrl.training.run_state import Components, Stage
from jaxrl.training.update import UpdateStep
from jaxrl.types import Params
from jaxrl.utils.callables import is_own


@dataclass(frozen=True, kw_only=True)
class Assembled(Components):
    """Components, and what only the code around the stages needs."""

    tokenizer: Tokenizer
    processor: Processor | None  # reads images; None where the model reads none


def assemble(
    config: ConfigDict,
    show: Callable[[str], None] = lambda _: None,
    *,
    workdir: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
    now: datetime | None = None,
) -> Assembled:
    """Reads and checks everything the configured stages need; an index is built last.

    Args:
        config: checked.
        show: told what it is at, where that may take long.
        workdir: of the run; beside it searches are recorded, where no folder is named.
        log: told what tools are offered, and what happens to the search engine in the run.
        now: time that the chat template is given; by default the present.

    Raises:
        FileNotFoundError, ValueError: with what arrived, what was expected, where to change it.
        OutageError: the search engine's server answers nobody.
    """
    forget_if_edited()
    mesh = make_mesh(**config.mesh)
    method = method_of(config)
    external = _make_external(config, workdir, log)
    model_config, tokenizer = model_and_tokenizer(
        config, mesh, is_played=external is None, now=now, log=log
    )
    policy = policy_of(config, model_config) if external is None else model_config
    if policy.around is not None:
        policy.around.check()
    tools = _make_tools(config, log)
    # The environment whose search engine finds nothing, where it has one. Where it calls tools, a
    # chat template that does not show their results is refused.
    has_engine = config.search.engine != environment.NO_ENGINE
    control = _make_env(config, EmptySearch() if has_engine else None, tools)
    chat_tools = getattr(control, "chat_tools", ())
    if chat_tools:
        tokenizer.render_results([""], chat_tools)
    automaton = StopAutomaton(tokenizer.vocab_bytes, control.stop_strings)
    processor = _make_processor(config, tokenizer, model_config)
    if environment.has_contexts(config) and model_config.tower is not None:
        raise ValueError(
            f"config.rollout.context.name={config.rollout.context.name!r}, and the model of "
            "config.model.path reads images; expected 'none', or a model of text alone."
        )
    tasks, eval_tasks = _read_data(config, show)
    image_tokens = environment.max_image_tokens(config)
    contexts = (
        filled(Contexts, config.rollout.context) if environment.has_contexts(config) else None
    )
    limits = filled(Limits, config.rollout, max_image_tokens=image_tokens, context=contexts)
    demonstrations: list[Demonstration] = []
    if "sft" in config.stages:
        names = [tool.name for tool in tools]
        demonstrations = read_demonstrations(
            config.sft.source,
            tokenizer,
            limits,
            protocol=toolbox.protocol(config)(names),
            tools=("search", *names),
            chat_tools=chat_tools,
            processor=processor,
        )
    engine = None
    if external is None:
        kind = getattr(control, "engine_kind", Engine)
        engine = make_engine(config, policy, mesh, automaton, tokenizer, kind=kind)
    model = make_model(config, mesh, policy, tokenizer)
    stages = make_stages(config, model, method)
    schedule = make_schedule(config, mesh.devices.flat[0].platform)
    own_parts, correct = toolbox.own_parts(config), config.reward.correct
    pay = Payment(
        weights=toolbox.reward_weights(config),
        own_parts=own_parts,
        correct=correct if correct in own_parts else "",
        deadline_s=config.reward.deadline_s,
    )
    for split, mixture in (("train", tasks), ("eval", eval_tasks)):
        for source in mixture.sources:
            pay.check(source.items[0], f"config.tasks.{split}.source")
    for part in own_parts.values():
        if open_part := getattr(part, "open", None):  # as a judge has
            open_part(workdir, process=jax.process_index(), log=log)

    def rollout_of(env: Env, seen_by: Processor | None = processor) -> Any:
        if engine is None:
            assert external is not None
            return external.rollout(env, tokenizer, limits, schedule, pay, seen_by)
        if environment.plays_itself(config):
            player: Any = env
            return player.rollout(engine, tokenizer, limits, schedule, pay, seen_by, log=log)
        return Rollout(engine, env, tokenizer, automaton, limits, schedule, pay, seen_by)

    def shared_rollout(env: Env, seen_by: Processor | None = processor) -> RolloutFunction:
        # Groups of other processes come without their images.
        restored = seen_by.with_images if seen_by else list
        return shared(rollout_of(env, seen_by), restored)

    without_search = rollout_of(control)
    tasks, notes = _fit_all(tasks, without_search, config, show)
    eval_tasks, eval_notes = _fit_all(eval_tasks, without_search, config, show)
    notes += [*eval_notes, overlap_note(tasks, eval_tasks)]
    if engine:
        notes = [*template_notes(tokenizer), *notes]
    # The environment that searches; of control suites, that with another engine or blank images.
    env, controls = control, {"empty_search": shared_rollout(control)}
    suites = environment.suites_of(config)
    if environment.searches(config):
        search = _make_search(config, show, workdir, log)
        if "random_search" in suites:
            drawing = _make_env(config, _make_random_search(config, search), tools)
            controls["random_search"] = shared_rollout(drawing)
        env = _make_env(config, search, tools)
    if "blank_images" in suites:
        if processor is None:
            raise ValueError(
                "an evaluation asks for the suite 'blank_images', but the model in "
                "config.model.path reads no images; leave the suite out."
            )
        controls["blank_images"] = shared_rollout(env, processor.blank())
    return Assembled(
        mesh=mesh,
        model=model,
        method=method,
        stages=stages,
        export=partial(export, model, config.model.path),
        tokenizer=tokenizer,
        tasks=tasks,
        eval_tasks=list(eval_tasks),
        demonstrations=demonstrations,
        sampler=engine,
        external=external.shown if external else "",
        rollout=shared_rollout(env),
        controls=controls,
        reward_weights=toolbox.reward_weights(config),
        is_trigger=trigger_ids(tokenizer, config.shaping.trigger_words),
        prompt_time=tokenizer.now.isoformat() if tokenizer.reads_clock else "",
        notes=tuple(filter(None, notes)),
        processor=processor,
    )


def make_schedule(config: ConfigDict, platform: str) -> Schedule:
    """Make the schedule by which replies enter on devices of a platform."""
    is_deterministic = config.rollout.deterministic
    return Schedule(
        deterministic=platform == "cpu" if is_deterministic is None else is_deterministic,
        lag_chunks=config.rollout.observation_lag_chunks,
        deadline_s=config.env.step_deadline_s,
    )


def settings_of(config: ConfigDict) -> Settings:
    """Freezes the part of a checked configuration that the stages read."""
    evaluation, endpoint = config.eval, config.policy.get(config.policy.name)
    sections = ("seed", "model", "images", "env", "prompt", "search", "rollout", "reward", "eval")
    values, copied = config.to_dict(), config.to_dict()  # keys are taken out of the second
    depends_on = {name: copied[name] for name in sections if name in copied}
    depends_on.get("images", {}).pop("cache_mib", None)
    if config.policy.name != OWN_MODEL:
        depends_on["policy"] = copied["policy"]
        for key in ("prompt_price", "completion_price", "replay", "replay_folder"):
            del depends_on["policy"]["openai"][key]  # on which no answer depends
    if config.rollout.max_cost:
        depends_on["prices"] = config.ledger.prices
    return Settings(
        stages=config.stages,
        seed=config.seed,
        max_response_tokens=config.rollout.max_response_tokens,
        max_failed_steps=config.rollout.max_failed_steps,
        evaluation=filled(
            Evaluation,
            evaluation,
            correct=config.reward.correct,
            has_python="python" in config.env.search.tools,
            has_results=environment.has_tools(config),
            section=evaluation.to_dict(),
            depends_on=depends_on,
        ),
        checkpoint=filled(Checkpointing, config.checkpoint),
        ledger=filled(Costs, config.ledger),
        model_path=config.model.path,
        architecture=config.model.architecture,
        trajectories=config.log.trajectories,
        tokens=config.log.tokens,
        kept_replies=endpoint.replay_folder if endpoint and endpoint.replay == "record" else None,
        wandb_project=config.log.wandb_project,
        values=values,
    )


def _make_processor(
    config: ConfigDict, tokenizer: Tokenizer, model: Architecture
) -> Processor | None:
    """Reads images, or counts them for an endpoint; None where the folder's model reads none.

    Raises:
        ValueError: the folder of a model that reads them has none, or that of another model.
    """
    if tokenizer.image_id is None:
        return None
    processor: Any = pkgutil.resolve_name(PROCESSOR)(config.model.path, **config.get("images", {}))
    made = processor.patch_values, processor.unit
    if model.tower and made != (wanted := (model.tower.patch_values, model.tower.unit)):
        raise ValueError(
            f"the preprocessor_config.json in {config.model.path!r} makes patches of {made[0]} "
            f"values, {made[1]} to a token; the model's config.json calls for {wanted[0]} and "
            f"{wanted[1]} (patch_size, merge_size, temporal_patch_size). Copy that of the model."
        )
    return processor


def make_model(config: ConfigDict, mesh: Mesh, policy: Architecture, tokenizer: Tokenizer) -> Model:
    """Makes the model of a policy, without its parameters.

    Raises:
        ValueError: the configuration freezes what the model does not have.
    """
    if config.model.freeze_tower and policy.tower is None:
        raise ValueError(
            "config.model.freeze_tower is True, but the model of config.model.path reads text "
            "alone; leave it False."
        )
    return Model(
        policy.on_mesh(mesh, experts=config.model.experts, check_dtype=config.model.dtype),
        mesh,
        num_tokens=tokenizer.num_tokens,
        dtype=jnp.dtype(config.model.dtype),
        attention=choose(config.model.attention, mesh, policy, check_dtype=config.model.dtype),
        remat=config.model.remat,
        scan_layers=config.model.scan_layers,
        logits_chunk_tokens=config.model.logits_chunk_tokens,
        frozen=frozen_of(config, policy),
    )


def export(model: Model, source: str, params: Params, parent: Path) -> None:
    """Writes the trained model as an HF folder; see `Around.export` of one that is around another.

    Args:
        model: the policy.
        source: the folder of the model that the run began with.
        params: that are trained.
        parent: of the folders.
    """
    if model.architecture.around is not None:
        model.architecture.around.export(params, parent, source)
    else:
        save_hf(model.whole(params), model.architecture, parent / "export", source=source)


def make_stages(config: ConfigDict, model: Model, method: Method) -> dict[str, Stage]:
    """The configured stages that train, whose functions are tried at the shapes of a step.

    Raises:
        ValueError: one of the user's own would fail in a step; names its key.
    """
    losses = {"sft": supervised_loss, "train": make_policy_loss(method)}
    stages = {}
    for name, num_steps in stage_steps(config).items():
        settings = optimizer_of(config, name)
        check_schedule(settings)
        optimizer, is_train = make_optimizer(settings), name == "train"
        stages[name] = Stage(
            num_steps=num_steps,
            batch_size=(
                method.groups_per_minibatch * method.group_size
                if is_train
                else config.sft.batch_size
            ),
            optimizer=optimizer,
            schedule=learning_rate(settings),
            settings=settings,
            shape=batch_shape(
                config, name, model.shards_with_prompts, model.num_pieces, model.architecture
            ),
            update=UpdateStep(
                model,
                losses[name],
                optimizer,
                temperature=method.temperature if is_train else 1.0,
                entropy_gradient=is_train and method.loss.entropy_coef != 0,
                balance_coef=method.balance_coef,
                offload=settings.offload,
                shares_programs=not (
                    settings.schedule.is_users or (is_train and method.has_users_loss)
                ),
            ),
        )
    if "train" in stages:
        check_filter(method)
        Estimator(method.advantage, method.seed).check(method.tasks_per_step * method.group_size)
        check_aggregation(method, config.rollout.max_response_tokens)
        check_update(stages["train"].update, stages["train"].shape, method)
    return stages


def _make_external(
    config: ConfigDict, workdir: Path | None, log: Callable[[str], None]
) -> External | None:
    """The model behind an endpoint that plays; None where it is the run's own.

    Raises:
        ValueError: its key is not set, or the workdir holds the run of a model of its own.
    """
    if config.policy.name == OWN_MODEL:
        return None
    if workdir is not None and newest_whole(workdir / "checkpoints") is not None:
        raise ValueError(
            f"config.policy.name is {config.policy.name!r}, but {workdir} holds checkpoints of a "
            "model of its own; set --workdir to another folder."
        )
    kind = chosen("policy.name", config.policy.name, POLICIES, wanted="my_policy.Policy")
    external: External = kind(
        config.policy[config.policy.name].to_dict(),
        workdir=workdir,
        process=jax.process_index(),
        log=log,
    )
    return external


def model_and_tokenizer(
    config: ConfigDict,
    mesh: Mesh,
    *,
    is_played: bool,
    now: datetime | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> tuple[Architecture, Tokenizer]:
    """The model's architecture and tokenizer, checked against the devices where it plays.

    `now` is the time that the chat template is given, by default the present.
    """
    folder = config.model.path
    model_config = read_model(folder, config.model.architecture)
    if is_played:
        # Refuse what the devices, or the model's longest sequence, leave no room for.
        check_model_fits(mesh, model_config)
        if config.model.balance_coef and not model_config.statistics:
            raise ValueError(
                f"config.model.balance_coef is {config.model.balance_coef}, but the model has no "
                "experts to balance; set it to 0."
            )
        if config.model.replay and not model_config.recorded:
            raise ValueError(
                "config.model.replay is True, but the model has no experts whose choice "
                "could be recorded and replayed; set it to False."
            )
        capacity.check_rows(config, mesh, jax.process_count())
        capacity.check_length(config, model_config)
        check_offload(
            mesh,
            moments=config.optimizer.offload or config.sft.optimizer.offload,
            activations=config.model.remat == "offload",
        )
    tokenizer = Tokenizer.from_folder(
        folder,
        eos_tokens=config.model.eos_tokens,
        template_arguments=config.prompt.chat_template_kwargs,
        now=now,
    )
    if is_played:
        check_tokenizer(folder, tokenizer, model_config)
        check_hf(folder, config.model.architecture, log)
    return model_config, tokenizer


def template_notes(tokenizer: Tokenizer) -> list[str]:
    """Say what a user should know of the chat template and the prompts rendered so far."""
    notes = []
    if end := tokenizer.unknown_message_end:
        known = ", ".join(tokenizer.decode([id]) for id in tokenizer.eos_ids)
        notes.append(
            f"warning: the chat template ends a message with {end}, but only {known} ends the "
            f"model's; it may run on behind it. Set config.model.eos_tokens to ({end!r},)"
        )
    if tokenizer.reads_clock:
        notes.append(
            "the chat template asks for the time; it is always given "
            f"{tokenizer.now:%Y-%m-%d %H:%M}"
        )
    if own := tokenizer.left_out_system:
        notes.append(
            f"prompts without a system message have none: {own!r:.200}, which the chat template "
            "writes into such chats, is left out. Set config.prompt.system, or put a system "
            "message into the chats, to have one"
        )
    return notes


def check_offload(mesh: Mesh, *, moments: bool, activations: bool) -> None:
    """Refuses to offload moments or activations where a device has no part of the host's memory.

    Raises:
        ValueError: names the key.
    """
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY in kinds or not (moments or activations):
        return
    asked, remedy = "config.model.remat is 'offload'", "set it to 'full'"
    if moments:
        asked = "config.optimizer.offload is True"
        remedy = "set it and config.sft.optimizer.offload to False"
    raise ValueError(
        f"{asked}, but a {device.platform} has only the memories {', '.join(kinds)}, none of them "
        f"{HOST_MEMORY}; {remedy}."
    )


def check_tokenizer(path: str, tokenizer: Tokenizer, model: Architecture) -> None:
    """Refuses a tokenizer with more ids than the model, or with ends that are none of its ids.

    Raises:
        ValueError: names the folder, and the ids.
    """
    if tokenizer.num_tokens > model.vocab_size:
        raise ValueError(
            f"the tokenizer in {path!r} knows {tokenizer.num_tokens} ids, the model "
            f"{model.vocab_size} (vocab_size in config.json); they belong to two models."
        )
    foreign = [token for token in tokenizer.eos_ids if not 0 <= token < tokenizer.num_tokens]
    if foreign:
        raise ValueError(
            f"{path}/generation_config.json: eos_token_id names {foreign}, which the tokenizer's "
            f"{tokenizer.num_tokens} ids do not hold."
        )


def _fit_all(
    tasks: Mixture[Task], rollout: EpisodePlayer, config: ConfigDict, show: Callable[[str], None]
) -> tuple[Mixture[Task], list[str]]:
    """Applies `fit_prompts` to each source; also returns its notes, and one on several sources."""
    sources, notes = [], []
    if len(tasks.sources) > 1:
        total = sum(source.weight for source in tasks.sources)
        shares = (
            f"{s.name} {len(s.items):,} ({s.weight / total:.1%} of draws)" for s in tasks.sources
        )
        notes.append(f"tasks: {', '.join(shares)}")
    for source in tasks.sources:
        items = source.items
        show(f"measuring the prompts of {source.name}, tasks {len(items):,}")
        key = items.key if isinstance(items, Tasks) else "config.tasks"
        fitting, note = fit_prompts(items, rollout, config, f"{key}.source")
        sources.append(dataclasses.replace(source, items=fitting))
        notes.append(note)
    return Mixture(sources), notes


def fit_prompts(
    tasks: Sequence[Task], rollout: EpisodePlayer, config: ConfigDict, key: str
) -> tuple[Sequence[Task], str]:
    """The tasks that are played, and a note on those with overlong prompts; "" without any.

    Args:
        tasks: of one source.
        rollout: plays them, and cuts prompts itself.
        config: says what becomes of an overlong prompt.
        key: the configuration key that named the file, for messages.

    Raises:
        ValueError: a prompt is overlong and refused, or all are and would be dropped.
    """
    limit = config.rollout.max_prompt_tokens
    try:
        every = (_prompt_fits(tasks, index, task, rollout) for index, task in enumerate(tasks))
        fits = np.fromiter(every, bool, len(tasks))
    except UnreadableError as error:
        raise ValueError(f"{key}: {error}.") from error
    count = len(tasks) - int(fits.sum())
    if count == 0:
        return tasks, ""
    what = f"{count} of {len(tasks)} tasks have prompts of more than {limit} tokens"
    if config.rollout.max_image_tokens:
        what += f", or {config.rollout.max_image_tokens} of images"
    if config.rollout.overlong_prompts == "truncate_left":
        return tasks, f"{key}: {what}; their last {limit} tokens are kept"
    if not fits.any():
        raise ValueError(
            f"{key}: {what}, and config.rollout.overlong_prompts='drop' would leave none; raise "
            "config.rollout.max_prompt_tokens, or set overlong_prompts to 'truncate_left'."
        )
    note = f"{key}: {what} and are left out"
    if isinstance(tasks, Tasks):
        return tasks.only(fits), note
    return [task for task, is_short in zip(tasks, fits, strict=True) if is_short], note


def _prompt_fits(tasks: Sequence[Task], index: int, task: Task, rollout: EpisodePlayer) -> bool:
    """`prompt_fits` of a task, whose errors say where it stands."""
    try:
        return rollout.prompt_fits(task)
    except UnreadableError:
        raise
    except ValueError as error:
        place = tasks.place(index) if isinstance(tasks, Tasks) else f"task {task.id!r}"
        raise ValueError(f"{place}: {error}") from error


def trigger_ids(tokenizer: Tokenizer, words: Sequence[str]) -> np.ndarray | None:
    """Marks ids that are one of `words`, blanks and case aside: bool [V]; None without words.

    Raises:
        ValueError: no id is.
    """
    if not words:
        return None
    wanted = {word.strip().lower() for word in words}
    texts = [data.decode("utf-8", errors="replace") for data in tokenizer.vocab_bytes]
    is_trigger = np.array([text.strip().lower() in wanted for text in texts], bool)
    if not is_trigger.any():
        raise ValueError(
            f"config.shaping.trigger_words is {tuple(words)!r}, but the tokenizer has none of "
            "these words as a single token; no token would ever count."
        )
    return is_trigger


def _read_data(
    config: ConfigDict, show: Callable[[str], None]
) -> tuple[Mixture[Task], Mixture[Task]]:
    tasks: Mixture[Task] = Mixture([])
    eval_tasks: Mixture[Task] = Mixture([])
    if "train" in config.stages:
        tasks = open_tasks(sources_of(config, "train"), show)
    if {"train", "evaluate"} & set(config.stages):
        eval_tasks = open_tasks(sources_of(config, "eval"), show)
        check_data_sources(eval_tasks, "config.tasks.eval.source")
        count = config.eval.max_tasks  # of each source; 0: all
        cut = [
            Source(items=items.only(np.arange(len(items)) < count), weight=s.weight, name=s.name)
            if count and isinstance(items := s.items, Tasks)
            else s
            for s in eval_tasks.sources
        ]
        eval_tasks = Mixture(cut)
    _check_documents(config, show)
    return tasks, eval_tasks


def _check_documents(config: ConfigDict, show: Callable[[str], None]) -> None:
    """Reads a corpus that will be indexed, where demonstrations are encoded before that.

    So a wrong document is told before they are, which may take minutes. A corpus that has an
    index was read for that.

    Raises:
        FileNotFoundError, ValueError: a document is wrong, or there is none.
    """
    section = environment.corpus_section(config)
    if not section or "sft" not in config.stages:
        return
    settings = config.search[section]
    corpus, index = Path(settings.corpus), index_folder(settings.corpus, settings.index)
    check_corpus(corpus, index, section=f"search.{section}")
    if not is_indexed(corpus, index):
        show(f"checking {corpus}")
        collections.deque(read_corpus(corpus), maxlen=0)


def _make_search(
    config: ConfigDict,
    show: Callable[[str], None],
    workdir: Path | None,
    log: Callable[[str], None],
) -> ResilientSearch:
    """The search engine with what stands around it."""
    policy = filled(Policy, config.search)
    recording = None
    if config.search.replay != "off":
        from jaxrl.builders.recording import make_recording

        recording = make_recording(config, workdir, log)
    is_replay = config.search.replay == "only"
    engine = _make_plain_search(config, show, log)
    if getattr(engine, "asks_server", False) and not is_replay:
        own = is_own(config.search.engine)
        place = "config.search.settings" if own else f"config.search.{config.search.engine}.url"
        show(f"asking the server that {place} names")
        ask_first(engine, policy, place=place, log=log)
    return ResilientSearch(engine, policy, recording=recording, is_replay=is_replay, log=log)


def _make_plain_search(
    config: ConfigDict, show: Callable[[str], None], log: Callable[[str], None] = lambda _: None
) -> Tool:
    engine = toolbox.engine(config)
    assert engine is not None
    if not environment.needs_engine(config):
        stand_in = EmptySearch()  # which nobody asks
        stand_in.blank = engine.blank
        return stand_in
    name = config.search.engine
    searched = environment.corpus_section(config)
    corpus = config.search[searched].corpus if searched else ""
    total = functools.cache(lambda: num_lines(Path(corpus)))  # counted where an index is built
    building = f"building the index of {corpus}, documents"
    sections = {
        key: dict(section.to_dict())
        for key, section in config.search.items()
        if isinstance(section, ConfigDict)
    }
    settings = sections.get(name, {})
    if is_own(name):
        settings = dict(config.search.settings)
        sections = {key: sections[key] for key in ("local", "dense") if key in sections}
    return made(
        "search.settings" if is_own(name) else f"search.{name}",
        engine,
        settings,
        progress=lambda count: show(f"{building} {count:,}/{total():,}"),
        log=log,
        **sections,
    )


def _make_random_search(config: ConfigDict, search: ResilientSearch) -> Tool:
    """Makes the engine that draws documents at random.

    Raises:
        ValueError: it has none at hand.
    """
    engine = search.engine
    if not isinstance(engine, DocumentSearch) or engine.documents is None:
        raise ValueError(
            f"an evaluation asks for the suite 'random_search', but the engine "
            f"config.search.engine={config.search.engine!r} has no documents at hand to draw from; "
            "leave the suite out, or give the engine `documents` "
            "(jaxrl.envs.search.base.DocumentSearch)."
        )
    from jaxrl.envs.search.random_search import RandomSearch

    return RandomSearch(engine, seed=config.seed)


def _make_env(config: ConfigDict, engine: Tool | None, tools: Sequence[Tool]) -> Env:
    """Makes the environment from what its parameters ask for by name."""
    prompt = {key: config.prompt[key] for key in ("system", "template", "examples")}
    env: Env = made(
        "env.settings",
        environment.environment(config),
        config.env.settings,
        engine=engine,
        tools=tools,
        prompt=Prompt(**prompt),
        protocol=toolbox.protocol(config),
        **({"agents": config.env.agents.to_dict()} if "agents" in config.env else {}),
        max_turns=config.rollout.max_turns,
        max_calls=config.rollout.max_calls,
        correct_by=toolbox.correct_by(config),
        budget=Budget(prices=config.ledger.prices, max_cost=config.rollout.max_cost),
    )
    toolbox.check_env(config, env)
    check_prices(config, [SEARCH, *(tool.name for tool in tools)])
    return env


def check_prices(config: ConfigDict, tools: Sequence[str]) -> None:
    """Refuses prices of tools that do not exist; an environment of one's own may have its own.

    Raises:
        ValueError: names the tool and those that exist, or a judge with the name of a tool.
    """
    judges = list(config.reward.judges)
    if both := [name for name in judges if name in tools]:
        raise ValueError(
            f"config.reward.judges has {both[0]!r}, which is the name of a tool; costs are counted "
            "by name, so call the judge otherwise."
        )
    known = [*tools, *judges]
    unknown = [name for name in config.ledger.prices if name not in known]
    if unknown and not is_own(config.env.name):
        raise ValueError(
            f"config.ledger.prices names {unknown[0]!r}; expected some of {', '.join(known)}."
        )


def _make_tools(config: ConfigDict, log: Callable[[str], None]) -> list[Tool]:
    try:
        own = [offer.make() for offer in toolbox.tools(config)]
    except ImportError as error:
        raise ValueError(
            f"config.env.search.tools is {config.env.search.tools!r}, but {error}"
        ) from error
    return [*own, *toolbox.mcp_tools(config, log)]


def make_engine(
    config: ConfigDict,
    policy: Architecture,
    mesh: Mesh,
    automaton: StopAutomaton,
    tokenizer: Tokenizer,
    *,
    kind: type[Engine] = Engine,
) -> Engine:
    """Makes the engine of a configuration; `kind` is another class that samples."""
    rollout, length = config.rollout, environment.context_tokens(config)
    sampling = local_mesh(mesh, config.mesh.rollout_devices)
    kernels = choose(config.model.attention, sampling, policy, check_dtype=config.model.dtype)
    page_tokens, platform = kernels.page_tokens, sampling.devices.flat[0].platform
    cache = capacity.CacheSizes.of(config, policy.plain, mesh, jax.process_count(), page_tokens)
    num_pages = cache.fixed_pages(config, platform)
    if num_pages is None:
        num_pages = pages_left(config, policy.plain, page_tokens)
    engine = kind(
        policy.on_mesh(sampling, experts=config.model.experts, check_dtype=config.model.dtype),
        sampling,
        automaton,
        num_tokens=tokenizer.num_tokens,
        eos_ids=tokenizer.eos_ids,
        num_rows=rollout.num_rows // jax.process_count(),
        num_pages=num_pages,
        max_prompt_tokens=environment.prompt_tokens(config),
        max_total_tokens=length,
        chunk_tokens=rollout.chunk_tokens,
        max_units=environment.max_image_tokens(config),
        dtype=jnp.dtype(config.model.dtype),
        kernels=kernels,
        records=records_arrays(config),
        train_mesh=mesh,
        scan_layers=scans(
            config.model.scan_layers,
            platform,
            has_adapter=policy.around is not None,
        ),
        kinds=draw_kinds(config),
    )
    if engine.recorded:
        engine.check()  # an architecture of the user's own may not leave what it declares
    return engine


def pages_left(config: ConfigDict, model: Architecture, page_tokens: int) -> int:
    """Pages of the cache for which the plan leaves room on a device of this host.

    Raises:
        ValueError: the plan's folder was removed.
    """
    plan = optional(PAGES_LEFT)
    if plan is None:
        raise ValueError(
            "config.rollout.cache_gib is 0, which takes what the plan of memory leaves, but "
            "jaxrl/extras/plan is not there; set it to GiB of each device."
        )
    pages: int = plan(config, model, page_tokens)
    return pages


PAGES_LEFT = "jaxrl.extras.plan.fitting:pages_left"
"""Function that plans the sampler's cache beside all else on a device."""


def draw_kinds(config: ConfigDict) -> list[str]:
    """The ways in which the configured stages draw tokens; without any, those of `ask`."""
    rollout, evaluation = config.rollout, config.eval
    kinds = []
    if "train" in config.stages:
        kinds.append(kind_of(rollout.temperature, rollout.top_p))
    suites = environment.suites_of(config)
    if "greedy" in suites or not config.stages:
        kinds.append(GREEDY)
    if suites - {"greedy"} or not config.stages:
        kinds.append(kind_of(evaluation.temperature, evaluation.top_p))
    if NUCLEUS in kinds and kinds[0] != PLAIN:
        kinds = [kind for kind in kinds if kind != PLAIN]  # which the nucleus of everything is
    return list(dict.fromkeys(kinds)) or [PLAIN]
