"""The process in which agents run: `PYTHON runner.py SETTINGS`, started by `programs.Programs`.

It may be another Python than the run's, without jaxrl, so only the standard library is imported. A
line of its input names an episode to play, or one to give up; a line of its output says what came
of it. What agents print goes to the error stream. When its input ends, so do they.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import secrets
import shutil
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

OUTPUT = 1 << 16
"""Bytes of what a program prints that are kept for messages, the last ones."""

MAX_REWARD = 1 << 20
"""Bytes of JSON that an agent says of an episode at most."""

LEFT_S = 0.1
"""Seconds between looks for what a program has left behind."""

LOOK_S = 1.0
"""Seconds between looks for whether the run is still there."""

FOLDER = "JAXRL_AGENTS_FOLDER"
"""Variable with the folder of a process; by it all that an agent has started is found."""

Play = Callable[[Mapping[str, Any]], Awaitable[Any]]


def load(name: str) -> Callable[..., Any]:
    """The function that `module.function`, `module:function` or `path/file.py:function` names.

    Raises:
        ImportError, AttributeError, TypeError: there is none.
    """
    file, _, attribute = name.rpartition(":")
    if attribute.endswith(".py"):
        raise ImportError(f"{name} names no function; expected {name}:FUNCTION")
    if file.endswith(".py"):
        spec = importlib.util.spec_from_file_location("jaxrl_agent_" + Path(file).stem, file)
        if spec is None or spec.loader is None or not Path(file).is_file():
            raise ImportError(f"there is no file {os.path.abspath(file)}")
        # Modules beside it are found, after all others: none of them hides one of a library.
        sys.path.append(os.path.dirname(os.path.abspath(file)))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        path, attribute = (file, attribute) if file else name.rsplit(".", 1)
        module = importlib.import_module(path)
    function: Any = module
    for part in attribute.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}; expected a function")
    return function


def by_function(function: Callable[..., Any], settings: Mapping[str, Any]) -> Play:
    """Plays an episode by calling a function, in a thread of its own unless it is async."""

    async def play(episode: Mapping[str, Any]) -> Any:
        arguments = {name: episode[name] for name in ("base_url", "api_key", "model")}
        if inspect.iscoroutinefunction(function):
            try:
                return await function(episode["task"], **arguments, **settings)
            except (SystemExit, KeyboardInterrupt) as error:  # which would end the others too
                raise RuntimeError(_text(error)) from None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def tell(method: Callable[[Any], None], value: Any) -> None:
            if not done.done():
                method(value)

        def call() -> None:
            try:
                value = function(episode["task"], **arguments, **settings)
                outcome = done.set_result, value
            except BaseException as error:
                outcome = done.set_exception, RuntimeError(_text(error))
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, *outcome)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        try:
            return await done
        finally:
            if not done.done() or done.cancelled():
                _left.append(thread)

    return play


def by_command(command: list[str], folder: str) -> Play:
    """Plays an episode by a program: the task on its input, the model in its environment.

    How to reward the episode is part of the input: unlike the environment, it is not inherited by
    what the program starts.
    """

    async def play(episode: Mapping[str, Any]) -> Any:
        mark, file = (os.path.join(folder, secrets.token_hex(16)) for _ in range(2))
        variables = {
            "OPENAI_BASE_URL": episode["base_url"],
            "OPENAI_API_KEY": episode["api_key"],
            "ANTHROPIC_BASE_URL": episode["base_url"].removesuffix("/v1"),
            "ANTHROPIC_API_KEY": episode["api_key"],
            "JAXRL_MODEL": episode["model"],
            FOLDER: mark,
        }
        reward = {"file": file, "url": episode["reward_url"], "key": episode["episode"]}
        given = json.dumps({**episode["task"], "reward": reward}).encode()
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | variables,
            )
        )
        # A start that is cancelled itself ends the program alone, not what that has started, and
        # may wait for ever for pipes that it has not made yet. `wait` leaves it alone.
        is_given_up = False
        while not starting.done():
            try:
                await asyncio.wait([starting])
            except asyncio.CancelledError:
                is_given_up = True
        process = starting.result()
        if is_given_up:
            _kill(process.pid)
            kill_marked(mark)
            raise asyncio.CancelledError
        _groups.add(process.pid)
        # It may print before it reads, or leave behind what prints after its end.
        telling = asyncio.ensure_future(_tell(process.stdin, given))
        hearing = asyncio.ensure_future(_last(process.stdout))
        waiting = asyncio.ensure_future(process.wait())
        try:
            while process.returncode is None:  # which is known before all have closed its pipes
                await asyncio.wait([waiting], timeout=LEFT_S)
        finally:
            telling.cancel()
            waiting.cancel()
            _kill(process.pid)
            kill_marked(mark)
        while not (await asyncio.wait([hearing], timeout=LEFT_S))[0]:
            kill_marked(mark)  # what was starting another program had no environment just then
        printed = hearing.result()
        value = _read_reward(file)
        if process.returncode:
            raise RuntimeError(f"the program ended with {process.returncode}: {printed}")
        return value

    return play


def _read_reward(file: str) -> Any:
    """Reads the reward that a program wrote; None where it wrote none."""
    if not os.path.exists(file):
        return None
    if not os.path.isfile(file):  # to open a pipe may take for ever
        raise RuntimeError("the reward file is no file; expected one with JSON")
    with open(file, "rb") as written:
        data = written.read(MAX_REWARD + 1)
    os.remove(file)
    if len(data) > MAX_REWARD:
        raise RuntimeError(f"the reward file has more than {MAX_REWARD} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RuntimeError(f"the reward file is no JSON: {error}") from None


async def _tell(stream: Any, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it does not want to know
        stream.write(data)
        await stream.drain()
    stream.close()


async def _last(stream: Any) -> str:
    """Reads a stream to its end; returns the end of its text."""
    data = b""
    while piece := await stream.read(OUTPUT):
        data = (data + piece)[-OUTPUT:]
    return data.decode(errors="replace").strip()[-2000:]


_LIBRARIES = tuple(
    os.path.join(path, "") for name, path in sysconfig.get_paths().items() if "lib" in name
)
_groups: set[int] = set()
_left: list[threading.Thread] = []  # of episodes that were given up


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    _groups.discard(group)


def kill_marked(mark: str) -> None:
    """Kills processes whose environment began with a text, which are in no group of ours.

    A program may give what it starts a session of its own. Does nothing where there is no `/proc`.
    """
    sought, own = mark.encode(), os.getpid()
    for _ in range(20):  # they may start others meanwhile
        marked = []
        for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as file:  # of one that is dead it is empty
                    is_marked = int(name) != own and sought in file.read()
                if is_marked:
                    marked.append(name)
                    os.kill(int(name), signal.SIGKILL)
        if not marked:
            return
        time.sleep(0.01)


def _end_with(parent: int, folder: str) -> None:
    """Ends everything once the run has ended, also while an agent blocks the event loop."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    time.sleep(LOOK_S)  # in which the loop may
    for group in [*_groups]:
        _kill(group)
    shutil.rmtree(folder, ignore_errors=True)
    kill_marked(folder)
    os._exit(0)


def _text(error: BaseException) -> str:
    """Describes a failure, with its last place in the agent's own files, or in any if in none."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
    own = [one for one in frames if not one.filename.startswith((*_LIBRARIES, "<"))]
    frames = own or frames
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:2000] + where


async def serve(play: Play, lines: Any, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Plays what the lines ask for, until they end."""
    playing: dict[str, asyncio.Task[Any]] = {}

    def end(name: str, task: asyncio.Task[Any]) -> None:
        try:
            value = task.result()
            if (count := len(json.dumps(value, allow_nan=False))) > MAX_REWARD:
                raise RuntimeError(
                    f"the reward has {count} bytes as JSON; expected at most {MAX_REWARD}"
                )
            outcome = {"reward": value}
        except asyncio.CancelledError:
            outcome = {"error": "it was given up"}
        except Exception as error:
            outcome = {"error": str(error) if type(error) is RuntimeError else _text(error)}
        del playing[name]
        _left[:] = [thread for thread in _left if thread.is_alive()]
        say({"episode": name, "left": len(_left), **outcome})

    while line := await lines.readline():
        message = json.loads(line)
        if "end" in message:
            return
        if "stop" in message:
            if task := playing.get(message["stop"]):
                task.cancel()
            say({"stopped": message["stop"]})
        else:
            name = message["episode"]
            playing[name] = asyncio.ensure_future(play(message))
            playing[name].add_done_callback(functools.partial(end, name))


async def main(settings: Mapping[str, Any], given: Any, out: Any) -> None:
    """Load the agent, report that it is ready, and play.

    Args:
        settings: Arguments of `programs.Programs`.
        given: Pipe from the run.
        out: Pipe to the run.
    """

    def say(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    folder = os.environ[FOLDER]
    threading.Thread(target=_end_with, args=(os.getppid(), folder), daemon=True).start()
    try:
        if settings["command"]:
            if shutil.which(settings["command"][0]) is None:
                raise FileNotFoundError(f"there is no program {settings['command'][0]}")
            play = by_command(settings["command"], folder)
        else:
            play = by_function(load(settings["agent"]), settings["settings"])
    except BaseException as error:
        say({"failed": _text(error)})
        return
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 28)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), given)
    say({"ready": True})
    await serve(play, lines, say)
    for group in [*_groups]:
        _kill(group)
    shutil.rmtree(folder, ignore_errors=True)
    kill_marked(folder)
    os._exit(0)  # threads of agents may hang


if __name__ == "__main__":
    # Copies of the pipes are not inherited: what agents start neither reads the run's lines, which
    # hold the reward keys of episodes, nor prints among ours.
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what agents print
    asyncio.run(main(json.loads(sys.argv[1]), *pipes))
