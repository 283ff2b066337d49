"""Chat with a run's model: `jaxrl chat RUN ["question" ...] [--step=N] [--config.key=value]`.

Each question is an episode of the run's environment, with the same prompt, tags, tools and search
engine as in training. The output shows the model's text, the observations and the answer. Questions
on the command line are independent of each other. Without questions on the command line, each line
from the terminal or a pipe is a question in one conversation, and an empty line starts a new
conversation. The run does not change. Relative paths in its config and in `--config.` keys are
resolved from the folder in which the run was started; RUN, --model, --image and --video are
resolved from the current folder.
"""

from __future__ import annotations

from jaxrl.runtime.preemption import exit_on_signals
from jaxrl.utils.text import escape_control_chars, replace_unencodable_output

if __name__ == "__main__":
    exit_on_signals("ended", code=None)  # the imports below take a moment
    replace_unencodable_output()

import argparse
import contextlib
import importlib
import io
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxrl.builders.saved_run import format_error_line, load_saved_run
from jaxrl.config.loading import parse_overrides
from jaxrl.envs.base import OutageError, Outcome
from jaxrl.envs.images import Picture, Video
from jaxrl.extras.chat.conversation import Conversation
from jaxrl.logs.display import Display
from jaxrl.runtime.resume import read_launch_folder
from jaxrl.training.failures import describe_first_error
from jaxrl.types import Trajectory
from jaxrl.utils.hub import download_model


def main(argv: Sequence[str] | None = None) -> None:
    """Answer questions from the command line or standard input."""
    parser = argparse.ArgumentParser(
        prog="jaxrl chat", description="Chat with the trained model of a run."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="workdir of the run")
    parser.add_argument(
        "questions",
        nargs="*",
        metavar="question",
        help="separate questions; default: a conversation, one question per line of standard input",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image for each question, at its <image> placeholder or before it; repeatable",
    )
    parser.add_argument(
        "--video",
        action="append",
        default=[],
        metavar="FILE",
        help="video for each question, at its <video> placeholder or before it; repeatable",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--model", metavar="DIR", help="model folder; default: the run's model")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint; default: the newest")
    parser.add_argument(
        "--environment", default="", metavar="NAME", help="needed if RUN has several"
    )
    parser.epilog = "--config.key=value sets a key of the run's configuration."
    # Options may also come before the questions.
    arguments, overrides = parser.parse_known_intermixed_args(argv)
    for name in ("absl", "jax._src.xla_bridge", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    display = Display()
    try:
        num_failed = answer_questions(arguments, parse_overrides(overrides), display)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OutageError) as error:
        sys.exit(format_error_line(error))
    finally:
        display.stop()
    if num_failed:
        sys.exit(1)


def answer_questions(
    arguments: argparse.Namespace, keys: Mapping[str, Any], display: Display
) -> int:
    """Answer all questions; return the number of failed questions."""
    step, model = arguments.step, arguments.model
    if not arguments.temperature >= 0:
        raise ValueError(f"--temperature={arguments.temperature}; expected 0 or more.")
    if step is not None and model is not None:
        raise ValueError(f"--step={step} and --model={model} name two models; leave one out.")
    run = arguments.run.absolute()
    model = model and download_model(model, "--model").absolute()
    images, videos = (
        [str(Path(file).absolute()) for file in files]
        for files in (arguments.image, arguments.video)
    )
    for_chat = not arguments.questions
    separate_lines = [text for question in arguments.questions for text in (question, "")]
    lines = read_lines(sys.stdin) if for_chat else separate_lines
    num_failed = 0
    with contextlib.chdir(read_launch_folder(run)):
        components, config = load_saved_run(
            run,
            model,
            display,
            step=step,
            overrides=keys,
            for_chat=for_chat,
            environment=arguments.environment,
        )
        # Loading weights restarts the spinner after the last log line.
        display.stop()
        pictures = [("image", Picture(path=file)) for file in images]
        for option, picture in [*pictures, *(("video", Video(path=file)) for file in videos)]:
            if components.processor is None:
                raise ValueError(
                    f"--{option}={picture.path}: the model accepts only text; remove the flag."
                )
            components.processor.count_tokens(picture)
        conversation = Conversation(components, config, arguments.temperature)
        for question in lines:
            if not question:
                conversation.reset()
                continue
            try:
                trajectory, num_dropped = conversation.ask(question, images, videos)
            except (ValueError, OutageError) as error:  # later questions may still succeed
                print(format_error_line(error), file=sys.stderr)
                num_failed += 1
                continue
            if num_dropped:
                display.log(
                    f"dropped the {num_dropped} oldest questions, which no longer fit "
                    "(config.rollout.max_total_tokens)"
                )
            print_trajectory(trajectory, display.console)
    return num_failed


def read_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield input lines without surrounding whitespace; show a prompt on a terminal."""
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a bad byte must not end the chat
    if is_terminal:
        print(
            "One question per line. An empty line starts a new conversation; Ctrl-D exits.\n> ",
            end="",
            flush=True,
        )
    for text in lines:
        yield text.strip()
        if is_terminal:
            print("> ", end="", flush=True)


def print_trajectory(trajectory: Trajectory, console: Console) -> None:
    """Print the question, turns, observations (dimmed) and answer of an episode."""

    def print_text(text: str, style: str = "") -> None:
        console.print(Text(escape_control_chars(text), style=style), soft_wrap=True)

    print_text(f"\n{trajectory.query}", "bold")
    opener = trajectory.opener
    for turn in trajectory.turns:
        print_text(opener + turn.text)
        opener = ""
        if turn.observation is not None:
            print_text(turn.observation.strip("\n"), "dim")
    if trajectory.outcome == Outcome.ENVIRONMENT_ERROR:
        reason = describe_first_error([trajectory])
        print_text(f"no answer: the environment failed: {reason}", "bold")
    elif trajectory.outcome in (Outcome.ANSWERED, Outcome.ABSTAINED) and trajectory.final_answer:
        print_text(f"answer: {trajectory.final_answer}", "bold")
    else:
        print_text(f"no answer: {str(trajectory.outcome).replace('_', ' ')}", "bold")


if __name__ == "__main__":
    importlib.import_module("jaxrl.extras.chat.__main__").main()
