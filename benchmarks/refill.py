r"""Rollouts of uneven length, and with a slow tool: what refilling and overlapping are worth.

    python -m benchmarks.refill --preset=cpu|qwen3-0.6b|qwen3-4b [--median_tokens=... ...]

Lengths: as many samples as `num_samples`, their lengths drawn from a log-normal distribution cut at
`max_tokens`, through an engine, in three ways:

- `static_full`: a batch of samples fills the rows; all rows are computed until its slowest one is
  done, then comes the next batch.
- `static`: the same, but rows that are done leave the computation as far as the engine's row sizes
  allow.
- `continuous`: free rows are refilled between chunks.

Latency: whole rollouts in an environment whose every call takes `latency_ms`, against none, by
schedule (see `sampling.rollout.Schedule`): replies after one chunk, two or three, or as they
arrive. The policy is random and stops by chance; nobody knows beforehand where.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import common
from jaxrl.envs.base import Env, Episode, Message, Observation, Outcome, Reward, StepResult, Task
from jaxrl.models.attention.kernels import XLA
from jaxrl.sampling.engine import Counts, Engine, Request, sample_keys
from jaxrl.sampling.pages import pages_for
from jaxrl.sampling.rollout import Limits, Rollout, Sampling, Schedule, Seeds
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.tokenizer import Tokenizer
from jaxrl.types import Draw


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is sampled; every field is a flag."""

    num_rows: int  # samples decoded side by side
    chunk_tokens: int  # decoding steps between two looks of the host
    prompt_tokens: int
    num_samples: int  # of uneven length
    median_tokens: int  # of their lengths
    max_tokens: int
    num_episodes: int  # with a tool
    num_turns: int  # of each episode
    turn_tokens: int  # mean length of a turn
    observation_tokens: int
    latency_ms: float  # of a call of the environment


WORK = {
    "cpu": Work(
        num_rows=32, chunk_tokens=16, prompt_tokens=32, num_samples=192, median_tokens=64,
        max_tokens=1024, num_episodes=192, num_turns=3, turn_tokens=32, observation_tokens=32,
        latency_ms=50.0,
    ),
    "qwen3-0.6b": Work(
        num_rows=256, chunk_tokens=32, prompt_tokens=512, num_samples=2048, median_tokens=64,
        max_tokens=1024, num_episodes=2048, num_turns=3, turn_tokens=64, observation_tokens=256,
        latency_ms=50.0,
    ),
    "qwen3-4b": Work(
        num_rows=128, chunk_tokens=32, prompt_tokens=512, num_samples=1024, median_tokens=64,
        max_tokens=1024, num_episodes=1024, num_turns=3, turn_tokens=64, observation_tokens=256,
        latency_ms=50.0,
    ),
}  # fmt: skip

SCHEDULES = {
    "after_1_chunk": Schedule(lag_chunks=1),
    "after_2_chunks": Schedule(lag_chunks=2),
    "after_3_chunks": Schedule(lag_chunks=3),
    "as_they_arrive": Schedule(deterministic=False),
}


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and the end of a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token="<|im_end|>",
            chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
        )
    )


class SlowTool(Env):
    """Answers every turn after `latency_s`, the last one of an episode too."""

    def __init__(self, work: Work):
        # A random policy writes one of these bytes about every `turn_tokens` tokens.
        self.stop_strings = tuple(chr(33 + i) for i in range(max(256 // work.turn_tokens, 1)))
        self.latency_s = 0.0
        self._num_turns = work.num_turns
        self._prompt = "p" * work.prompt_tokens
        self._observation = Observation(prefix="", body="o" * work.observation_tokens, suffix="")

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """The same prompt for every task."""
        return [[{"role": "user", "content": self._prompt}] for _ in tasks]

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """An observation, or the end after the last turn."""
        time.sleep(self.latency_s)
        over = StepResult(outcome=Outcome.ANSWERED)
        goes_on = StepResult(observation=self._observation)
        last = self._num_turns - 1
        return [over if len(episode.turns) >= last else goes_on for episode in episodes]

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Nothing."""
        return [Reward(total=0.0, parts={}, final_answer="") for _ in group]


def make_engine(
    model: common.ModelSizes, work: Work, *, num_pages: int, max_total_tokens: int, stops: Any
) -> Engine:
    """An engine of `num_rows` rows; `stops` is the automaton."""
    return Engine(
        model.config,
        common.one_device(),
        stops,
        num_tokens=min(model.vocab_size, stops.is_hit.shape[1]),
        eos_ids=(),
        num_rows=work.num_rows,
        num_pages=num_pages,
        max_prompt_tokens=work.prompt_tokens,
        max_total_tokens=max_total_tokens,
        chunk_tokens=work.chunk_tokens,
        dtype=jnp.dtype(model.dtype),
    )


def draw_lengths(work: Work) -> np.ndarray:
    """Lengths of samples, most of them short and a few very long."""
    drawn = np.random.default_rng(0).lognormal(np.log(work.median_tokens), 1.0, work.num_samples)
    return np.clip(drawn, 1, work.max_tokens).astype(int)


def uneven_requests(model: common.ModelSizes, work: Work, number: int) -> list[Request]:
    """Samples of random prompts whose budgets are their lengths."""
    rng = np.random.default_rng(number)
    prompts = rng.integers(model.vocab_size, size=(work.num_samples, work.prompt_tokens))
    positions = np.arange(work.num_samples, dtype=np.int32)
    keys = sample_keys(0, 0, number, positions, np.zeros_like(positions), np.zeros_like(positions))
    return [
        Request(prompt_ids=tuple(prompt), sample_key=key, budget=int(length))
        for prompt, key, length in zip(prompts, keys, draw_lengths(work), strict=True)
    ]


def sample_all(engine: Engine, requests: Sequence[Request]) -> None:
    """Draws all samples, refilling rows between chunks."""
    engine.submit(requests)
    while not engine.is_idle:
        for event in engine.step(ahead=1):
            if event.status:
                engine.finish(event.request)


def measure(
    runs: dict[str, Callable[[int], Any]], counts: Counts, *, warm_up: int, repetitions: int
) -> dict[str, list[dict[str, float]]]:
    """Figures of every repetition of each way of running; they take turns."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(warm_up + repetitions):
        for name, run in runs.items():
            before = dataclasses.replace(counts)
            started, cpu_started = time.perf_counter(), time.process_time()
            run(number)
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
            sampled, steps = counts.sampled - before.sampled, counts.row_steps - before.row_steps
            if number >= warm_up:
                figures = {"tokens_per_s": sampled / seconds, "slot_occupancy": sampled / steps}
                if jax.default_backend() == "cpu":  # comparable also where the core is shared
                    figures["tokens_per_cpu_s"] = sampled / cpu_seconds
                measured[name].append(figures)
    return measured


def medians(repetitions: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure, over repetitions."""
    return {key: statistics.median(r[key] for r in repetitions) for key in repetitions[0]}


def measure_lengths(
    model: common.ModelSizes, work: Work, *, warm_up: int, repetitions: int
) -> dict[str, dict[str, float]]:
    """Rates of static batches and of refilled rows."""
    engine = make_engine(
        model,
        work,
        num_pages=0,  # enough for the rows
        max_total_tokens=work.prompt_tokens + work.max_tokens,
        stops=StopAutomaton([b"a"] * model.vocab_size, ["</search>"]),
    )
    engine.set_weights(jax.block_until_ready(common.random_params(model)))
    row_sizes = engine.row_sizes

    def continuous(number: int) -> None:
        sample_all(engine, uneven_requests(model, work, number))

    def static(number: int) -> None:
        requests = uneven_requests(model, work, number)
        for start in range(0, len(requests), work.num_rows):
            sample_all(engine, requests[start : start + work.num_rows])

    def static_full(number: int) -> None:
        engine.row_sizes = row_sizes[-1:]
        static(number)
        engine.row_sizes = row_sizes

    runs = {"static_full": static_full, "static": static, "continuous": continuous}
    measured = measure(runs, engine.counts, warm_up=warm_up, repetitions=repetitions)
    return {name: medians(repetitions) for name, repetitions in measured.items()}


def measure_latency(
    model: common.ModelSizes, work: Work, *, warm_up: int, repetitions: int
) -> dict[str, dict[str, float]]:
    """Rates by schedule, with and without latency, and the share that the latency costs."""
    tokenizer, env = byte_tokenizer(), SlowTool(work)
    stops = StopAutomaton(tokenizer.vocab_bytes, env.stop_strings)
    response = work.num_turns * work.turn_tokens * 3
    total = work.prompt_tokens + response + work.num_turns * work.observation_tokens
    limits = Limits(
        max_prompt_tokens=work.prompt_tokens,
        max_response_tokens=response,
        max_total_tokens=total,
        max_observation_tokens=work.observation_tokens,
    )
    # Enough for as many rows that wait as are decoded.
    num_pages = 2 * work.num_rows * pages_for(total, XLA.page_tokens)
    engine = make_engine(model, work, num_pages=num_pages, max_total_tokens=total, stops=stops)
    engine.set_weights(jax.block_until_ready(common.random_params(model)))
    tasks = [Task(id=str(index), question="") for index in range(work.num_episodes // 4)]
    draws = [Draw(task=task, stream_index=index) for index, task in enumerate(tasks)]

    def play(rollout: Rollout, latency_s: float) -> Callable[[int], Any]:
        def run(number: int) -> None:
            env.latency_s = latency_s
            seeds = Seeds(seed=0, stage=0, step=number)
            rollout(draws, Sampling(group_size=4, temperature=1.0, top_p=1.0, seeds=seeds))

        return run

    runs = {}
    for name, schedule in SCHEDULES.items():
        rollout = Rollout(engine, env, tokenizer, stops, limits, schedule)
        runs[f"{name}_without"] = play(rollout, 0.0)
        runs[name] = play(rollout, work.latency_ms / 1e3)
    measured = measure(runs, engine.counts, warm_up=warm_up, repetitions=repetitions)
    figures = {}
    for name in SCHEDULES:
        without, rates = (
            [repetition["tokens_per_s"] for repetition in measured[key]]
            for key in (f"{name}_without", name)
        )
        # Of runs that followed one another: on a shared machine the speed drifts.
        losses = [1 - rate / other for rate, other in zip(rates, without, strict=True)]
        figures[name] = {
            **medians(measured[name]),
            "without_latency": statistics.median(without),
            "loss": statistics.median(losses),
        }
    return figures


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark; the record that it writes."""
    flags, model, work, hardware = common.read_flags(__doc__ or "", WORK, argv)
    counts = {"warm_up": flags.warm_up, "repetitions": flags.repetitions}
    lengths = measure_lengths(model, work, **counts)
    rate = "tokens_per_cpu_s" if jax.default_backend() == "cpu" else "tokens_per_s"
    continuous = lengths["continuous"][rate]
    gains = {name: continuous / lengths[name][rate] for name in ("static_full", "static")}
    figures = {
        **{f"lengths: {name}": value for name, value in lengths.items()},
        "continuous over": gains,
        **{
            f"latency: {name}": value
            for name, value in measure_latency(model, work, **counts).items()
        },
    }
    return common.finish("refill", flags, model, work, hardware, figures)


if __name__ == "__main__":
    main()
