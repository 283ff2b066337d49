"""Compare short runs of two revisions, bit for bit: has a change left all numbers as they were?

    python -m benchmarks.same_numbers --before=HEAD~1

Checks out the revision, runs short runs of the small configurations in both trees, each by the
command that a user gives, and compares: every record of `metrics.jsonl` but what was timed, every
evaluation, every logged trajectory, every exported weight, and of every checkpoint the arrays,
moments of the optimizer included, and the position. The runs of a revision are kept in `--out` and
not made again; those of the working tree always are. Each line tells the processor time of both.
Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.same_numbers_own import served

ROOT = Path(__file__).parents[1]
TIMED = (
    *("timing_s/", "perf/throughput", "perf/max_memory_gib", "perf/search/", "perf/ledger/"),
    "ledger",  # counted in another way since costs have counters alone
)
"""Heads of metrics that the clock, the machine or a server decides, and of costs."""
OF_A_START = (*TIMED, "perf/")
"""Heads of those, and of counts that begin anew in each process: programs, hits of caches."""


OLD_KEYS = {
    "rollout.async_level": "rollout.ahead",
    "rollout.max_num_seqs": "rollout.num_rows",
    "kl.apply_to": "kl.place",
    "loss.token_filter": "loss.gate",
}
"""Earlier names of keys, for revisions that have these."""
OLD_POSITION = {
    "buffered_groups": "leftover",
    "in_flight_tasks": "unfinished",
    "prefetched": "pending",
}
"""Earlier names of a checkpoint's position."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A short run. In its settings `{world}`, `{workdir}` and `{endpoint}` stand for places."""

    world: str  # module that makes it
    config: str  # file in configs/
    flags: tuple[str, ...] = ()  # of the world
    settings: tuple[str, ...] = ("num_steps=3",)  # of the run
    needs_warm_start: bool = True  # trained before by the revision; else all stages are run
    # Most of a run that is as small as can be is compilation, and what is compiled with fewer
    # passes of XLA computes the same program. False where many steps are taken.
    compiles_quickly: bool = True
    stopped_at: int = 0  # first run to this step, then on to its end; 0: run in one go


# The smallest world in which a model learns to search within seconds, and steps in it. Rows are
# few, trajectories short, evaluations none but the last: each number of rows or of pages and
# each way of sampling is a compilation.
SMALL = ("--num_people=40", "--num_held_out=8", "--num_demonstrations=400")
SHORT = (
    *("num_steps=3", "rollout.tasks_per_step=4", "rollout.group_size=4", "rollout.max_num_seqs=4"),
    *("rollout.max_response_tokens=40", "rollout.max_observation_tokens=24"),
    "rollout.max_total_tokens=112",
    *("eval.suites=()", "eval.final_suites=('sampled',)", "eval.max_tasks=4", "model.remat=none"),
)
# So that a warm start takes seconds too, in configurations that are not as small as debug_tiny.py.
SHORT_SFT = ("sft.num_steps=60", "sft.batch_size=8", "sft.optimizer.lr=1e-2")
OF_FORMAT = "reward.weights={'exact_match': 1.0, 'format': 0.5}"  # hardly an answer is right


def small(*settings: str, **others: Any) -> Case:
    """Three steps of a model with a warm start of seconds, which all such cases share."""
    return Case(
        world="examples.quickstart_world",
        config="debug_tiny.py",
        flags=SMALL,
        settings=(*SHORT, *settings),
        **others,
    )


def method(world: str, config: str) -> Case:
    """Three steps of the small configuration of a method."""
    return Case(world=world, config=config, compiles_quickly=False)


CASES = {
    # The commands of the first page, optimised as a user has them.
    "debug": Case(
        world="examples.quickstart_world",
        config="debug_tiny.py",
        flags=SMALL,
        settings=(),
        needs_warm_start=False,
        compiles_quickly=False,
    ),
    "search_r1": method("examples.quickstart_world", "search_r1_small.py"),
    "dapo": method("examples.math_world", "dapo_small.py"),
    "ares": method("examples.math_world", "ares_small.py"),
    "bapo": method("examples.bapo_world", "bapo_small.py"),
    "passk": method("examples.puzzle_world", "passk_small.py"),
    # Pictures in the warm start, in episodes that search, in updates, and blank in an evaluation.
    "images": Case(
        world="examples.looking_world",
        config="seeking.py",
        flags=("--kind=seeking", "--num_train=64", "--num_held_out=8", "--num_demonstrations=400"),
        settings=(
            *(*SHORT, *SHORT_SFT, OF_FORMAT, "optimizer.micro_rows=4"),
            *("sft.optimizer.micro_rows=4", "eval.final_suites=('sampled', 'blank_images')"),
        ),
        needs_warm_start=False,
    ),
    # An adapter on a base in eight bits, its reference the base alone.
    "lora": small(
        *("model.lora.rank=4", "model.lora.alpha=16.0", "model.lora.base_dtype=int8"),
        *("model.lora.targets=('q_proj', 'o', 'mlp/up', 'down_proj')", "kl.coef=0.01"),
    ),
    # Ratios of sequences, the sampler's experts in the update, a loss that balances them in both
    # stages. The second update of a step has other weights than those that chose. One step will do:
    # a further one is of other lengths, and compiling an update takes ten times as long as it.
    "experts": Case(
        world="examples.quickstart_world",
        config="search_moe_small.py",
        flags=(*SMALL, "--num_experts=4"),
        settings=(
            *(*SHORT, *SHORT_SFT, OF_FORMAT, "model.balance_coef=0.01"),
            *("num_steps=1", "optimizer.num_epochs=2"),
        ),
        needs_warm_start=False,
    ),
    # Both engines fused, the vectors in eight bits. The encoder is the world's own model, random
    # weights and all: by them it ranks one document before another as firmly as a trained one. Each
    # run has an index of its own, or the second tree would find that of the first.
    "hybrid": small(
        *("search.engine=hybrid", "search.dense.dtype=int8", "search.dense.pooling=mean"),
        *("search.dense.corpus={world}/corpus.jsonl", "search.dense.encoder={world}/model"),
        *("search.dense.query_prefix=query: ", "search.dense.passage_prefix=passage: "),
        *("search.dense.index={workdir}/index", "search.local.index={workdir}/index"),
        "search.local.corpus=",
    ),
    # A judge's score and the comparison as mathematics in the reward. The model may call Python,
    # which it was not taught: what is tested of that is where its turns end.
    "judge": small(
        "reward.judges={'helpful': {'url': '{endpoint}', 'model': 'judge', "
        "'prompt': 'Rate {response}'}}",
        "reward.weights={'exact_match': 1.0, 'format': 0.5, 'helpful': 0.5, 'math_verify': 1.0}",
        *("reward.math_verify.workers=1", "env.search.tools=('python',)"),
    ),
    # A model behind an endpoint, which calls tools beside the search: Python and a function.
    "endpoint": small(
        *("stages=('evaluate',)", "model.path={world}/model", "policy.name=openai"),
        *("policy.openai.url={endpoint}", "policy.openai.model=policy", "eval.samples=2"),
        *("env.search.tools=('python', 'same_numbers_own.shout')", "rollout.max_turns=3"),
        *("rollout.max_response_tokens=200", "rollout.max_total_tokens=600", "eval.max_tasks=8"),
        "rollout.max_observation_tokens=72",
        "eval.final_suites=('sampled', 'greedy', 'empty_search')",
        needs_warm_start=False,
    ),
    # Groups that wait in a checkpoint for the next step, and importance weights for them.
    "ahead": small(
        *("rollout.async_level=1", "loss.correction.level=token", "checkpoint.every_steps=1"),
        "kl.coef=0.01",
    ),
    # Four updates a step, a KL coefficient that moves, a rate that falls, a filter.
    "updates": small(
        *("optimizer.num_minibatches=2", "optimizer.num_epochs=2", "optimizer.schedule=cosine"),
        *(
            "kl.coef=0.1",
            "kl.controller=adaptive",
            "kl.adaptive.target=0.001",
            "kl.apply_to=reward",
        ),
        "kl.estimator=k1",
        *("kl.adaptive.horizon=16", "checkpoint.every_steps=1", "filter.name=varied"),
        *("filter.varied.metric=score", "filter.carry_over=True", "advantage.name=rloo"),
    ),
    # Stopped after two steps and continued; compared with the same in one go as well, which is
    # evaluated where the other one has its last step for the time being.
    "resumed": small(
        *("num_steps=4", "checkpoint.every_steps=1", "kl.coef=0.01"),
        *("eval.every_steps=2", "eval.suites=('sampled',)"),
        stopped_at=2,
    ),
}


def with_keys_of(tree: Path, case: Case) -> Case:
    """Return the case with the names that keys have in a tree."""
    files = [path for path in (tree / "jaxrl").rglob("*.py") if "config" in str(path)]
    schema = "".join(path.read_text(encoding="utf-8") for path in files)
    settings = []
    for setting in case.settings:
        for new, old in OLD_KEYS.items():
            if setting.startswith(new) and f'"{new}' not in schema:
                setting = old + setting.removeprefix(new)
        settings.append(setting)
    return replace(case, settings=tuple(settings))


def run(
    tree: Path, module: str, *arguments: str, out: Path, compiles_quickly: bool = False
) -> None:
    """Runs a module of a tree; its output is shown where it fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}{os.pathsep}{Path(__file__).parent}",
        "JAX_PLATFORMS": "cpu",
        # Also of programs that compile quickly: the second tree finds most of the first one's.
        "JAX_COMPILATION_CACHE_DIR": str(out / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(compiles_quickly).lower(),
    }
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} in {tree}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def prepare(before: Path, out: Path, case: Case) -> tuple[Path, Path | None]:
    """The world of a case and its warm start, made by the revision, each once."""
    name = "_".join((case.world.rpartition(".")[2], *case.flags)).replace("--", "")
    world = out / "worlds" / name
    if not (world / "finished").exists():
        run(before, case.world, f"--out={world}", "--seed=0", *case.flags, out=out)
        (world / "finished").touch()
    if not case.needs_warm_start:
        return world, None
    warm_start = out / "warm_starts" / f"{Path(case.config).stem}_{name}"
    if not (warm_start / "export" / "config.json").exists():
        config = f"--config=configs/{case.config}:{world}"
        stages = "--config.stages=('sft',)"
        run(before, "jaxrl.launch", config, stages, f"--workdir={warm_start}", out=out)
    return world, warm_start / "export"


def train(
    tree: Path, case: Case, world: Path, model: Path | None, workdir: Path, out: Path
) -> float:
    """The short run of a case, from nothing; returns its processor time in seconds."""
    shutil.rmtree(workdir, ignore_errors=True)
    case = with_keys_of(tree, case)
    settings = dict(text.split("=", 1) for text in case.settings)  # the last of a key counts
    if model is not None:
        given = {"model.path": str(model), "stages": "('train', 'evaluate')"}
        settings = given | settings
    starts = [settings]
    if case.stopped_at:
        # As its own last step, which is always the same one; a signal finds a run somewhere.
        only = {"num_steps": str(case.stopped_at), "stages": "('train',)"}
        starts.insert(0, settings | only)
    before = processor_s()
    with served() as endpoint:
        places = {"{world}": str(world), "{workdir}": str(workdir), "{endpoint}": endpoint}
        for start in starts:
            arguments = [f"--config=configs/{case.config}:{world}", f"--workdir={workdir}"]
            for key, value in start.items():
                for name, place in places.items():
                    value = value.replace(name, place)
                arguments.append(f"--config.{key}={value}")
            quickly = case.compiles_quickly
            run(tree, "jaxrl.launch", *arguments, out=out, compiles_quickly=quickly)
    return processor_s() - before


def processor_s() -> float:
    """Seconds that all ended children of this process computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def differences(before: Path, after: Path, left_out: tuple[str, ...] = TIMED) -> Iterator[str]:
    """Differences between two runs; metrics whose names begin with one of `left_out` are not."""
    metrics = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (before, after)
    ]
    if len(metrics[0]) != len(metrics[1]):
        yield f"{len(metrics[0])} records before, {len(metrics[1])} after"
    for old, new in zip(*metrics, strict=False):
        for key in sorted(old.keys() | new.keys()):
            if not key.startswith(left_out) and old.get(key, "absent") != new.get(key, "absent"):
                place = f"step {old['step']} ({old['stage']})"
                yield f"{place}: {key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
    patterns = ("eval/*.json", "trajectories/*.jsonl", "*/*.safetensors", "checkpoints/[0-9]*")
    for pattern in patterns:
        names = {p.relative_to(f) for f in (before, after) for p in f.glob(pattern)}
        for path in sorted(names):
            if not (before / path).exists() or not (after / path).exists():
                yield f"{path} is in one of the two only"
                continue
            old, new = content(before / path), content(after / path)
            if not isinstance(old, dict):
                old, new = {"": old}, {"": new}
            for part in sorted(old.keys() | new.keys()):
                if part not in old or part not in new or old[part] != new[part]:
                    yield f"{path} differs{part and ': '}{part}"


def content(path: Path) -> Any:
    """Content of a file or a checkpoint as it is compared: arrays as bytes, nothing timed."""
    if path.is_dir():
        # Orbax's own files hold the time too, so the arrays are read.
        reader = ocp.StandardCheckpointer()
        values: dict[str, Any] = {}
        for folder in sorted(path.iterdir()):
            if folder.name == "position":
                saved = json.loads((folder / "metadata").read_text(encoding="utf-8"))
                # Paths are in the configuration, times in the record.
                gone = ("schedule", "num_broken_off")  # of calibration, and of lost groups
                left_out = ("config", "contents", "record", *gone)
                names = {old: new for new, old in OLD_POSITION.items()}
                kept = {names.get(k, k): v for k, v in saved.items() if k not in left_out}
                values |= {f"position/{name}": value for name, value in untimed(kept).items()}
            elif folder.is_dir():
                leaves = jax.tree_util.tree_leaves_with_path(reader.restore(folder))
                for place, leaf in leaves:
                    array = np.asarray(leaf)
                    name = f"{folder.name}{jax.tree_util.keystr(place)}"
                    values[name] = (array.dtype, array.shape, array.tobytes())
        return values
    if path.suffix == ".safetensors":
        return path.read_bytes()
    return [untimed(json.loads(text)) for text in lines_of(path)]


def lines_of(path: Path) -> Sequence[str]:
    text = path.read_text(encoding="utf-8")
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def untimed(value: Any) -> Any:
    """A JSON value without what clock and caches decide, and without the settings' fingerprint."""
    if isinstance(value, dict):
        left_out = ("latency_s", "waited_s", "source", "attempts", "records", "usage")
        left_out += ("made_with", "settings")
        return {
            key: untimed(inner)
            for key, inner in value.items()
            if key not in left_out and not key.startswith(TIMED)
        }
    return [untimed(inner) for inner in value] if isinstance(value, list) else value


def check_out(revision: str, out: Path) -> Path:
    """A tree of the revision."""
    name = subprocess.check_output(["git", "rev-parse", revision], cwd=ROOT, text=True).strip()
    tree = out / name[:12] / "tree"
    if not tree.exists():
        tree.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "archive", name], cwd=ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    return tree


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", default="HEAD", help="revision; default: HEAD")
    parser.add_argument("--out", type=Path, default=Path("runs/same_numbers"))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    args = parser.parse_args(argv)
    out = args.out.resolve()
    before = check_out(args.before, out)
    has_changed = False
    for name in args.cases:
        case = CASES[name]
        world, model = prepare(before, out, case)
        old, new = before.parent / name, out / "after" / name
        # The case as it was when the revision ran it, and the seconds that this took.
        known, made_as = old / "made.json", repr(with_keys_of(before, case))
        if not known.exists() or json.loads(known.read_text())["case"] != made_as:
            taken = train(before, case, world, model, old, out)
            known.write_text(json.dumps({"case": made_as, "processor_s": taken}))
        seconds = [json.loads(known.read_text())["processor_s"]]
        seconds.append(train(ROOT, case, world, model, new, out))
        changes = list(itertools.islice(differences(old, new), 20))
        if case.stopped_at:
            whole = out / "after" / f"{name}_in_one_go"
            seconds.append(train(ROOT, replace(case, stopped_at=0), world, model, whole, out))
            of_break = itertools.islice(differences(whole, new, OF_A_START), 20)
            changes += [f"unlike in one go: {text}" for text in of_break]
        has_changed |= bool(changes)
        taken_by_each = ", ".join(f"{one:.0f}" for one in seconds)
        told = f"{name}: {'differs' if changes else 'the same'} (processor: {taken_by_each} s)"
        print(told, *changes, sep="\n  ", flush=True)
    sys.exit(int(has_changed))


if __name__ == "__main__":
    main()
