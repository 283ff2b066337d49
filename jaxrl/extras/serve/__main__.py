"""The command: `python -m jaxrl.extras.serve RUN_OR_FOLDER [--port=N] [--config.key=value]`.

Answers over HTTP with the model of a run, or one in a folder, through the engine that samples in
training. Relative paths of a run's configuration are those of the folder in which
the run was started.
"""

from __future__ import annotations

from jaxrl.runtime.preemption import end_on_signals
from jaxrl.utils.text import replace_unencodable

if __name__ == "__main__":
    end_on_signals("ended", code=None)  # a moment passes until all below is imported
    replace_unencodable()

import argparse
import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from jaxrl.builders.saved_run import line
from jaxrl.config.loading import read_keys
from jaxrl.extras.serve.opening import is_run, open_served
from jaxrl.extras.serve.worker import Worker
from jaxrl.logs.display import Display
from jaxrl.runtime.preemption import stop_on_signals
from jaxrl.runtime.resume import run_folder

PORT = 8790


def main(argv: Sequence[str] | None = None) -> None:
    """Answers until a signal ends it; errors are one line."""
    parser = argparse.ArgumentParser(
        prog="jaxrl serve", description="Answers over HTTP with a run's model, or one of its own."
    )
    parser.add_argument("place", type=Path, metavar="RUN_OR_FOLDER", help="a workdir, or a model")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine alone")
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"default: {PORT}; 0: any that is free"
    )
    parser.add_argument(
        "--key_env", default="", metavar="NAME", help="environment variable with the clients' key"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: what RUN trained")
    parser.add_argument("--step", type=int, metavar="N", help="whose checkpoint; default: the end")
    parser.add_argument("--name", default="", help="of the model; default: the last of its path")
    parser.add_argument(
        "--rows", type=int, default=16, metavar="N", help="answers side by side; default: 16"
    )
    parser.add_argument(
        "--queue", type=int, default=256, metavar="N", help="answers that wait; default: 256"
    )
    parser.add_argument(
        "--deadline_s",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds of an answer; default: 600",
    )
    parser.add_argument(
        "--end_s",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for answers once it ends; default: 30",
    )
    parser.add_argument("--max_body_mib", type=float, default=16.0, metavar="MIB")
    parser.epilog = "--config.key=value sets a key of the configuration."
    arguments, others = parser.parse_known_args(argv)
    for name in ("absl", "jax._src.xla_bridge"):
        logging.getLogger(name).setLevel(logging.WARNING)
    display = Display()
    try:
        serve(arguments, others, display)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        display.stop()
        sys.exit(line(error))
    finally:
        display.stop()


def serve(arguments: argparse.Namespace, others: Sequence[str], display: Display) -> None:
    """Takes the port, opens the model, and answers until a signal comes.

    Raises:
        OSError, ValueError: something is wrong with what was asked for.
        ImportError: the extra `serve` is not installed.
    """
    check(arguments)
    key = read_key(arguments.key_env)
    try:
        from jaxrl.extras.serve.server import take_port
    except ImportError as error:
        raise ImportError("the server needs uvicorn; pip install 'jaxrl[serve]'.") from error
    with take_port(arguments.host, arguments.port, key) as taken:
        answer(arguments, others, display, key, taken)


def answer(
    arguments: argparse.Namespace,
    others: Sequence[str],
    display: Display,
    key: str,
    taken: socket.socket,
) -> None:
    """Opens the model and answers on a port until a signal comes.

    Raises:
        OSError, ValueError: something is wrong with what was asked for.
    """
    from jaxrl.extras.serve.server import Endpoint, Server, Settings

    place = arguments.place.absolute()
    model = arguments.model and arguments.model.absolute()
    with contextlib.chdir(run_folder(place) if is_run(place) else Path.cwd()):
        served = open_served(
            place,
            display,
            model=model,
            step=arguments.step,
            rows=arguments.rows,
            name=arguments.name,
            keys=read_keys(others),
        )
    served.engine.compile(display.activity)
    display.stop()
    tokenizer = served.tokenizer
    worker = Worker(
        served.engine, tokenizer.vocab_bytes, tokenizer.eos_ids, max_queue=arguments.queue
    )
    settings = Settings(
        name=served.name,
        template_arguments=served.template_arguments,
        key=key,
        deadline_s=arguments.deadline_s,
        max_body_mib=arguments.max_body_mib,
        stops=served.stops,
    )
    server = Server(Endpoint(worker, tokenizer, settings), arguments.host, taken)
    with stop_on_signals() as should_stop:
        print(f"{server.address}/v1 answers as {served.name} (end with Ctrl-C)", flush=True)
        while server.is_alive and not should_stop():
            time.sleep(0.1)
        has_failed = not server.is_alive
        is_done = server.end(arguments.end_s)
    if not is_done:
        print(f"answers were broken off after {arguments.end_s:g} s", file=sys.stderr, flush=True)
    if has_failed:
        raise OSError("the server ended by a fault, which is told above; start it again.")


def check(arguments: argparse.Namespace) -> None:
    """Refuses numbers with which nothing could be answered.

    Raises:
        ValueError: names the flag.
    """
    if not 0 <= arguments.port < 2**16:
        raise ValueError(f"--port={arguments.port}; expected 0 to 65535.")
    for name in ("rows", "queue", "deadline_s", "max_body_mib"):
        if not (value := getattr(arguments, name)) > 0:
            raise ValueError(f"--{name}={value:g}; expected more than 0.")
    if not math.isfinite(arguments.max_body_mib):
        raise ValueError(f"--max_body_mib={arguments.max_body_mib:g}; expected a finite number.")
    if not 0 <= arguments.end_s <= threading.TIMEOUT_MAX:
        most = threading.TIMEOUT_MAX
        raise ValueError(f"--end_s={arguments.end_s:g}; expected 0 to {most:g}.")


def read_key(name: str) -> str:
    """The key in an environment variable; "" where none is named.

    Raises:
        ValueError: it is not there.
    """
    if not name:
        return ""
    if not (key := os.environ.get(name, "").strip()):
        raise ValueError(f"--key_env={name}, but that variable is not set; expected the key in it.")
    return key


if __name__ == "__main__":
    main()
