"""Shared code for tests of complete runs: small configurations, multi-process jobs, results."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import zlib
from functools import cache

import jax
import numpy as np
import pytest

from configs import debug_tiny
from jaxrl.builders.components import build_stages
from jaxrl.envs.base import Prompt, ToolError
from jaxrl.envs.protocol import PROTOCOLS
from jaxrl.envs.rewards.combiner import RewardCombiner
from jaxrl.envs.search.base import EmptySearch, SearchEngine
from jaxrl.envs.search_env import SearchEnv
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.run import build_restore_targets, run
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.sampling.episodes import ReplySchedule, TokenLimits
from jaxrl.sampling.rollout import Rollout
from jaxrl.sampling.shared_rollout import SharedRollout
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.training.run_state import Progress
from tests.helpers import build, method_of, resolved, settings_of

# The smallest sizes that still search: the sampler compiles a program for each of its shapes.
SIZES = {
    "model.remat": "none",  # compiles faster
    "rollout.max_num_seqs": 4,
    "rollout.max_response_tokens": 40,
    "rollout.max_total_tokens": 112,
    "rollout.max_observation_tokens": 24,
}
METHOD_SIZES = {
    "stages": ("train",),
    "num_steps": 2,
    "model.remat": "none",  # compiles faster
    "rollout.tasks_per_step": 4,
    "rollout.group_size": 4,
    "advantage.pass_at_k.k": 2,
    "rollout.max_response_tokens": 40,
    "rollout.max_total_tokens": 112,
    "rollout.max_observation_tokens": 24,
    "eval.max_tasks": 4,
    "eval.suites": (),
    "optimizer.weight_decay": 0.0,  # so that a zero gradient changes nothing
    "checkpoint.every_steps": 2,
    "log.trajectories": 2,
}
JOB_SETTINGS = {
    **{"sft.num_steps": 10, "num_steps": 5, "checkpoint.every_steps": 2, "eval.every_steps": 2},
    # With a small epsilon, Adam's first step turns rounding errors of gradients near zero into
    # changes as large as the learning rate, which can flip a close sample.
    **{"optimizer.lr": 1e-4, "optimizer.epsilon": 1e-3, "sft.optimizer.epsilon": 1e-3},
}
CLOCKS = ("timing_s/", "perf/", "rollout/row_occupancy", "rollout/cache_use")
CLOCKS += ("rollout/imbalance", "rollout/preemptions", "rollout/swapped_tokens")
CLOCKS += ("rollout/shared_tokens", "rollout/padding", "sft/padding")
"""Prefixes of times, rates, and metrics that depend on the number of rows, pages and devices."""


def run_settings(tiny_world, **changes):
    """Return the configuration of a run of all stages in a tiny world."""
    config = debug_tiny.get_config(str(tiny_world))
    config.update_from_flattened_dict({**SIZES, "log.trajectories": -1, **changes})
    return config


def base_config(world, source=""):
    """Return a configuration of two RL steps, for methods of all kinds."""
    config = debug_tiny.get_config(str(world))
    config.update_from_flattened_dict(METHOD_SIZES | {"model.path": source or config.model.path})
    return config


def records(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def lasting(workdir):
    """Return the records without what depends on the clock or on this process's compilations."""
    clocks = ("timing_s/", "perf/")
    return [
        {name: value for name, value in record.items() if not name.startswith(clocks)}
        for record in records(workdir)
    ]


def trajectories(workdir, step):
    lines = (workdir / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_usage(trajectory):
    """Remove from a logged trajectory what depends on caches, servers or the clock."""
    turns = [
        {name: value for name, value in turn.items() if name not in ("latency_s", "records")}
        for turn in trajectory["turns"]
    ]
    return {**trajectory, "turns": turns}


def evaluation(workdir, name):
    """Load `eval/<name>` without what depends on the clock."""
    content = (workdir / "eval" / name).read_text()
    if name.endswith(".txt"):
        return content
    record = json.loads(content)
    record["ledger"].pop("usage")
    return record


def assert_same_weights(folder, other):
    jax.tree.map(np.testing.assert_array_equal, load_hf(folder), load_hf(other))


def killed(workdir, copy, *, after):
    """Copy a run as if it had been killed some time after checkpoint `after`."""
    shutil.copytree(workdir, copy)
    shutil.rmtree(copy / "export")
    for checkpoint in (copy / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > after:
            shutil.rmtree(checkpoint)
    return copy


def warm_start(world, folder):
    """Return the weights of a short warm start that can search and answer; made once."""
    warm = folder / "warm_start"
    if not warm.is_dir():
        workdir = folder / f"warm_start_{os.getpid()}"
        config = debug_tiny.get_config(str(world))
        config.update_from_flattened_dict({"stages": ("sft",), "sft.num_steps": 40})
        workdir.mkdir()
        run(settings_of(config), workdir, build(config), Display())
        try:
            workdir.rename(warm)
        except OSError:  # another process was first
            return str(workdir / "export")
    return str(warm / "export")


class Unreliable(SearchEngine):
    """Search engine that fails for some queries, always the same ones."""

    def __init__(self, engine):
        self._engine = engine

    def run(self, query):
        if zlib.crc32(query.encode()) % 5 == 0:
            raise ToolError(f"no answer to {query!r}")
        return self._engine.run(query)


class Chance(SearchEnv):
    """Search environment with scores from a hash of the response.

    So every filter, gate and bucket finds groups of all kinds among a tiny model's answers.
    """

    def score(self, group):
        return [self._verdict(e, r) for e, r in zip(group, super().score(group), strict=True)]

    def _verdict(self, episode, reward):
        number = zlib.crc32(episode.response.encode())
        is_correct, is_abstention = number % 3 == 0, number % 3 == 1 and number % 7 < 2
        return dataclasses.replace(
            reward,
            parts={**reward.parts, "exact_match": float(is_correct)},
            is_correct=is_correct,
            is_abstention=is_abstention,
            is_well_formed=number % 11 > 1,
        )


class Sampler:
    """Cache of engines by what they compile, because building one per combination is slow."""

    def __init__(self, config):
        self._config = config
        self.parts = cache(self._parts)

    def _parts(self, nucleus):
        config = self._config.copy_and_resolve_references()
        config.rollout.top_p = 0.9 if nucleus else 1.0
        config.eval.suites = ("sampled", "greedy")  # enough for every combination
        parts = build(config)
        engine = parts.engine
        engine.row_sizes = engine.row_sizes[-1:]  # a single size: each compiles for seconds
        return parts

    def for_config(self, config, make_env=None):
        """Return the components of a run, with the environment `Chance` by default."""
        parts = self.parts(config.rollout.top_p < 1)
        protocol = PROTOCOLS[config.env.search.protocol]
        env = (make_env or Chance)(
            Unreliable(EmptySearch()),
            prompt=Prompt(system=config.prompt.system, template=config.prompt.template),
            protocol=protocol,
            max_turns=config.rollout.max_turns,
        )
        limits = TokenLimits(
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
            max_total_tokens=config.rollout.max_total_tokens,
            max_observation_tokens=config.rollout.max_observation_tokens,
        )
        automaton = StopAutomaton(parts.tokenizer.vocab_bytes, env.stop_strings)
        pay = RewardCombiner(weights=resolved(config).reward_weights)
        rollout = Rollout(
            parts.engine, env, parts.tokenizer, automaton, limits, ReplySchedule(), pay
        )
        return dataclasses.replace(made_for(config, parts), rollout=SharedRollout(rollout))


def made_for(config, parts):
    """Return the components with the method and stages of another configuration."""
    method = method_of(config)
    stages = build_stages(resolved(config), parts.model, method)
    return dataclasses.replace(parts, method=method, stages=stages)


def saved_progress(parts, workdir):
    """Return the progress and weights of the latest checkpoint."""
    checkpointer = Checkpointer(workdir / "checkpoints", keep=2)
    saved, restored = checkpointer.restore(lambda saved: build_restore_targets(parts, saved))
    checkpointer.close()
    return Progress.from_json(saved, parts.method), restored["params"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Processes:
    """A job of `num` processes on this machine."""

    def __init__(
        self, world, workdir, environment, num=2, config="configs/debug_tiny.py", **changes
    ):
        settings = JOB_SETTINGS | changes
        command = [
            *(sys.executable, "-m", "tests.one_size", "jaxrl.launch"),
            *(f"--config={config}:{world}", f"--workdir={workdir}"),
            *(f"--config.{key}={value}" for key, value in settings.items()),
        ]
        if num > 1:
            command += [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={num}"]
            command += ["--peer_deadline_s=8"]
        self.all = [
            subprocess.Popen(
                [*command, *([f"--process_id={index}"] if num > 1 else [])],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | environment,
                start_new_session=True,
            )
            for index in range(num)
        ]

    def wait(self, timeout_s=240):
        """Wait for all processes; return exit codes and standard errors."""
        outputs = [process.communicate(timeout=timeout_s) for process in self.all]
        return [process.returncode for process in self.all], [error for _, error in outputs]


def lasting_anywhere(record):
    """Return a record without what depends on the clock or on the number of devices."""
    return {name: value for name, value in record.items() if not name.startswith(CLOCKS)}


def assert_close(one, other, tolerance):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, float):
            assert other[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
        else:
            assert other[name] == value, name
