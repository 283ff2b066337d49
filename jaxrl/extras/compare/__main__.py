"""The command: `python -m jaxrl.extras.compare RUN --step=N [--with.key=value ...]`.

Shows side by side what two objectives do with the trajectories that a run recorded at a step: the
run's own, and the run's with other settings. Nothing is trained, and nothing of the run changed.
Relative paths of the run's configuration are those of the folder in which the run was started.
"""

from __future__ import annotations

from jaxrl.runtime.stopping import end_on_signals

if __name__ == "__main__":
    end_on_signals("ended", code=None)  # a moment passes until all below is imported

import argparse
import contextlib
import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxrl.envs.text import printable
from jaxrl.extras.compare.objective import Prepared, relate
from jaxrl.extras.compare.opening import Case, open_case
from jaxrl.logs.display import Display
from jaxrl.logs.metrics import plain_number
from jaxrl.opening import line, read_keys
from jaxrl.runtime.files import written_whole
from jaxrl.runtime.history import folder_of
from jaxrl.training.optimizer import learning_rate
from jaxrl.types import Params, members


def main(argv: Sequence[str] | None = None) -> None:
    """Compares and shows; ends with an error in one line where something is wrong."""
    parser = argparse.ArgumentParser(
        prog="jaxrl compare", description="Compares two objectives on a batch that a run recorded."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's workdir")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="of the trajectories")
    parser.add_argument("--values", metavar="FILE", help="YAML or JSON file of keys, as --with")
    parser.add_argument(
        "--checkpoint",
        type=int,
        metavar="N",
        help="of the weights; default: the step before, whose weights sampled, or else the newest "
        "at or before the step",
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=0,
        metavar="K",
        help="compare after so many updates on the batch by the run's own objective; default: 0",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="for all numbers as JSON")
    parser.epilog = "--with.key=value sets a key of the other objective, as --with.loss.name=cispo."
    arguments, others = parser.parse_known_args(argv)
    for name in ("absl", "jax._src.xla_bridge"):
        logging.getLogger(name).setLevel(logging.WARNING)
    display = Display()
    try:
        comparison = compare_as_asked(arguments, read_keys(others, "with"), display)
        if arguments.out is not None:
            with written_whole(arguments.out) as file:
                file.write(json.dumps(comparison, indent=1, allow_nan=False) + "\n")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        display.stop()
        sys.exit(line(error))
    finally:
        display.stop()
    show(comparison, display.console)


def compare_as_asked(
    arguments: argparse.Namespace, keys: Mapping[str, Any], display: Display
) -> dict[str, Any]:
    """Compares what the command line names.

    Raises:
        FileNotFoundError, ValueError: see `opening.open_case`.
    """
    if arguments.updates < 0:
        raise ValueError(f"--updates={arguments.updates}; expected 0 or more.")
    run, values = arguments.run.absolute(), arguments.values
    values = values and str(Path(values).absolute())
    folder = folder_of(run)
    sys.path += [str(Path.cwd()), str(folder)]  # where functions of one's own are looked for last
    with contextlib.chdir(folder):
        case = open_case(
            run,
            arguments.step,
            keys=keys,
            values=values,
            checkpoint=arguments.checkpoint,
            has_updates=arguments.updates > 0,
            log=display.log,
        )
        comparison = compare(case, arguments.updates, display)
    return {"run": str(arguments.run), "step": arguments.step, **comparison}


def compare(case: Case, num_updates: int, display: Display) -> dict[str, Any]:
    """Numbers of both objectives and of how they relate, as plain JSON values.

    Args:
        case: its parameters are donated where there are updates.
        num_updates: optimizer steps of the run's own objective on the batch before both are read;
            old log-probabilities are those from before.
        display: progress.
    """
    own, other = case.objectives
    prepared = []
    for objective in (own, other):
        display.activity("advantages, weights, log-probabilities")
        one = objective.prepare(
            case.groups,
            case.params,
            case.ref_params,
            step=case.step,
            stage_step=case.stage_step,
            is_moved=num_updates > 0,
        )
        prepared.append(one)
    params, rates = case.params, list[float]()
    if num_updates:
        params, rates = _updated(case, prepared[0], num_updates, display)
    display.activity("gradient of the run's own objective")
    first = own.measure(prepared[0], params)
    display.activity("gradient of the other objective")
    second = other.measure(prepared[1], params)
    trajectories = members(prepared[0].groups)
    recorded = [t.advantage for t in members(case.groups)]
    off = [
        abs(t.advantage - was)
        for t, was in zip(trajectories, recorded, strict=True)
        if t.advantage is not None and was is not None
    ]
    notes = list(case.notes)
    if max(off, default=0.0) > 1e-4:
        notes.append(
            f"advantages of the run's own objective differ from the recorded ones, by up to "
            f"{max(off):.3g}"
        )
    if not any(t.has_signal for one in prepared for t in members(one.groups)):
        notes.append("no trajectory has an advantage: there is nothing to learn from in this batch")
    return _plain(
        {
            "checkpoint": case.checkpoint,
            "updates": num_updates,
            "learning_rates": rates,
            "num_groups": len(case.groups),
            "num_trajectories": len(trajectories),
            "num_tokens": [
                sum(t.num_sampled for kept in one.kept for t in kept.values()) for one in prepared
            ],
            "changed": {key: list(map(repr, pair)) for key, pair in case.changed.items()},
            "notes": notes,
            "objectives": dict(zip(NAMES, (first.numbers, second.numbers), strict=True)),
            "gradients": relate(first, second, case.model),
        }
    )


NAMES = ("run", "with")
"""The run's own objective, and the other."""


def _updated(
    case: Case, prepared: Prepared, num_updates: int, display: Display
) -> tuple[Params, list[float]]:
    """The parameters after so many optimizer steps over the mini-batches, and the learning rates.

    Mini-batches come in their order, and again from the first one; those from which nothing can be
    learned are passed over.
    """
    stage = case.objectives[0].stage
    state = case.start_state(case.params)
    schedule, rates = learning_rate(stage.settings), []
    both = zip(prepared.minibatches, prepared.batches, strict=True)
    pairs = [(packed, batch) for packed, batch in both if packed.num_counted]
    for number in range(num_updates if pairs else 0):
        display.activity(f"update {number + 1} of {num_updates}")
        packed, batch = pairs[number % len(pairs)]
        rates.append(case.lr_scale * float(schedule(state.num_updates)))
        state, _ = stage.update(state, batch, packed, None if case.lr_scale == 1 else case.lr_scale)
    return state.params, rates


def _plain(value: Any) -> Any:
    """Values as JSON has them; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return plain_number(value) if isinstance(value, float | np.number | jax.Array) else value


def show(comparison: Mapping[str, Any], console: Console) -> None:
    """Prints the tables."""

    def tell(text: str) -> None:
        console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    updates, rates = comparison["updates"], comparison["learning_rates"]
    tell(
        f"step {comparison['step']} of {comparison['run']}: "
        f"{comparison['num_trajectories']} trajectories of {comparison['num_groups']} groups, "
        f"weights of checkpoint {comparison['checkpoint']}"
    )
    if not updates:
        tell("no update yet: every ratio is 1, and nothing is clipped (--updates=K moves on first)")
    elif not rates:
        tell("no update: there is nothing to learn from")
    else:
        moved = "1 update" if updates == 1 else f"{updates} updates"
        at = (
            _shown(rates[0]) if len({*rates}) == 1 else f"{_shown(rates[0])} to {_shown(rates[-1])}"
        )
        tell(
            f"after {moved} by the run's objective, learning rate {at}; old log-probabilities are "
            "from before"
        )
    for key, (before, after) in comparison["changed"].items():
        tell(f"  {key}: {before} in the run, {after} with")
    for note in comparison["notes"]:
        tell(f"note: {note}")
    one, other = (comparison["objectives"][name] for name in NAMES)
    table = _table("", "run", "with")
    for name in [*one, *(name for name in other if name not in one)]:
        table.add_row(name, _shown(one.get(name)), _shown(other.get(name)))
    console.print(table)
    gradients = comparison["gradients"]
    table = _table("gradient", "norm, run", "norm, with", "cosine")
    whole = {"all": {"norm": gradients["norm"], "cosine": gradients["cosine"]}}
    for name, row in (whole | gradients["layers"]).items():
        table.add_row(name, *map(_shown, row["norm"]), _shown(row["cosine"]))
    console.print(table)
    tell(
        f"tokens whose coefficient (d loss / d logprob) differs in sign: "
        f"{_share(gradients['opposite_share'])}; that only one objective moves: "
        f"{_share(gradients['one_only_share'])}"
    )


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left", no_wrap=True)
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


def _share(value: float) -> str:
    return f"{value:.1%}"


if __name__ == "__main__":
    main()
