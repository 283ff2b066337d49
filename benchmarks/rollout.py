r"""Measure the sampling speed of the engine, from prompts to finished samples.

    python -m benchmarks.rollout --case=even|search --preset=cpu|h200 [--model=qwen3-4b]
        [--num_rows=... --num_layers=...]

`even`: every sample has exactly `new_tokens` tokens, without stop strings and end-of-turn ids. The
`floor` figures are limits set by the device's memory bandwidth and arithmetic (see
`common.compute_decode_floor_s`): weights and cache are read once per step; prefill is ignored. At
the end, `tail_rows` samples are decoded alone, as if a few long samples remained.

`search`: complete multi-turn rollouts with real searches of a local index, with `latency_ms` added
to each call (`searching.RandomSearches`); then without latency; then `at_once`, with the same
numbers of tokens per turn and no environment, so that observations are ready immediately.
`tokens_read_twice` counts tokens of prompts, turns and observations that were prefilled again after
their pages were evicted.

The first repetitions compile and are not counted. For figures that are comparable between machines,
use one thread on an otherwise idle core:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 0 \
      python -m benchmarks.rollout --repetitions=15
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import common
from jaxrl.runtime.sharding import make_local_mesh
from jaxrl.sampling import next_token
from jaxrl.sampling.engine import Engine, Request
from jaxrl.sampling.episodes import ReplySchedule, TokenLimits
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.sampling.rollout import Rollout
from jaxrl.sampling.sample_keys import derive_sample_keys
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.types import Draw, Group, Trajectory, flatten_groups


@dataclass(frozen=True, kw_only=True)
class Even:
    """Sizes of the `even` case; every field is a flag."""

    num_prompts: int
    group_size: int  # samples per prompt
    prompt_tokens: int
    new_tokens: int  # tokens per sample
    num_rows: int  # samples decoded concurrently
    chunk_tokens: int  # decoding steps per chunk
    tail_rows: int  # samples decoded alone at the end; 0: none


@dataclass(frozen=True, kw_only=True)
class Search:
    """Sizes of the `search` case; every field is a flag."""

    num_questions: int
    group_size: int  # episodes per question
    prompt_tokens: int
    turn_tokens: int  # mean length of a turn
    max_searches: int  # per episode
    observation_tokens: int
    latency_ms: float  # added to each call to the environment
    lag_chunks: int  # chunks until an observation is used; 0: as soon as it arrives
    num_rows: int
    chunk_tokens: int


EVEN = {
    "cpu": Even(
        num_prompts=8, group_size=4, prompt_tokens=64, new_tokens=128, num_rows=32,
        chunk_tokens=16, tail_rows=2,
    ),
    "h200": Even(
        num_prompts=32, group_size=8, prompt_tokens=768, new_tokens=512, num_rows=256,
        chunk_tokens=32, tail_rows=16,
    ),
}  # fmt: skip
SEARCH = {
    "cpu": Search(
        num_questions=64, group_size=8, prompt_tokens=64, turn_tokens=32, max_searches=3,
        observation_tokens=64, latency_ms=20.0, lag_chunks=2, num_rows=64, chunk_tokens=16,
    ),
    "h200": Search(
        num_questions=64, group_size=8, prompt_tokens=512, turn_tokens=64, max_searches=3,
        observation_tokens=256, latency_ms=20.0, lag_chunks=2, num_rows=256, chunk_tokens=32,
    ),
}  # fmt: skip


def make_engine(
    model: common.ModelSizes,
    work: Any,
    mesh: Mesh,
    *,
    max_total_tokens: int,
    stops: StopAutomaton | None = None,
    train_mesh: Mesh | None = None,
) -> Engine:
    """Build an engine for the rows, chunks and prompts of `work`, with the platform's kernels.

    Args:
        model: Model sizes.
        work: Benchmark sizes, such as `Even` or `Search`.
        mesh: Mesh over all processes; the engine uses the devices of this process.
        max_total_tokens: Maximum number of tokens in a sample, including its prompt.
        stops: Automaton that ends turns; None for no stop strings.
        train_mesh: Mesh over which the trainer's weights are sharded; `mesh` by default.
    """
    stops = stops or StopAutomaton([b"a"] * model.vocab_size, ["</search>"])
    return Engine(
        model.architecture,
        make_local_mesh(mesh),
        stops,
        num_tokens=min(model.vocab_size, stops.is_hit.shape[1]),
        eos_ids=(),
        num_rows=work.num_rows,
        max_total_tokens=max_total_tokens,
        chunk_tokens=work.chunk_tokens,
        dtype=jnp.dtype(model.dtype),
        kernels=common.select_default_kernels(model, mesh),
        train_mesh=train_mesh or mesh,
        kinds=(next_token.FULL,),
    )


def make_requests(
    prompts: np.ndarray | Sequence[Sequence[int]], lengths: Sequence[int], number: int
) -> list[Request]:
    """Build a request per prompt and length, with the random keys of repetition `number`."""
    positions = np.arange(len(prompts), dtype=np.int32)
    keys = derive_sample_keys(
        0, 0, number, positions, np.zeros_like(positions), np.zeros_like(positions)
    )
    return [
        Request(prompt_ids=tuple(int(i) for i in prompt), sample_key=key, budget=int(length))
        for prompt, key, length in zip(prompts, keys, lengths, strict=True)
    ]


def make_even_requests(model: common.ModelSizes, work: Even, number: int) -> list[Request]:
    """Build the requests of repetition `number`: random prompts, in consecutive groups."""
    rng = np.random.default_rng(number)
    prompts = rng.integers(model.vocab_size, size=(work.num_prompts, work.prompt_tokens))
    prompts = np.repeat(prompts, work.group_size, axis=0)
    return make_requests(prompts, [work.new_tokens] * len(prompts), number)


def sample_all(
    engine: Engine,
    requests: Sequence[Request],
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Sample all requests; return the seconds of each chunk without prompt prefill."""
    engine.submit(requests)
    chunk_times = []
    while not engine.is_idle:
        read, started = engine.counts.prefilled_prompt, clock()
        events = engine.step(ahead=1)
        if engine.counts.prefilled_prompt == read:
            chunk_times.append(clock() - started)
        for event in events:
            if event.status:
                engine.finish(event.request)
    return chunk_times


def replay_turns(engine: Engine, trajectories: Sequence[Trajectory], number: int) -> None:
    """Sample turns of the trajectories' lengths, with observations ready when a turn ends."""
    prompts = [t.token_ids[: t.prompt_length] for t in trajectories]
    turns = [split_turns(t) for t in trajectories]
    requests = make_requests(prompts, [lengths.popleft()[1] for lengths in turns], number)
    pending_turns = dict(zip(engine.submit(requests), turns, strict=True))
    while not engine.is_idle:
        for event in engine.step(ahead=1):
            if event.status and pending_turns[event.request]:
                engine.resume([(event.request, *pending_turns[event.request].popleft())])
            elif event.status:
                engine.finish(event.request)


def split_turns(trajectory: Trajectory) -> deque[tuple[list[int], int]]:
    """Return the token ids inserted before each turn and the number sampled in it."""
    mask = trajectory.loss_mask[trajectory.prompt_length :]
    ids = trajectory.token_ids[trajectory.prompt_length :]
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]  # starts and ends of turns
    before = zip([0, *ends], starts, strict=False)
    return deque(
        (ids[first:start].tolist(), int(end - start))
        for (first, start), end in zip(before, ends, strict=True)
    )


def compute_decoding_figures(
    model: common.ModelSizes,
    work: Even,
    hardware: common.Hardware,
    num_rows: int,
    chunk_times: Sequence[float],
) -> dict[str, Any]:
    """Return the time of a decoding step with `num_rows` rows, and its floor."""
    floor_s = common.compute_decode_floor_s(
        model, hardware, num_rows=num_rows, context=work.prompt_tokens + work.new_tokens / 2
    )
    steps = common.summarize([1e3 * t / work.chunk_tokens for t in chunk_times])
    return {
        "ms_per_decode_step": steps,
        "floor_ms_per_decode_step": 1e3 * floor_s if floor_s else None,
        "floor_tokens_per_s": num_rows / floor_s if floor_s else None,
        "share_of_floor": 1e3 * floor_s / steps["median"] if floor_s else None,
    }


def measure_even(
    model: common.ModelSizes, work: Even, hardware: common.Hardware, flags: argparse.Namespace
) -> dict[str, Any]:
    """Measure sampling with equal lengths, then with only a few rows."""
    mesh = common.make_single_device_mesh()
    total = work.prompt_tokens + work.new_tokens
    engine = make_engine(model, work, mesh, max_total_tokens=total)
    needed = {min(work.num_rows, work.num_prompts * work.group_size), work.tail_rows} - {0}
    # All samples end together, so no other sizes run. Compiling a size takes a minute on a GPU.
    engine.row_sizes = sorted({min(s for s in engine.row_sizes if s >= n) for n in needed})
    started = time.perf_counter()
    engine.compile()
    compile_s = time.perf_counter() - started
    engine.set_weights(jax.block_until_ready(common.init_random_params(model)))
    chunk_times: list[float] = []

    def run(number: int) -> None:
        chunk_times.extend(sample_all(engine, make_even_requests(model, work, number)))
        if number < flags.warm_up:
            chunk_times.clear()

    timing = common.repeat(run, warm_up=flags.warm_up, repetitions=flags.repetitions)
    num_sampled = work.num_prompts * work.group_size * work.new_tokens
    total = engine.counts.sampled
    assert total == num_sampled * (flags.warm_up + flags.repetitions), "a sample ended early"
    num_rows = min(work.num_rows, work.num_prompts * work.group_size)
    figures = {
        **timing.figures(num_sampled),
        "compile_s": compile_s + timing.compile_s,
        "attention": engine.programs.kernels.name,
        **compute_decoding_figures(model, work, hardware, num_rows, chunk_times),
    }
    if work.tail_rows:
        tail = make_even_requests(model, work, 0)[: work.tail_rows]
        sample_all(engine, tail)
        tail_figures = compute_decoding_figures(
            model, work, hardware, len(tail), sample_all(engine, tail)
        )
        figures |= {f"tail_{name}": value for name, value in tail_figures.items()}
    return figures


def measure_search(
    model: common.ModelSizes, work: Search, hardware: common.Hardware, flags: argparse.Namespace
) -> dict[str, Any]:
    """Measure episodes with searches, and the same numbers of tokens without an environment."""
    del hardware
    mesh, params = common.make_single_device_mesh(), common.init_random_params(model)
    last_trajectories: list[Trajectory] = []
    prefill_counts = {"read": 0, "needed": 0, "searches": 0, "episodes": 0, "inserted": 0}
    with tempfile.TemporaryDirectory() as folder:
        episodes = make_episodes(model, work, mesh, Path(folder))
        engine, env = episodes.engine, episodes.env
        engine.set_weights(params)
        at_once = make_engine(model, work, mesh, max_total_tokens=episodes.max_total_tokens)
        at_once.set_weights(params)

        def run_episodes(number: int, latency_s: float) -> list[Trajectory]:
            env.latency_s = latency_s
            trajectories = flatten_groups(episodes.run_episodes(number))
            engine.clear()  # memory may not hold two caches
            return trajectories

        # Stores its trajectories in `last_trajectories` for `sample_at_once`.
        def search(number: int) -> None:
            before, searches = dataclasses.replace(engine.counts), env.num_searches
            last_trajectories[:] = run_episodes(number, work.latency_ms / 1e3)
            # Without evictions, every distinct prompt and every observation is prefilled once.
            read = engine.counts.prefilled_prompt - before.prefilled_prompt
            read += engine.counts.prefilled_resume - before.prefilled_resume
            prompts = {tuple(t.token_ids[: t.prompt_length]) for t in last_trajectories}
            inserted = sum(t.response_length - t.num_sampled for t in last_trajectories)
            prefill_counts["read"] += read
            prefill_counts["needed"] += sum(len(prompt) - 1 for prompt in prompts) + inserted
            prefill_counts["inserted"] += inserted
            prefill_counts["searches"] += env.num_searches - searches
            prefill_counts["episodes"] += len(last_trajectories)

        def sample_at_once(number: int) -> None:
            replay_turns(at_once, last_trajectories, number)
            at_once.clear()

        variants = {
            "search": (search, engine.counts),
            "search_without_latency": (lambda number: run_episodes(number, 0.0), engine.counts),
            "at_once": (sample_at_once, at_once.counts),
        }
        # Every repetition runs all variants, because speed drifts over time.
        measured = common.measure_variants(
            variants, warm_up=flags.warm_up, repetitions=flags.repetitions
        )
    return {
        **{
            name: common.compute_median_figures(repetitions)
            for name, repetitions in measured.items()
        },
        "search over": {
            name: common.compute_median_ratio(measured, "search", name, "tokens_per_s")
            for name in ("search_without_latency", "at_once")
        },
        "searches_per_episode": prefill_counts["searches"] / prefill_counts["episodes"],
        "inserted_tokens_per_episode": prefill_counts["inserted"] / prefill_counts["episodes"],
        "tokens_read": prefill_counts["read"],
        "tokens_read_twice": prefill_counts["read"] - prefill_counts["needed"],
    }


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Rollout of the `search` case, with its engine, environment and tasks."""

    engine: Engine
    env: Any  # a `searching.RandomSearches`
    rollout: Rollout
    draws: list[Draw]
    group_size: int
    max_total_tokens: int

    def run_episodes(self, number: int, policy_version: int = 0) -> list[Group]:
        """Run all episodes with the seeds of repetition `number`."""
        sampling = SamplingConfig(
            group_size=self.group_size,
            temperature=1.0,
            top_p=1.0,
            seeds=Seeds(seed=0, stage=0, step=number),
            policy_version=policy_version,
        )
        return self.rollout(self.draws, sampling)


def make_episodes(
    model: common.ModelSizes, work: Any, mesh: Mesh, folder: Path, train_mesh: Mesh | None = None
) -> Episodes:
    """Build the rollout for a `Search`, or for sizes with the same fields.

    The corpus and its index are written to `folder`. For the meshes, see `make_engine`.
    """
    from benchmarks import searching  # needs tantivy

    tokenizer = searching.build_byte_tokenizer()
    env = searching.RandomSearches(
        folder,
        max_searches=work.max_searches,
        turn_tokens=work.turn_tokens,
        prompt_tokens=work.prompt_tokens,
    )
    stops = StopAutomaton(tokenizer.vocab_bytes, env.stop_strings)
    turns = work.max_searches + 1
    # Turns end at random; some are many times longer than the mean.
    response = 3 * turns * work.turn_tokens
    # An observation has a newline before and after its truncated text.
    total = work.prompt_tokens + response + work.max_searches * (work.observation_tokens + 2)
    limits = TokenLimits(
        max_prompt_tokens=work.prompt_tokens,
        max_response_tokens=response,
        max_total_tokens=total,
        max_observation_tokens=work.observation_tokens,
    )
    # The cache fits all rows at full length. Few get that long; waiting rows use the rest.
    engine = make_engine(
        model, work, mesh, max_total_tokens=total, stops=stops, train_mesh=train_mesh
    )
    schedule = ReplySchedule(deterministic=work.lag_chunks > 0, lag_chunks=max(work.lag_chunks, 1))
    return Episodes(
        engine=engine,
        env=env,
        rollout=Rollout(engine, env, tokenizer, stops, limits, schedule),
        draws=searching.make_draws(work.num_questions),
        group_size=work.group_size,
        max_total_tokens=total,
    )


@dataclass(frozen=True)
class Case:
    """A measurement, with its sizes by preset."""

    work: dict[str, Any]  # by preset
    measure: Callable[..., dict[str, Any]]


CASES = {
    "even": Case(EVEN, measure_even),
    "search": Case(SEARCH, measure_search),
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--case", choices=CASES, default="even")
    case_flags, remaining = first.parse_known_args(argv)
    case = CASES[case_flags.case]
    flags, model, work, hardware = common.parse_flags(__doc__ or "", case.work, remaining)
    figures = case.measure(model, work, hardware, flags)
    return common.report_figures(
        f"rollout_{case_flags.case}", flags, model, work, hardware, figures
    )


if __name__ == "__main__":
    main()
