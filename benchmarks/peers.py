r"""Compare jaxrl with transformers on torch: same model, prompts and lengths, one thread.

    pip install torch==2.13.0
    python -m benchmarks.peers [--num_prompts=... --new_tokens=... --num_layers=... --spread=0.6]
        [--peers=ours] [--tasks=update]

Each peer runs in a separate process, so that peak memory is measured separately, and every
repetition alternates between them. Both load the same float32 weights in Hugging Face format.

`sample`: `num_prompts` x `group_size` samples of random lengths at temperature 1, in one batch.
Only tokens up to those lengths count; transformers' `generate` computes every row until the longest
ends. `update`: one AdamW step on the clipped policy loss over those lengths, in micro-batches of
`micro_rows` sequences. Both report the mean log-probability of the same tokens before the first
update; `logprob_gap` is the difference. The torch update is a plain loop that sorts sequences by
length and pads each micro-batch to its longest sequence.

Rates are medians over repetitions; `ours over` is the median ratio within a repetition. The extra
bytes of `sample` and `update` are their peaks above the memory that stays in use between them, such
as weights, moments and code.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import common, rollout, update
from jaxrl.builders.method import build_method
from jaxrl.builders.resolved import resolve_names
from jaxrl.config import default_config
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.training.minibatches import shard_minibatch
from jaxrl.training.optimizer import make_optimizer
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import ScoreStep, UpdateStep, init_state

LEARNING_RATE = 1e-6
CLIP = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Sizes of the work of each peer; every field is a flag."""

    num_prompts: int
    group_size: int  # samples per prompt
    prompt_tokens: int
    new_tokens: int  # median length of a sample
    max_tokens: int  # maximum length of a sample
    spread: float  # standard deviation of the logarithm of lengths; 0: equal lengths
    chunk_tokens: int  # decoding steps per chunk
    micro_rows: int  # sequences per micro-batch; for ours, rows of the longest length
    logits_chunk_tokens: int  # our update: tokens with logits in memory at a time
    remat: str  # our update: what the backward pass recomputes in a layer
    scan_layers: bool  # our update: compile one layer and scan over layers


WORK = {
    "cpu": Work(
        num_prompts=8, group_size=4, prompt_tokens=64, new_tokens=96, max_tokens=256, spread=0.6,
        chunk_tokens=16, micro_rows=2, logits_chunk_tokens=2048, remat="none",
        scan_layers=False,
    ),
    "h200": Work(
        num_prompts=8, group_size=8, prompt_tokens=512, new_tokens=512, max_tokens=1024,
        spread=0.6, chunk_tokens=32, micro_rows=4, logits_chunk_tokens=2048, remat="none",
        scan_layers=False,
    ),
}  # fmt: skip


def make_update_sizes(work: Work) -> update.Work:
    """Return the sizes of the update's sequences, which sampling uses too."""
    return dataclasses.replace(
        update.WORK["cpu"],
        num_groups=work.num_prompts,
        group_size=work.group_size,
        prompt_tokens=work.prompt_tokens,
        new_tokens=work.new_tokens,
        spread=work.spread,
        row_tokens=work.prompt_tokens + work.max_tokens,
        micro_rows=work.micro_rows,
        logits_chunk_tokens=work.logits_chunk_tokens,
        remat=work.remat,
        scan_layers=work.scan_layers,
    )


SAMPLE, UPDATE = "sample", "update"


class JaxrlPeer:
    """Engine and update step of jaxrl."""

    def __init__(self, folder: Path, model: common.ModelSizes, work: Work):
        """Load the weights; build the objects that both tasks use."""
        mesh = self._mesh = common.make_single_device_mesh()
        self._sequences = update.make_sequences(model, make_update_sizes(work))
        num_rows = work.num_prompts * work.group_size
        sampling = rollout.Even(
            num_prompts=work.num_prompts,
            group_size=work.group_size,
            prompt_tokens=work.prompt_tokens,
            new_tokens=work.max_tokens,
            num_rows=num_rows,
            chunk_tokens=work.chunk_tokens,
            tail_rows=0,
        )
        total = work.prompt_tokens + work.max_tokens
        self._engine = rollout.make_engine(model, sampling, mesh, max_total_tokens=total)
        self._prompt_tokens = work.prompt_tokens
        params = load_hf(folder, mesh)
        config = default_config()
        config.num_steps = 1000
        config.optimizer.lr, config.loss.clip_low, config.loss.clip_high = LEARNING_RATE, CLIP, CLIP
        policy = update.make_model(model, make_update_sizes(work), mesh)
        method = self._method = build_method(resolve_names(config, needs_data=False))
        optimizer = make_optimizer(method.optimizer)
        self._update = UpdateStep(policy, make_policy_loss(method), optimizer)
        self._score = ScoreStep(policy, temperature=1.0)
        self._packed = update.make_batch(self._sequences, make_update_sizes(work))
        self._state = init_state(params, mesh, model.architecture, optimizer)

    def mean_logprob(self) -> float:
        """Compute the mean log-probability of the trained tokens, in nats."""
        packed = self._packed
        logprobs = np.asarray(self._score(self._state.params, self._put_batch(), packed))
        return float(logprobs[packed.batch.loss_mask].mean())

    def _put_batch(self) -> Any:
        params = self._state.params
        packed, mesh, method = self._packed, self._mesh, self._method
        return shard_minibatch(packed, mesh, self._score, params, None, method)

    def sample(self, number: int) -> None:
        """Sample all completions with the current weights."""
        self._engine.set_weights(self._state.params)
        prompts = [item.token_ids[: self._prompt_tokens] for item in self._sequences]
        lengths = [int(item.loss_mask.sum()) for item in self._sequences]
        rollout.sample_all(self._engine, rollout.make_requests(prompts, lengths, number))
        self._engine.release()

    def update(self, _: int) -> None:
        """Run one update step on the packed batch."""
        self._state, metrics = self._update(self._state, self._put_batch(), self._packed)
        jax.block_until_ready((self._state, metrics))


class TorchPeer:
    """transformers' `generate` and a plain torch update step."""

    def __init__(self, folder: Path, model: common.ModelSizes, work: Work):
        """Load the weights; build the objects that both tasks use."""
        import torch
        import transformers

        torch.set_num_threads(1)
        self._torch, self._transformers = torch, transformers
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._work = work
        self._sequences = update.make_sequences(model, make_update_sizes(work))
        self._advantages = np.random.default_rng(1).normal(size=len(self._sequences))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)

    def sample(self, number: int) -> None:
        """Sample all completions in one batch; finished rows are padded."""
        torch = self._torch
        torch.manual_seed(number)
        prompt_tokens = self._work.prompt_tokens
        prompts = np.stack([item.token_ids[:prompt_tokens] for item in self._sequences])
        lengths = torch.tensor([int(item.loss_mask.sum()) for item in self._sequences])

        class LengthsReached(self._transformers.StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                return input_ids.shape[1] - prompt_tokens >= lengths

        with torch.no_grad():
            out = self._model.generate(
                torch.tensor(prompts, dtype=torch.long),
                attention_mask=torch.ones(prompts.shape, dtype=torch.long),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=int(lengths.max()),
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=self._transformers.StoppingCriteriaList([LengthsReached()]),
            )
        assert out.shape[1] == prompt_tokens + int(lengths.max()), out.shape

    def _micro_batches(self) -> list[list[int]]:
        """Split the sequences into micro-batches of similar length, without packing."""
        order = sorted(
            range(len(self._sequences)), key=lambda i: -len(self._sequences[i].token_ids)
        )
        size = self._work.micro_rows
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _logprobs(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """Return padded log-probabilities and the loss mask, both from the second token on."""
        torch = self._torch
        rows = [torch.tensor(self._sequences[i].token_ids, dtype=torch.long) for i in indices]
        masks = [torch.tensor(self._sequences[i].loss_mask) for i in indices]
        pad = torch.nn.utils.rnn.pad_sequence
        ids, mask = pad(rows, batch_first=True), pad(masks, batch_first=True)
        is_token = pad([torch.ones_like(row) for row in rows], batch_first=True)
        logits = self._model(ids, attention_mask=is_token, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, dim=-1)
        return logprobs.gather(2, ids[:, 1:, None]).squeeze(2), mask[:, 1:]

    def mean_logprob(self) -> float:
        """Compute the mean log-probability of the trained tokens, in nats."""
        total, count = 0.0, 0
        with self._torch.no_grad():
            for indices in self._micro_batches():
                logprobs, mask = self._logprobs(indices)
                total, count = total + float(logprobs[mask].sum()), count + int(mask.sum())
        return total / count

    def update(self, _: int) -> None:
        """Run one update step on the clipped policy loss, averaged over all tokens."""
        torch = self._torch
        count = sum(int(item.loss_mask.sum()) for item in self._sequences)
        for indices in self._micro_batches():
            logprobs, mask = self._logprobs(indices)
            ratio = torch.exp(logprobs - logprobs.detach())
            advantages = torch.tensor(self._advantages[indices], dtype=torch.float32)[:, None]
            clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * advantages, clipped * advantages)
            (loss[mask].sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


PEERS = {"ours": JaxrlPeer, "transformers": TorchPeer}
"""Classes of the peers, by name."""


ONE_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def read_memory_field(name: str) -> int:
    """Read a field of /proc/self/status, in bytes."""
    [line] = [item for item in Path("/proc/self/status").read_text().splitlines() if name in item]
    return int(line.split()[1]) * 1024


def reset_peak() -> int | None:
    """Free unused memory and reset the peak; return the resident bytes, None if not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return read_memory_field("VmRSS")


def run_tasks(peer: Any) -> None:
    """Run a task for each input line `TASK NUMBER`; print the measurements as JSON."""
    print(json.dumps({"mean_logprob": peer.mean_logprob()}), flush=True)
    compilations = common.Compilations()
    for line in sys.stdin:
        task, number = line.split()
        num_compilations = compilations.num
        resident = reset_peak()
        started, cpu_started = time.perf_counter(), time.process_time()
        getattr(peer, task)(int(number))
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        measurements = {
            "s": seconds,
            "cpu_s": cpu_seconds,
            "extra_bytes": read_memory_field("VmHWM") - resident if resident else None,
            "peak_bytes": common.get_peak_bytes()[0],
            "num_compilations": compilations.num - num_compilations,
        }
        print(json.dumps(measurements), flush=True)


class Peer:
    """Worker process that runs `run_tasks` for a peer."""

    def __init__(self, name: str, folder: Path, flags: Sequence[str]):
        """Start the process; `first` is its first message, sent when it is ready."""
        command = [sys.executable, "-m", "benchmarks.peers", *flags]
        self._process = subprocess.Popen(
            [*command, f"--worker={name}", f"--folder={folder}"],
            env=os.environ | ONE_THREAD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = name
        self.first = self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(
            f"{self.name} ended with {self._process.wait()}; see what it wrote above"
        )

    def run_task(self, task: str, number: int) -> dict[str, float]:
        """Run a repetition of a task; return its measurements."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{task} {number}\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()


def measure_peers(
    peers: Sequence[Peer], tasks: Sequence[str], work: Work, model: Any, flags: Any
) -> dict[str, Any]:
    """Measure all peers in every repetition; return rates, and jaxrl's relative to the others."""
    sequences = update.make_sequences(model, make_update_sizes(work))
    sampled = sum(int(item.loss_mask.sum()) for item in sequences)
    counts = {SAMPLE: sampled, UPDATE: sum(len(item.token_ids) for item in sequences)}
    figures: dict[str, Any] = {peer.name: {"num_recompilations": 0} for peer in peers}
    for task in tasks:
        count = counts[task]
        seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
        extra: dict[str, list[float]] = {peer.name: [] for peer in peers}
        for number in range(flags.warm_up + flags.repetitions):
            for peer in peers:
                measured = peer.run_task(task, number)
                if number >= flags.warm_up:
                    seconds[peer.name].append(measured["cpu_s"])
                    extra[peer.name].append(measured["extra_bytes"] or math.nan)
                    figures[peer.name]["num_recompilations"] += measured["num_compilations"]
                figures[peer.name]["peak_bytes"] = measured["peak_bytes"]
        for name, times in seconds.items():
            figures[name][f"{task} tokens_per_cpu_s"] = count / statistics.median(times)
            figures[name][f"{task} extra_bytes"] = statistics.median(extra[name])
        for name in (peer.name for peer in peers[1:]):
            pairs = zip(seconds[name], seconds[peers[0].name], strict=True)
            ratios = [other / item for other, item in pairs]
            figures.setdefault(f"ours over {name}", {})[task] = common.summarize(ratios)
    return figures


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Run the benchmark and return its record, or run a worker and return None."""
    argv = sys.argv[1:] if argv is None else list(argv)
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--worker", choices=PEERS)
    first.add_argument("--folder", type=Path)
    first.add_argument("--peers", default=",".join(PEERS))
    first.add_argument("--tasks", default=f"{SAMPLE},{UPDATE}")
    peer_flags, rest = first.parse_known_args(argv)
    flags, model, work, hardware = common.parse_flags(__doc__ or "", WORK, rest)
    model = dataclasses.replace(model, dtype="float32")
    if peer_flags.worker:
        run_tasks(PEERS[peer_flags.worker](peer_flags.folder, model, work))
        return None
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name) / "model"
        save_hf(common.init_random_params(model), model.architecture, folder)
        peers = []
        for peer_name in peer_flags.peers.split(","):
            peers.append(Peer(peer_name, folder, rest))
            stack.callback(peers[-1].end)
        figures = measure_peers(peers, peer_flags.tasks.split(","), work, model, flags)
        logprobs = [peer.first["mean_logprob"] for peer in peers]
    figures["logprob_gap"] = max(logprobs) - min(logprobs)
    others = ("torch", "transformers") if "transformers" in figures else ()
    figures["peer_versions"] = common.get_package_versions(*others)
    return common.report_figures("peers", flags, model, work, hardware, figures)


if __name__ == "__main__":
    main()
