"""Asks a run's model: `python -m jaxrl.ask RUN ["question" ...] [--image=FILE ...]`.

Each question is played through the run's environment, as in training: the same prompt, tags, tools
and search engine. What the model wrote and what it was shown is printed, and its answer. Without
questions, lines are read from the terminal or from what is piped in. Nothing of the run is changed.
"""

from __future__ import annotations

from jaxrl.runtime.stopping import end_on_signals

if __name__ == "__main__":
    end_on_signals("ended", code=None)  # a moment passes until all below is imported

import argparse
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict
from rich.console import Console
from rich.text import Text

from jaxrl import config as configuration
from jaxrl.components import assemble
from jaxrl.data import parse_task
from jaxrl.envs.base import OutageError, Outcome
from jaxrl.envs.images import Picture
from jaxrl.envs.text import printable, writable
from jaxrl.logs.display import Display
from jaxrl.models.adapters import load_frozen
from jaxrl.models.hf_weights import load_hf
from jaxrl.runtime.checkpoint import abstract, read_newest_position, restore_params
from jaxrl.runtime.files import system_message
from jaxrl.runtime.sharding import mesh_sizes, param_shardings
from jaxrl.sampling.rollout import Sampling, Seeds
from jaxrl.session import Components, Progress
from jaxrl.toolbox import correct_by, environment_parts
from jaxrl.training.health import first_error
from jaxrl.types import Draw, Params, Trajectory
from jaxrl.values import load_values


def main(argv: Sequence[str] | None = None) -> None:
    """Answers the questions that are given, or those that are typed."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.ask", description="Asks the trained model of a run."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's workdir")
    parser.add_argument("questions", nargs="*", metavar="question", help="default: what is typed")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="shown with each question, at its mark <image> or before it; may be repeated",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: what RUN trained")
    arguments = parser.parse_intermixed_args(argv)  # options before questions, too
    for name in ("absl", "jax._src.xla_bridge", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    display = Display()
    try:
        if not arguments.temperature >= 0:
            raise ValueError(f"--temperature={arguments.temperature}; expected 0 or more.")
        components, config = open_run(arguments.run, arguments.model, display)
        check_images(components, arguments.image)
        questions = arguments.questions or typed(sys.stdin)
        num_refused = 0
        for number, question in enumerate(questions):
            try:
                given = (question, arguments.temperature, number, arguments.image)
                trajectory = ask(components, config, *given)
            except (ValueError, OutageError) as error:  # of this question alone
                print(line(error), file=sys.stderr)
                num_refused += 1
            else:
                show(trajectory, display.console)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OutageError) as error:
        display.stop()
        sys.exit(line(error))
    finally:
        display.stop()
    if num_refused:
        sys.exit(1)


def line(error: Exception) -> str:
    """An error as it is shown."""
    known = system_message(error) if isinstance(error, OSError) else None
    return printable(f"error: {' '.join((known or str(error)).split())}")


def open_run(run: Path, model: Path | None, display: Display) -> tuple[Components, ConfigDict]:
    """What plays a run's episodes, its engine with the weights, and the configuration.

    Args:
        run: its workdir.
        model: a folder in Hugging Face's format, in place of what the run has trained.
        display: progress.

    Raises:
        FileNotFoundError, ValueError: there is no such run or model, or nothing is trained yet.
    """
    config = read_config(run)
    _, saved = read_newest_position(run / "checkpoints")
    is_training = bool(saved) and Progress.from_json(saved, config).is_under_way(config)
    export = run / "export"
    if model is None and not is_training and (export / "config.json").is_file():
        model = export
    if model is not None:
        config.model.path = str(model)
        config.model.lora.rank = 0  # an adapter is merged into what a run exports
    elif not saved:
        raise FileNotFoundError(
            f"{run} holds neither export/ nor a checkpoint: no weights are trained yet. Name a "
            "model with --model=DIR."
        )
    config.stages = ()  # no data are read
    config.policy.name = configuration.OWN_MODEL  # whose weights these are
    leave_out_scores(config)
    config.search.replay = "off"  # a question of now is in no recording, and the run stays as it is
    fit_host(config)
    components = assemble(config, display.activity)
    params, weights = load_weights(components, config, run, model, display)
    display.log(f"weights: {weights}")
    components.engine.set_weights(components.model.whole(params))
    return components, config


def read_config(run: Path) -> ConfigDict:
    """The configuration that a run began with.

    Raises:
        FileNotFoundError, ValueError: there is none, or one with keys that no version had.
    """
    file = run / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{run} is no run: it holds no config.json. Name a run's workdir.")
    config = configuration.default_config()
    load_values(config, str(file), takes_old_keys=True)
    return config


def leave_out_scores(config: ConfigDict) -> None:
    """Of the reward leaves what the environment measures: nobody scores a question of now."""
    judges, prices = config.reward.judges, config.ledger.prices
    config.ledger.prices = {name: prices[name] for name in prices if name not in judges}
    config.reward.settings, config.reward.judges = {}, {}
    config.reward.weights = {environment_parts(config)[0]: 1.0}
    config.reward.correct = correct_by(config)


def fit_host(config: ConfigDict) -> None:
    """Changes mesh and rows, which are the run's devices', to what plays one episode here."""
    num_devices = jax.device_count()
    config.mesh.rollout_devices = 0
    try:
        sizes = mesh_sizes(num_devices, **config.mesh)
    except ValueError:
        config.mesh.update(data=1, fsdp=-1, context=1, expert=1, tensor=1)
        sizes = mesh_sizes(num_devices, **config.mesh)
    shards = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    config.rollout.update(num_rows=shards * sizes["context"], group_size=1)
    config.optimizer.micro_rows = config.sft.optimizer.micro_rows = shards


def load_weights(
    components: Components, config: ConfigDict, run: Path, model: Path | None, display: Display
) -> tuple[Params, str]:
    """The parameters of `model`, or without one of the run's newest checkpoint, and whose."""
    if model is not None:
        progress = display.counter("loading weights, MiB")
        named = config.model.architecture
        params = load_hf(model, components.mesh, architecture=named, progress=progress)
        return params, str(model)
    policy, mesh = components.model, components.mesh
    policy.base = load_frozen(config.model.path, policy, config.model.architecture)
    target = abstract(policy.trained.abstract_params(), param_shardings(mesh, policy.trained))
    step, params = restore_params(run / "checkpoints", target)
    return params, f"checkpoint of step {step}, in the middle of its stage"


def typed(lines: Iterable[str]) -> Iterator[str]:
    """Questions as they are typed, one a line; an empty line is skipped."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("One question a line; Ctrl-D ends.\n> ", end="", flush=True)
    for line in lines:
        if line.strip():
            yield line.strip()
        if is_terminal:
            print("> ", end="", flush=True)


def check_images(components: Components, files: Sequence[str]) -> None:
    """Refuses images that the model cannot be shown.

    Raises:
        ValueError: it reads none, or a file is no image.
    """
    if not files:
        return
    if components.processor is None:
        raise ValueError(f"--image={files[0]}: the model reads text alone; leave it out.")
    for file in files:
        components.processor.num_tokens(Picture(path=file))


def ask(
    components: Components,
    config: ConfigDict,
    question: str,
    temperature: float,
    number: int = 0,
    images: Sequence[str] = (),
) -> Trajectory:
    """One episode of a question.

    Args:
        components: of `open_run`.
        config: likewise.
        question: of the user.
        temperature: 0 is greedy.
        number: of the question, on which its draws depend.
        images: their files, for the marks in the question, or before it.

    Raises:
        ValueError: the prompt leaves no room for an answer, or has other marks than images.
    """
    # Environments score every episode; this one's score is nobody's.
    fields = {"question": writable(question), "answers": ["?"], "images": list(images)}
    task = parse_task(fields, f"question {number}", folder=Path())
    sampling = Sampling(
        group_size=1,
        temperature=temperature,
        top_p=config.eval.top_p,
        seeds=Seeds(seed=config.seed, stage=0, step=0),
    )
    [group] = components.rollout([Draw(task=task, stream_index=number)], sampling)
    return group.trajectories[0]


def show(trajectory: Trajectory, console: Console) -> None:
    """Prints the turns of an episode, what the tools said dimmed, and the answer."""

    def write(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style), soft_wrap=True)

    write(f"\n{trajectory.query}", "bold")
    opener = trajectory.opener
    for turn in trajectory.turns:
        write(opener + turn.text)
        opener = ""
        if turn.observation is not None:
            write(turn.observation.strip("\n"), "dim")
    if trajectory.outcome == Outcome.ENVIRONMENT_ERROR:
        write(f"no answer: the environment failed: {first_error([trajectory])}", "bold")
    elif trajectory.outcome in (Outcome.ANSWERED, Outcome.ABSTAINED) and trajectory.final_answer:
        write(f"answer: {trajectory.final_answer}", "bold")
    else:
        write(f"no answer: {str(trajectory.outcome).replace('_', ' ')}", "bold")


if __name__ == "__main__":
    main()
