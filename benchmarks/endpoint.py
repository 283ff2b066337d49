r"""Compare episodes over the HTTP endpoint with the same episodes in a native rollout.

    python -m benchmarks.endpoint [--model=small] [--width=512 --num_layers=8] [--num_rows=64]

The native rollout (`jaxrl.sampling.rollout`) runs episodes of `num_turns` turns with immediate
observations; turns end at random. Client processes then run the same episodes over an endpoint in
this process, with the same prompts, observations and numbers of tokens per turn. `chats` sends
messages to /v1/chat/completions, `ids` sends token ids to /inference/v1/generate. In the variants
with the suffix `_lost`, a fraction `lost` of the responses is dropped and requested again.

`tokens_per_cpu_s` counts the CPU time of this process: the engine, and the server if there is one.
The clients' CPU time is separate. `read_twice` counts prompt, observation and turn tokens that were
computed again; `sampled_twice` counts sampled tokens beyond those that the clients received.
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks import common
from benchmarks.rollout import split_turns
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Env, Episode, Message, Observation, Outcome, Reward, StepResult, Task
from jaxrl.extras.serve.engine import ServedEngine
from jaxrl.extras.serve.server import LOOPBACK, Endpoint, Server, bind_port
from jaxrl.extras.serve.worker import Worker
from jaxrl.sampling import next_token
from jaxrl.sampling.blocks import count_pages
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.episodes import TokenLimits
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.sampling.rollout import Rollout
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.types import Draw, Trajectory, flatten_groups

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_TURN_FACTOR = 3
"""Maximum length of a turn, as a multiple of the mean length."""


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Sizes of the benchmark; every field is a flag."""

    num_questions: int
    group_size: int  # episodes per question
    num_turns: int
    prompt_words: int
    turn_tokens: int  # mean length of a turn
    observation_words: int
    num_rows: int
    cached: int  # episodes of mean length that fit in the cache
    chunk_tokens: int
    num_clients: int  # client processes
    lost: float  # fraction of responses to drop


WORK = {
    "cpu": Sessions(
        num_questions=32, group_size=8, num_turns=4, prompt_words=48, turn_tokens=32,
        observation_words=32, num_rows=64, cached=320, chunk_tokens=16, num_clients=1, lost=0.1,
    ),
    "h200": Sessions(
        num_questions=32, group_size=8, num_turns=4, prompt_words=384, turn_tokens=64,
        observation_words=192, num_rows=256, cached=320, chunk_tokens=32, num_clients=4, lost=0.1,
    ),
}  # fmt: skip


def train_word_tokenizer(num_tokens: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with Qwen's chat format on invented words."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [invent_text(1000, number) for number in range(20)],
        trainers.BpeTrainer(
            vocab_size=num_tokens - 2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_special_tokens([START, END])
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=END, pad_token=END, chat_template=TEMPLATE
        )
    )


def invent_text(num_words: int, seed: int) -> str:
    """Generate a text of invented words."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 3) for _ in range(num_words)]
    return " ".join(
        "".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(length))
        for length in lengths
    )


class FixedTurns(Env):
    """Environment whose episodes have a fixed number of turns."""

    reward_parts = ()
    stop_strings = ()

    def __init__(self, work: Sessions):
        """Generate all observations."""
        self._work = work
        self.observations = [
            invent_text(work.observation_words, -number) for number in range(1, work.num_turns)
        ]

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """Return each question as a user message."""
        return [[{"role": "user", "content": task.question or ""}] for task in tasks]

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """Return the next observations, formatted as user messages."""
        return [self._reply(len(episode.turns)) for episode in episodes]

    def _reply(self, turn: int) -> StepResult:
        if turn + 1 >= self._work.num_turns:
            return StepResult(outcome=Outcome.ANSWERED)
        return StepResult(
            observation=Observation(
                prefix=f"{END}\n{START}user\n",
                body=self.observations[turn],
                suffix=f"{END}\n{START}assistant\n",
            )
        )

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Return a reward of 0 for every episode."""
        return [Reward(total=0.0, parts={}, final_answer="") for _ in group]


class Clients:
    """Pool of client processes."""

    def __init__(self, count: int):
        """Start `count` processes."""
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.endpoint_client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]

    def run_episodes(self, sessions: Sequence[dict[str, Any]], **job: Any) -> Counter[str]:
        """Distribute sessions over the processes; return the summed counts of the clients.

        Raises:
            RuntimeError: A client process failed. The cause is in its output.
        """
        count = len(self._processes)
        for number, process in enumerate(self._processes):
            assert process.stdin is not None
            line = json.dumps({**job, "seed": number, "sessions": sessions[number::count]})
            process.stdin.write(line + "\n")
            process.stdin.flush()
        total: Counter[str] = Counter()
        for process in self._processes:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                raise RuntimeError(f"a client ended with {process.wait()}")
            total.update(json.loads(line))
        return total

    def end(self) -> None:
        """Close the input of the processes and wait until they exit."""
        for process in self._processes:
            process.communicate()


def build_sessions(
    trajectories: Sequence[Trajectory], texts: Sequence[str], draws: Sequence[Draw]
) -> list[dict[str, Any]]:
    """Convert trajectories to client sessions: prompts, and the tokens before each turn.

    Args:
        trajectories: Trajectories of a native rollout, in the order of `draws`.
        texts: Texts of the observations, one per turn after the first.
        draws: Draws of the native rollout, one per question.
    """
    size = len(trajectories) // len(draws)
    episodes = []
    for index, trajectory in enumerate(trajectories):
        turns = [
            {"token_ids": new, "text": text, "budget": budget}
            for (new, budget), text in zip(split_turns(trajectory), ["", *texts], strict=False)
        ]
        question = draws[index // size].task.question
        episodes.append(
            {
                "name": f"{index}",
                "seed": index,
                "messages": [{"role": "user", "content": question}],
                "token_ids": trajectory.token_ids[: trajectory.prompt_length].tolist(),
                "turns": turns,
            }
        )
    return episodes


def measure(
    model: common.ModelSizes, work: Sessions, repetitions: int, warm_up: int
) -> dict[str, Any]:
    """Measure the native rollout and the endpoint; return rates and repeated work."""
    mesh = common.make_single_device_mesh()
    tokenizer = train_word_tokenizer(model.vocab_size)
    kernels = common.select_default_kernels(model, mesh)
    env = FixedTurns(work)
    draws = [
        Draw(
            task=Task(id=f"q{i}", question=invent_text(work.prompt_words, 1000 + i)), stream_index=i
        )
        for i in range(work.num_questions)
    ]
    prompts = [tokenizer.render_prompt(env.start([draw.task])[0]) for draw in draws]
    # Limits that fit every episode, with room for turns longer than the mean.
    num_observation_tokens = sum(len(tokenizer.encode(text)) + 10 for text in env.observations)
    prompt_tokens = max(map(len, prompts))
    sampled = work.num_turns * work.turn_tokens
    total = prompt_tokens + MAX_TURN_FACTOR * sampled + num_observation_tokens
    engine_settings: dict[str, Any] = dict(
        num_tokens=tokenizer.num_tokens - 2,  # never sample the chat markers
        num_rows=work.num_rows,
        num_pages=work.cached
        * count_pages(prompt_tokens + sampled + num_observation_tokens, kernels.page_tokens),
        max_total_tokens=total,
        chunk_tokens=work.chunk_tokens,
        dtype=jnp.dtype(model.dtype),
        kernels=kernels,
    )
    stops = StopAutomaton(tokenizer.vocab_bytes, ())
    # Random weights sample one of these ids every `turn_tokens` tokens on average.
    native = Engine(
        model.architecture, mesh, stops, kinds=(next_token.FULL,),
        eos_ids=range(0, tokenizer.num_tokens - 2, work.turn_tokens), **engine_settings,
    )  # fmt: skip
    served = ServedEngine(
        model.architecture, mesh, stops, kinds=(next_token.FULL,),
        eos_ids=(), **engine_settings,
    )  # fmt: skip
    # Both engines have the same weights.
    params = common.init_random_params(model)
    for engine in (native, served):
        engine.set_weights(params)
    compilations, compiled = common.Compilations(), list[int]()
    # The rollout runs first in each repetition; the clients then replay its episodes.
    limits = TokenLimits(
        max_prompt_tokens=prompt_tokens,
        max_response_tokens=MAX_TURN_FACTOR * sampled,
        max_total_tokens=total,
        max_observation_tokens=total,
    )
    rollout = Rollout(native, env, tokenizer, stops, limits)
    clients = Clients(work.num_clients)
    trajectories_played: list[Trajectory] = []
    recorded: dict[str, list[dict[str, float]]] = {}

    # Prefilled tokens in excess of `needed` were computed twice.
    def record_figures(
        name: str, engine: Engine, before: Any, needed: int, **figures: float
    ) -> None:
        counts = engine.counts
        read = counts.prefilled_prompt + counts.prefilled_resume
        read -= before.prefilled_prompt + before.prefilled_resume
        recorded.setdefault(name, []).append(
            {
                "requests": sum(len(split_turns(t)) for t in trajectories_played),
                "read": read,
                "read_twice": read - needed,
                "sampled_twice": counts.sampled - before.sampled - count_sampled_tokens(),
                "chunks": counts.chunks - before.chunks,
                "swapped": counts.swapped - before.swapped,
                **figures,
            }
        )

    def count_sampled_tokens() -> int:
        return sum(t.num_sampled for t in trajectories_played)

    def count_needed_tokens() -> int:
        prompts = {tuple(t.token_ids[: t.prompt_length]) for t in trajectories_played}
        inserted = sum(t.response_length - t.num_sampled for t in trajectories_played)
        return sum(len(prompt) - 1 for prompt in prompts) + inserted

    def run_episodes(number: int) -> None:
        compiled.append(compilations.num)
        before = dataclasses.replace(native.counts)
        sampling = SamplingConfig(
            group_size=work.group_size,
            temperature=1.0,
            top_p=1.0,
            seeds=Seeds(seed=0, stage=0, step=number),
        )
        trajectories_played[:] = flatten_groups(rollout(draws, sampling))
        record_figures("native", native, before, count_needed_tokens())
        native.clear()

    def run_clients(name: str, way: str, lost: float, number: int) -> None:
        before = dataclasses.replace(served.counts)
        sessions = build_sessions(trajectories_played, env.observations, draws)
        worker = Worker(served, tokenizer.vocab_bytes, (), max_queue=4096)
        endpoint = Endpoint(worker, tokenizer, name="any")
        server = Server(endpoint, LOOPBACK, bind_port(LOOPBACK, 0, ""))
        try:
            counts_received = clients.run_episodes(sessions, port=server.port, way=way, lost=lost)
        finally:
            server.shutdown(0.0)
            served.clear()
        assert counts_received["sampled"] == count_sampled_tokens(), "a turn ended early"
        record_figures(
            name, served, before, count_needed_tokens(),
            held_more=counts_received["held"] - sum(len(t.token_ids) for t in trajectories_played),
            clients_cpu_s=counts_received["cpu_s"], lost=counts_received["num_lost"],
            different=counts_received["num_different"],
        )  # fmt: skip

    # Every repetition runs all variants, because speed drifts over time.
    variants: dict[str, common.RolloutVariant] = {"native": (run_episodes, native.counts)}
    for way in ("chats", "ids"):
        for name, lost in ((way, 0.0), (f"{way}_lost", work.lost)):
            if lost or name == way:
                variants[name] = (partial(run_clients, name, way, lost), served.counts)
    try:
        measured = common.measure_variants(variants, warm_up=warm_up, repetitions=repetitions)
    finally:
        clients.end()
    rate = "tokens_per_cpu_s" if jax.default_backend() == "cpu" else "tokens_per_s"
    return {
        **{
            name: {
                **common.compute_median_figures(measured[name]),
                **common.compute_median_figures(recorded[name][warm_up:]),
            }
            for name in variants
        },
        f"{rate}, share of native": {
            name: common.compute_median_ratio(measured, name, "native", rate)
            for name in variants
            if name != "native"
        },
        "num_recompilations": compilations.num - compiled[warm_up],
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    flags, model, work, hardware = common.parse_flags(__doc__ or "", WORK, argv)
    figures = measure(model, work, flags.repetitions, flags.warm_up)
    return common.report_figures("endpoint", flags, model, work, hardware, figures)


if __name__ == "__main__":
    main()
