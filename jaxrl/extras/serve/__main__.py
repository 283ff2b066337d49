"""Command line: `python -m jaxrl.extras.serve RUN_OR_MODEL [--port=N] [--config.key=value]`.

Serves the model of a run, a model folder or a Hub model over HTTP. Relative paths in a run's config
are resolved from the folder in which the run was started.
"""

from __future__ import annotations

from jaxrl.runtime.preemption import exit_on_signals
from jaxrl.utils.text import replace_unencodable_output

if __name__ == "__main__":
    exit_on_signals("ended", code=None)  # the imports below take a moment
    replace_unencodable_output()

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxrl.builders.saved_run import format_error_line
from jaxrl.config.loading import parse_overrides
from jaxrl.extras.serve.loading import is_run, load_model
from jaxrl.extras.serve.worker import Worker
from jaxrl.logs.display import Display
from jaxrl.runtime.preemption import watch_stop_signals
from jaxrl.runtime.resume import read_launch_folder
from jaxrl.utils.hub import PREFIX, download_model, is_hub_name

PORT = 8790


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jaxrl serve`; report errors in one line."""
    parser = argparse.ArgumentParser(
        prog="jaxrl serve", description="Serve the model of a run, a model folder or a Hub model."
    )
    add = parser.add_argument
    add("path", metavar="RUN_OR_MODEL", help="a workdir, a model folder, or hf://org/name")
    add("--host", default="127.0.0.1", help="default: this machine only")
    add("--port", type=int, default=PORT, metavar="N", help=f"default: {PORT}; 0: any free port")
    add("--key_env", default="", metavar="NAME", help="environment variable with the API key")
    add("--model", metavar="DIR", help="model folder; default: the run's model")
    add("--step", type=int, metavar="N", help="checkpoint of the run; default: the newest")
    add("--name", default="", help="model name; default: the last part of its path")
    add("--environment", default="", metavar="NAME", help="needed if RUN has several")
    add("--rows", type=int, default=16, metavar="N", help="concurrent completions; default: 16")
    add("--queue", type=int, default=256, metavar="N", help="waiting completions; default: 256")
    add("--deadline_s", type=float, default=600.0, metavar="S",
        help="seconds per completion; default: 600")  # fmt: skip
    add("--end_s", type=float, default=30.0, metavar="S",
        help="seconds for running completions at shutdown; default: 30")  # fmt: skip
    parser.epilog = "--config.key=value sets a key of the configuration."
    arguments, overrides = parser.parse_known_args(argv)
    for name in ("absl", "jax._src.xla_bridge"):
        logging.getLogger(name).setLevel(logging.WARNING)
    display = Display()
    try:
        serve(arguments, overrides, display)
    except (
        OverflowError,
        AttributeError,
        ImportError,
        KeyError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        sys.exit(format_error_line(error))
    finally:
        display.stop()


def serve(arguments: argparse.Namespace, overrides: Sequence[str], display: Display) -> None:
    """Load the model and serve it until a signal arrives.

    Raises:
        OSError, ValueError: A flag is invalid, the model cannot be loaded, or the server fails.
        ImportError: The dependencies of the server are not installed.
    """
    # Check the flags and bind the port first, since loading the model is slow.
    for name in ("rows", "queue", "deadline_s"):
        if not getattr(arguments, name) > 0:
            raise ValueError(f"--{name}={getattr(arguments, name)}; expected a positive number.")
    key = os.environ.get(arguments.key_env, "").strip()
    if arguments.key_env and not (key and key.isascii()):
        raise ValueError(
            f"--key_env={arguments.key_env} names a variable without an ASCII key; set it."
        )
    try:
        from jaxrl.extras.serve.server import Endpoint, Server, bind_port
    except ImportError as error:
        raise ImportError(f"{error}; run pip install 'jaxrl[serve]'.") from error
    path = download_model(arguments.path, "RUN_OR_MODEL").absolute()
    model = arguments.model and download_model(arguments.model, "--model").absolute()
    name = arguments.path.removeprefix(PREFIX) if is_hub_name(arguments.path) else ""
    with bind_port(arguments.host, arguments.port, key) as listener:
        # The run's relative paths start at the folder in which it was started.
        with contextlib.chdir(read_launch_folder(path) if is_run(path) else Path.cwd()):
            loaded = load_model(
                path,
                display,
                model=model,
                step=arguments.step,
                num_rows=arguments.rows,
                name=arguments.name or name,
                environment=arguments.environment,
                keys=parse_overrides(overrides),
            )
        loaded.engine.compile(display.show_activity)
        display.stop()
        tokenizer = loaded.tokenizer
        worker = Worker(
            loaded.engine, tokenizer.vocab_bytes, tokenizer.eos_ids, max_queue=arguments.queue
        )
        endpoint = Endpoint(
            worker,
            tokenizer,
            name=loaded.name,
            key=key,
            deadline_s=arguments.deadline_s,
            stops=loaded.stops,
        )
        server = Server(endpoint, arguments.host, listener)
        # Serve until a signal arrives or a thread dies; then wait for running completions.
        with watch_stop_signals() as should_stop:
            print(f"serving {loaded.name} at {server.address}/v1 (Ctrl-C to stop)", flush=True)
            while server.is_alive and not should_stop():
                time.sleep(0.1)
            has_failed = not server.is_alive
            is_done = server.shutdown(arguments.end_s)
    if not is_done:
        text = f"running completions were canceled after {arguments.end_s:g} s"
        print(text, file=sys.stderr, flush=True)
    if has_failed:
        raise OSError("the server failed, see the error above; start it again.")


if __name__ == "__main__":
    main()
