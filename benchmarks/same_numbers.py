"""Compare short runs of two revisions, bit for bit.

    python -m benchmarks.same_numbers --before=HEAD~1

This checks out the revision, executes short runs of the small configurations in both trees with the
user's command, and compares all records of `metrics.jsonl` except timings, all evaluations, logged
trajectories and exported weights, and the arrays (with optimizer moments) and positions of all
checkpoints. Runs of the revision are cached in `--out`; those of the working tree are always
repeated. Each line reports the CPU time of both. The exit code is 1 if anything differs.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.same_numbers_stubs import serve_stub

ROOT = Path(__file__).parents[1]
VOLATILE_METRICS = (
    *("timing_s/", "perf/throughput", "perf/max_memory_gib", "perf/search/", "perf/ledger/"),
    "perf/micro_rows",  # depends on free memory where it is automatic
    "ledger",  # counted differently in old revisions
)
"""Prefixes of metrics that depend on the clock, the machine or a server, or count costs."""
PER_PROCESS_METRICS = (*VOLATILE_METRICS, "perf/")
"""The same prefixes, and that of counts that restart in each process, such as cache hits."""


OLD_KEYS = {
    "rollout.async_level": "rollout.ahead",
    "rollout.max_num_seqs": "rollout.num_rows",
    "filter.key": "filter.varied.metric",
    "kl.apply_to": "kl.place",
    "loss.token_filter": "loss.gate",
    "shaping.centered_gain": "shaping.centred_gain",
}
"""Names of config keys in older revisions, by current name."""
OLD_POSITION = {
    "buffered_groups": "leftover",
    "in_flight_tasks": "unfinished",
    "prefetched": "pending",
    "sampled_stats": "tried",
}
"""Names in older revisions of fields in a checkpoint's position, by current name."""
NEW_FIELDS = ("num_failed", "result_index", "micro_rows", "compiled_sizes", "sizes_in_use")
"""Fields of records and positions that older revisions do not write."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A short run. Settings may contain `{world}`, `{workdir}` and `{endpoint}`."""

    world: str  # module that generates the world
    config: str  # file in configs/
    flags: tuple[str, ...] = ()  # flags of the world
    settings: tuple[str, ...] = ("num_steps=3",)  # settings of the run
    needs_warm_start: bool = True  # start from the old revision's model; False to run all stages
    # Disable most XLA optimizations, since tiny runs mostly compile. False for long runs.
    compiles_quickly: bool = True
    stop_step: int = 0  # stop after this step, then resume; 0: do not stop


# The smallest world in which a model learns to search within seconds, and the settings of a short
# run: few rows, short trajectories and only a final evaluation, because every number of rows or
# pages and every sampling kind needs a compilation.
SMALL = ("--num_people=40", "--num_held_out=8", "--num_demonstrations=400")
SHORT = (
    *("num_steps=3", "rollout.tasks_per_step=4", "rollout.group_size=4", "rollout.max_num_seqs=4"),
    *("rollout.max_response_tokens=40", "rollout.max_observation_tokens=24"),
    "rollout.max_total_tokens=112",
    *("eval.suites=()", "eval.final_suites=('sampled',)", "eval.max_tasks=4", "model.remat=none"),
)
# Makes the warm start take seconds in configurations larger than debug_tiny.py.
SHORT_SFT = ("sft.num_steps=60", "sft.batch_size=8", "sft.optimizer.lr=1e-2")
FORMAT_REWARD = "reward.weights={'exact_match': 1.0, 'format': 0.5}"  # almost no answer is right


def make_quick_case(*settings: str, **others: Any) -> Case:
    """Return a case of three steps after a quick warm start, which all of these cases share."""
    return Case(
        world="examples.quickstart_world",
        config="debug_tiny.py",
        flags=SMALL,
        settings=(*SHORT, *settings),
        **others,
    )


def make_method_case(world: str, config: str) -> Case:
    """Return a case of three steps with the small configuration of a method."""
    return Case(world=world, config=config, compiles_quickly=False)


CASES = {
    # All stages of the debug run, with full compiler optimization as users have it.
    "debug": Case(
        world="examples.quickstart_world",
        config="debug_tiny.py",
        flags=SMALL,
        settings=(),
        needs_warm_start=False,
        compiles_quickly=False,
    ),
    "search_r1": make_method_case("examples.quickstart_world", "search_r1_small.py"),
    "dapo": make_method_case("examples.math_world", "dapo_small.py"),
    "ares": make_method_case("examples.math_world", "ares_small.py"),
    "bapo": make_method_case("examples.bapo_world", "bapo_small.py"),
    "passk": make_method_case("examples.puzzle_world", "passk_small.py"),
    # Images in the warm start, in searching episodes, in updates, and blank in an evaluation.
    "images": Case(
        world="examples.looking_world",
        config="seeking.py",
        flags=("--kind=seeking", "--num_train=64", "--num_held_out=8", "--num_demonstrations=400"),
        settings=(
            *(*SHORT, *SHORT_SFT, FORMAT_REWARD, "optimizer.micro_rows=4"),
            *("sft.optimizer.micro_rows=4", "eval.final_suites=('sampled', 'blank_images')"),
        ),
        needs_warm_start=False,
    ),
    # LoRA on an int8 base, with the base as the reference.
    "lora": make_quick_case(
        *("model.lora.rank=4", "model.lora.alpha=16.0", "model.lora.base_dtype=int8"),
        *("model.lora.targets=('q_proj', 'o', 'mlp/up', 'down_proj')", "kl.coef=0.01"),
    ),
    # Sequence-level ratios, routing replay from the sampler, and load balancing in both stages. In
    # the second update, the weights differ from those that selected the experts. One step is
    # enough: a second one has other lengths, and compiling an update takes ten times its run time.
    "experts": Case(
        world="examples.quickstart_world",
        config="search_moe_small.py",
        flags=(*SMALL, "--num_experts=4"),
        settings=(
            *(*SHORT, *SHORT_SFT, FORMAT_REWARD, "model.balance_coef=0.01"),
            *("num_steps=1", "optimizer.num_epochs=2"),
        ),
        needs_warm_start=False,
    ),
    # Both engines fused, with int8 vectors. The encoder is the world's model with random weights,
    # whose ranking is also deterministic. Each run builds an index, so that the second tree does
    # not reuse the first one's.
    "hybrid": make_quick_case(
        *("search.engine=hybrid", "search.dense.dtype=int8", "search.dense.pooling=mean"),
        *("search.dense.corpus={world}/corpus.jsonl", "search.dense.encoder={world}/model"),
        *("search.dense.query_prefix=query: ", "search.dense.passage_prefix=passage: "),
        *("search.dense.index={workdir}/index", "search.local.index={workdir}/index"),
        "search.local.corpus=",
    ),
    # A judge's score and math verification in the reward. The model was not trained to call
    # Python, so that tool only tests where turns end.
    "judge": make_quick_case(
        "reward.judges={'helpful': {'url': '{endpoint}', 'model': 'judge', "
        "'prompt': 'Rate {response}'}}",
        "reward.weights={'exact_match': 1.0, 'format': 0.5, 'helpful': 0.5, 'math_verify': 1.0}",
        *("reward.math_verify.workers=1", "env.search.tools=('python',)"),
    ),
    # A model behind an endpoint, which calls search, Python and a function.
    "endpoint": make_quick_case(
        *("stages=('evaluate',)", "model.path={world}/model", "policy.name=openai"),
        *("policy.openai.url={endpoint}", "policy.openai.model=policy", "eval.samples=2"),
        *("env.search.tools=('python', 'same_numbers_stubs.shout')", "rollout.max_turns=3"),
        *("rollout.max_response_tokens=200", "rollout.max_total_tokens=600", "eval.max_tasks=8"),
        "rollout.max_observation_tokens=72",
        "eval.final_suites=('sampled', 'greedy', 'empty_search')",
        needs_warm_start=False,
    ),
    # Groups buffered in a checkpoint for the next step, with importance weights.
    "ahead": make_quick_case(
        *("rollout.async_level=1", "loss.correction.level=token", "checkpoint.every_steps=1"),
        "kl.coef=0.01",
    ),
    # Four updates per step, an adaptive KL coefficient, a decaying learning rate, a filter.
    "updates": make_quick_case(
        *("optimizer.num_minibatches=2", "optimizer.num_epochs=2", "optimizer.schedule=cosine"),
        *(
            "kl.coef=0.1",
            "kl.controller=adaptive",
            "kl.adaptive.target=0.001",
            "kl.apply_to=reward",
        ),
        "kl.estimator=k1",
        *("kl.adaptive.horizon=16", "checkpoint.every_steps=1", "filter.name=varied"),
        *("filter.key=score", "filter.carry_over=True", "advantage.name=rloo"),
    ),
    # Stopped after two steps and resumed; also compared with an uninterrupted run, which evaluates
    # at the step at which the first run stops.
    "resumed": make_quick_case(
        *("num_steps=4", "checkpoint.every_steps=1", "kl.coef=0.01"),
        *("eval.every_steps=2", "eval.suites=('sampled',)"),
        stop_step=2,
    ),
}


def use_tree_keys(tree: Path, case: Case) -> Case:
    """Rename the keys of a case to those that a tree uses."""
    files = [path for path in (tree / "jaxrl").rglob("*.py") if "config" in str(path)]
    schema = "".join(path.read_text(encoding="utf-8") for path in files)
    settings = []
    for setting in case.settings:
        for new, old in OLD_KEYS.items():
            if setting.startswith(new) and f'"{new}' not in schema:
                setting = old + setting.removeprefix(new)
        settings.append(setting)
    return replace(case, settings=tuple(settings))


def run_module(
    tree: Path, module: str, *arguments: str, out: Path, compiles_quickly: bool = False
) -> None:
    """Run a module of a tree. If it fails, exit with its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}{os.pathsep}{Path(__file__).parent}",
        "JAX_PLATFORMS": "cpu",
        # Cache quick compilations too: the second tree reuses most of them.
        "JAX_COMPILATION_CACHE_DIR": str(out / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(compiles_quickly).lower(),
    }
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} in {tree}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def prepare_world(before: Path, out: Path, case: Case) -> tuple[Path, Path | None]:
    """Generate the world of a case and its warm start once, with the old revision."""
    name = "_".join((case.world.rpartition(".")[2], *case.flags)).replace("--", "")
    world = out / "worlds" / name
    if not (world / "finished").exists():
        run_module(before, case.world, f"--out={world}", "--seed=0", *case.flags, out=out)
        (world / "finished").touch()
    if not case.needs_warm_start:
        return world, None
    warm_start = out / "warm_starts" / f"{Path(case.config).stem}_{name}"
    if not (warm_start / "export" / "config.json").exists():
        config = f"--config=configs/{case.config}:{world}"
        stages = "--config.stages=('sft',)"
        run_module(before, "jaxrl.launch", config, stages, f"--workdir={warm_start}", out=out)
    return world, warm_start / "export"


def run_case(
    tree: Path, case: Case, world: Path, model: Path | None, workdir: Path, out: Path
) -> float:
    """Run a case from scratch; return its CPU time in seconds."""
    shutil.rmtree(workdir, ignore_errors=True)
    case = use_tree_keys(tree, case)
    settings = dict(text.split("=", 1) for text in case.settings)  # the last value of a key wins
    if model is not None:
        warm_start_settings = {"model.path": str(model), "stages": "('train', 'evaluate')"}
        settings = warm_start_settings | settings
    launches = [settings]
    if case.stop_step:
        # Stop with `num_steps`, since a signal would stop at an unpredictable step.
        first_settings = {"num_steps": str(case.stop_step), "stages": "('train',)"}
        launches.insert(0, settings | first_settings)
    before = measure_child_cpu_s()
    with serve_stub() as endpoint:
        placeholders = {"{world}": str(world), "{workdir}": str(workdir), "{endpoint}": endpoint}
        for launch_settings in launches:
            arguments = [f"--config=configs/{case.config}:{world}", f"--workdir={workdir}"]
            for key, value in launch_settings.items():
                for name, location in placeholders.items():
                    value = value.replace(name, location)
                arguments.append(f"--config.{key}={value}")
            is_quick = case.compiles_quickly
            run_module(tree, "jaxrl.launch", *arguments, out=out, compiles_quickly=is_quick)
    return measure_child_cpu_s() - before


def measure_child_cpu_s() -> float:
    """Return the CPU seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def find_differences(
    before: Path, after: Path, ignored: tuple[str, ...] = VOLATILE_METRICS
) -> Iterator[str]:
    """Yield the differences between two runs, ignoring metrics with a prefix in `ignored`."""
    metrics = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (before, after)
    ]
    if len(metrics[0]) != len(metrics[1]):
        yield f"{len(metrics[0])} records before, {len(metrics[1])} after"
    for old, new in zip(*metrics, strict=False):
        for key in sorted(old.keys() | new.keys()):
            if not key.startswith(ignored) and old.get(key, "absent") != new.get(key, "absent"):
                location = f"step {old['step']} ({old['stage']})"
                yield f"{location}: {key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
    patterns = ("eval/*.json", "trajectories/*.jsonl", "*/*.safetensors", "checkpoints/[0-9]*")
    for pattern in patterns:
        names = {p.relative_to(f) for f in (before, after) for p in f.glob(pattern)}
        for path in sorted(names):
            if not (before / path).exists() or not (after / path).exists():
                yield f"{path} is in only one of the two"
                continue
            old, new = load_content(before / path), load_content(after / path)
            if not isinstance(old, dict):
                old, new = {"": old}, {"": new}
            for part in sorted(old.keys() | new.keys()):
                if part not in old or part not in new or old[part] != new[part]:
                    yield f"{path} differs{part and ': '}{part}"


def load_content(path: Path) -> Any:
    """Load a file or checkpoint for comparison: arrays as bytes, no timings."""
    if path.is_dir():
        # Orbax's files contain timestamps, so compare only the arrays.
        reader = ocp.StandardCheckpointer()
        values: dict[str, Any] = {}
        for folder in sorted(path.iterdir()):
            if folder.name == "position":
                saved = json.loads((folder / "metadata").read_text(encoding="utf-8"))
                # The configuration contains paths; the record contains times.
                obsolete = ("schedule", "num_broken_off")  # old revisions only
                ignored = ("config", "contents", "record", *obsolete)
                names = {old: new for new, old in OLD_POSITION.items()}
                fields = rename_fields({k: v for k, v in saved.items() if k not in ignored}, names)
                values |= {
                    f"position/{name}": value for name, value in strip_volatile(fields).items()
                }
            elif folder.is_dir():
                leaves = jax.tree_util.tree_leaves_with_path(reader.restore(folder))
                for location, leaf in leaves:
                    array = np.asarray(leaf)
                    name = f"{folder.name}{jax.tree_util.keystr(location)}"
                    values[name] = (array.dtype, array.shape, array.tobytes())
        return values
    if path.suffix == ".safetensors":
        return path.read_bytes()
    return [strip_volatile(json.loads(text)) for text in read_texts(path)]


def rename_fields(value: Any, names: Mapping[str, str]) -> Any:
    """Replace the names of fields in a JSON value."""
    if isinstance(value, dict):
        return {names.get(key, key): rename_fields(inner, names) for key, inner in value.items()}
    return [rename_fields(inner, names) for inner in value] if isinstance(value, list) else value


def read_texts(path: Path) -> Sequence[str]:
    text = path.read_text(encoding="utf-8")
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def strip_volatile(value: Any) -> Any:
    """Remove entries that depend on the clock, caches or fingerprints from a JSON value."""
    if isinstance(value, dict):
        ignored = ("latency_s", "waited_s", "source", "attempts", "records", "usage")
        ignored += ("made_with", "settings", *NEW_FIELDS)
        return {
            key: strip_volatile(inner)
            for key, inner in value.items()
            if key not in ignored and not key.startswith(VOLATILE_METRICS)
        }
    return [strip_volatile(inner) for inner in value] if isinstance(value, list) else value


def check_out(revision: str, out: Path) -> Path:
    """Check out a revision unless it is cached; return its tree."""
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
        world, model = prepare_world(before, out, case)
        old, new = before.parent / name, out / "after" / name
        # Reuse the run of the old revision unless the case has changed.
        cache_file, case_repr = old / "made.json", repr(use_tree_keys(before, case))
        if not cache_file.exists() or json.loads(cache_file.read_text())["case"] != case_repr:
            cpu_s = run_case(before, case, world, model, old, out)
            cache_file.write_text(json.dumps({"case": case_repr, "processor_s": cpu_s}))
        seconds = [json.loads(cache_file.read_text())["processor_s"]]
        seconds.append(run_case(ROOT, case, world, model, new, out))
        changes = list(itertools.islice(find_differences(old, new), 20))
        if case.stop_step:
            uninterrupted = out / "after" / f"{name}_in_one_go"
            seconds.append(
                run_case(ROOT, replace(case, stop_step=0), world, model, uninterrupted, out)
            )
            resume_changes = itertools.islice(
                find_differences(uninterrupted, new, PER_PROCESS_METRICS), 20
            )
            changes += [f"unlike the uninterrupted run: {text}" for text in resume_changes]
        has_changed |= bool(changes)
        cpu_times = ", ".join(f"{cpu_time:.0f}" for cpu_time in seconds)
        summary = f"{name}: {'differs' if changes else 'the same'} (processor: {cpu_times} s)"
        print(summary, *changes, sep="\n  ", flush=True)
    sys.exit(int(has_changed))


if __name__ == "__main__":
    main()
