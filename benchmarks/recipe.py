r"""Compare the mean reward of a small recipe over many runs with TRL's.

    python3 -m venv runs/trl_venv
    runs/trl_venv/bin/pip install torch==2.13.0 trl==1.16.0
    taskset -c 0 python -m benchmarks.recipe --trl_python=runs/trl_venv/bin/python
    taskset -c 0 python -m benchmarks.recipe --num_seeds=3 --fault=temperature_0.7

The first command writes TRL's runs to `tests/golden/recipe.json`, then trains with jaxrl and
compares both. Without `--trl_python`, the file stays as it is. `tests/test_recipe.py` compares a
few runs of ours with the same file.

The recipe: the model has random weights and learns sums of two numbers from 0 to 3. A step has all
16 sums in random order, with 32 completions each of at most 4 tokens. The reward is F1. A run has
60 steps. The method is that of `benchmarks.trl`. All runs start from the same weights; the seed
decides the order of the sums and the samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import scipy.stats
import tokenizers
from ml_collections import ConfigDict

from benchmarks import common, trl
from benchmarks.trl_worker import read_jsonl
from examples import quickstart_world as quickstart
from jaxrl import api
from jaxrl.data.stream import Stream

GOLDEN = Path(__file__).resolve().parents[1] / "tests/golden/recipe.json"

LARGEST = 3
"""Largest number in a sum."""

WORK = trl.Work(
    num_updates=60,
    tasks_per_step=(LARGEST + 1) ** 2,
    group_size=32,
    max_prompt_tokens=4,
    max_response_tokens=4,
    micro_rows=128,
    lr=1e-3,
    recomputes=False,
)

WINDOW = 10
"""Number of steps over which rewards are averaged in the records."""

FALSE_ALARM_RATE = 0.01
"""Probability that runs with the same distribution as TRL's have a mean outside the band."""

FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "lr_x3": {"optimizer.lr": 3 * WORK.lr},
    "lr_/3": {"optimizer.lr": WORK.lr / 3},
    "temperature_0.7": {"rollout.temperature": 0.7},
    "no_grad_clip": {"optimizer.grad_clip": 0.0},
    "no_std": {"advantage.grpo.normalize_std": False},
    "sequence_mean": {"loss.aggregation": "seq-mean-token-mean"},
    "no_baseline": {"advantage.name": "benchmarks.recipe.keep_rewards"},
    "sign": {"advantage.name": "benchmarks.recipe.negate_rewards"},
    "no_last_token": {"loss.token_filter.name": "benchmarks.recipe.drop_last_token"},
}
"""Changes of our configuration, to see which faults the comparison detects."""

# Sums have no roles or special tokens, so that no sampled token reads differently in a trainer.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' =' }}{% endif %}"
)


def keep_rewards(rewards: jnp.ndarray) -> jnp.ndarray:
    """Return the rewards as advantages."""
    return rewards


def negate_rewards(rewards: jnp.ndarray) -> jnp.ndarray:
    """Return advantages with the wrong sign."""
    return rewards.mean() - rewards


def drop_last_token(loss_mask: jnp.ndarray, positions: jnp.ndarray) -> jnp.ndarray:
    """Return True for sampled tokens except the last of each trajectory, bool [R, T]."""
    continues = loss_mask[:, 1:] & (positions[:, 1:] == positions[:, :-1] + 1)
    return jnp.pad(continues, ((0, 0), (0, 1)))


def make_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer that knows digits and the two signs, with and without a space before."""
    symbols = [*map(str, range(10)), "+", "="]
    texts = ["Ġ", *symbols, *(f"Ġ{symbol}" for symbol in symbols)]  # Ġ is a space
    merges = [("Ġ", symbol) for symbol in symbols]
    bpe = tokenizers.models.BPE({text: id for id, text in enumerate(texts)}, merges)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([quickstart.END_OF_TURN])
    return tokenizer


def write_world(folder: Path) -> None:
    """Write the tasks to FOLDER/train.jsonl and the model to FOLDER/model."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    tasks = [
        {
            "id": f"{a} + {b}",
            "messages": [{"role": "user", "content": f"{a} + {b}"}],
            "answers": [str(a + b)],
        }
        for a, b in itertools.product(range(LARGEST + 1), repeat=2)
    ]
    quickstart.write_jsonl(folder / "train.jsonl", tasks)
    # The vocabulary has no unused ids, and padding is the end of a turn: our sampler never samples
    # an unused id, and TRL ends a response only at the end of a turn.
    tokenizer = make_tokenizer()
    end = tokenizer.token_to_id(quickstart.END_OF_TURN)
    config = quickstart.make_model_config(tokenizer)
    config |= {"vocab_size": tokenizer.get_vocab_size(), "pad_token_id": end}
    texts = {"pad_token": quickstart.END_OF_TURN, "chat_template": CHAT_TEMPLATE}
    quickstart.write_json(model / "config.json", config)
    quickstart.write_json(
        model / "generation_config.json", {"eos_token_id": end, "pad_token_id": end}
    )
    quickstart.write_json(
        model / "tokenizer_config.json", quickstart.make_tokenizer_config() | texts
    )
    tokenizer.save(str(model / "tokenizer.json"))
    weights = quickstart.init_weights(config, np.random.default_rng(0))
    safetensors.numpy.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def get_config(world: Path, seed: int) -> ConfigDict:
    """Return our configuration, with the method of `benchmarks.trl`."""
    work = dataclasses.replace(WORK, seed=seed)
    config = trl.get_config(world, str(world / "model"), work)
    config.stages = ("train",)
    config.tasks.eval.source = config.tasks.train.source  # never evaluated
    config.log.trajectories = 0
    return config


def run_jaxrl(config: ConfigDict, workdir: Path) -> list[float]:
    """Train with jaxrl; return the mean reward of each step."""
    api.train(config, workdir)
    records = read_jsonl(workdir / "metrics.jsonl")
    name = "critic/rewards/mean"
    return [record[name] for record in records if name in record]


def run_trl(python: str, world: Path, out: Path, seed: int) -> tuple[list[float], dict[str, str]]:
    """Train with TRL; return the mean reward of each step, and the versions of packages."""
    work = dataclasses.replace(WORK, seed=seed)
    out.mkdir(parents=True)
    settings = {"model": str(world / "model")} | dataclasses.asdict(work)
    (out / "settings.json").write_text(json.dumps(settings))
    tasks = Stream(read_jsonl(world / "train.jsonl"), seed=seed)
    in_order = tasks.get_items(0, work.num_updates * work.tasks_per_step)
    quickstart.write_jsonl(out / "tasks_in_order.jsonl", in_order)
    worker = trl.Worker([python, "-m", "benchmarks.trl_worker", str(out)])
    worker.read()
    for _ in range(work.num_updates):
        worker.step()
    result = worker.read()
    worker.join()
    return [item["reward"] for item in result["log"]], result["versions"]


def summarize(seed: int, rewards: Sequence[float]) -> dict[str, Any]:
    """Return the record of a run."""
    assert len(rewards) == WORK.num_updates
    windows = np.reshape(rewards, (-1, WINDOW)).mean(axis=1)
    return {
        "seed": seed,
        "mean_reward": round(statistics.fmean(rewards), 4),
        "by_window": [round(float(mean), 3) for mean in windows],
    }


def compute_band(means: Sequence[float], num_runs: int) -> tuple[float, float]:
    """Return the prediction interval for the mean of `num_runs` other runs.

    Student's t interval for normal means with a common variance: a mean outside has probability
    `FALSE_ALARM_RATE`.
    """
    t = scipy.stats.t.ppf(1 - FALSE_ALARM_RATE / 2, len(means) - 1)
    radius = t * statistics.stdev(means) * math.sqrt(1 / num_runs + 1 / len(means))
    center = statistics.fmean(means)
    return center - radius, center + radius


def compare(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Format both distributions of mean rewards, the band and two-sample tests."""
    low, high = compute_band(theirs, len(ours))
    mean = statistics.fmean(ours)
    lines = [
        f"{name}: {statistics.fmean(means):.4f} ± {statistics.stdev(means):.4f} ({len(means)} runs)"
        for name, means in (("jaxrl", ours), ("TRL", theirs))
    ]
    lines.append(
        f"band for {len(ours)} runs: {low:.4f} to {high:.4f}; "
        f"{'inside' if low <= mean <= high else 'outside'}"
    )
    welch = scipy.stats.ttest_ind(ours, theirs, equal_var=False).pvalue
    ranks = scipy.stats.mannwhitneyu(ours, theirs).pvalue
    lines.append(f"p = {welch:.3f} (Welch's t-test), p = {ranks:.3f} (Mann-Whitney test)")
    return "\n".join(lines)


def write_golden(python: str, world: Path, out: Path, num_seeds: int) -> None:
    """Train with TRL and write the records of its runs to `GOLDEN`."""
    runs, versions = [], {}
    for seed in range(num_seeds):
        rewards, versions = run_trl(python, world, out / f"trl_{seed}", seed)
        runs.append(summarize(seed, rewards))
        print("TRL", json.dumps(runs[-1]), flush=True)
    record = {
        "command": f"python -m benchmarks.recipe --trl_python=PYTHON --num_trl_seeds={num_seeds}",
        "versions": versions,
        "recipe": dataclasses.asdict(WORK),
        "runs": runs,
    }
    GOLDEN.write_text(format_golden(record))


def format_golden(record: Mapping[str, Any]) -> str:
    """Format the record as JSON with one run per line."""
    *fields, runs = record.values()
    lines = [f'  "{name}": {json.dumps(f)},' for name, f in zip(record, fields, strict=False)]
    rows = ",\n".join(f"    {json.dumps(run)}" for run in runs)
    return "\n".join(["{", *lines, '  "runs": [', rows, "  ]", "}"]) + "\n"


def read_trl_means() -> list[float]:
    """Read the mean rewards of TRL's runs."""
    return [run["mean_reward"] for run in json.loads(GOLDEN.read_text())["runs"]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl_python", help="Python that has trl; rewrites the golden file")
    parser.add_argument("--num_trl_seeds", type=int, default=12)
    parser.add_argument("--num_seeds", type=int, default=8, help="runs of jaxrl; 0: none")
    parser.add_argument("--fault", choices=FAULTS, default="none", help="fault in jaxrl's runs")
    parser.add_argument("--out", type=Path, default=Path("runs/recipe"), help="new folder")
    flags = parser.parse_args(argv)
    if flags.out.exists():
        parser.error(f"{flags.out} exists; set --out to a new folder")
    world = flags.out / "world"
    write_world(world)
    if flags.trl_python:
        write_golden(flags.trl_python, world, flags.out, flags.num_trl_seeds)
    means = []
    for seed in range(flags.num_seeds):
        config = get_config(world, seed)
        config.update_from_flattened_dict(FAULTS[flags.fault])
        config.compilation_cache = ""
        record = summarize(seed, run_jaxrl(config, flags.out / f"jaxrl_{seed}"))
        means.append(record["mean_reward"])
        print("jaxrl", json.dumps(record), flush=True)
    if len(means) > 1:
        print(compare(means, read_trl_means()))
        versions = common.get_package_versions("jax", "jaxlib")
        print(", ".join(f"{name} {version}" for name, version in versions.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
