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
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

OUTPUT = 1 << 16
"""Bytes of what a program prints that are kept for messages, the last ones."""

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
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}; expected a function")
    return found


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
                told = done.set_result, value
            except BaseException as error:
                told = done.set_exception, RuntimeError(_text(error))
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, *told)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        try:
            return await done
        finally:
            if not done.done() or done.cancelled():
                _left.append(thread)

    return play


def by_command(command: list[str], folder: str) -> Play:
    """Plays an episode by a program: the task on its input, addresses in its environment."""

    async def play(episode: Mapping[str, Any]) -> Any:
        file = os.path.join(folder, episode["episode"])
        root = episode["base_url"].removesuffix("/v1")
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=os.environ
            | {
                "OPENAI_BASE_URL": episode["base_url"],
                "OPENAI_API_KEY": episode["api_key"],
                "ANTHROPIC_BASE_URL": root,
                "ANTHROPIC_API_KEY": episode["api_key"],
                "JAXRL_MODEL": episode["model"],
                "JAXRL_REWARD_FILE": file,
                "JAXRL_REWARD_URL": f"{root}/reward",
            },
        )
        _groups.add(process.pid)
        try:
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):  # it does not want to know
                process.stdin.write(json.dumps(episode["task"]).encode())
                await process.stdin.drain()
            process.stdin.close()
            printed = await _last(process.stdout)
            status = await process.wait()
        finally:
            _kill(process.pid)
        try:
            with open(file, encoding="utf-8") as written:
                reward = json.load(written)
            os.remove(file)
        except FileNotFoundError:
            reward = None
        except ValueError as error:
            raise RuntimeError(f"the reward file is no JSON: {error}") from None
        if status:
            raise RuntimeError(f"the program ended with {status}: {printed}")
        return reward

    return play


async def _last(stream: Any) -> str:
    """Reads a stream to its end; its last words."""
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


def _text(error: BaseException) -> str:
    """What failed, and where in the agent's own files, or elsewhere if in none of them."""
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
            json.dumps(value, allow_nan=False)
            told = {"reward": value}
        except asyncio.CancelledError:
            told = {"error": "it was given up"}
        except Exception as error:
            told = {"error": str(error) if type(error) is RuntimeError else _text(error)}
        del playing[name]
        _left[:] = [thread for thread in _left if thread.is_alive()]
        say({"episode": name, "left": len(_left), **told})

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


async def main(settings: Mapping[str, Any], out: Any) -> None:
    """Loads the agent, says that it is ready, and plays."""

    def say(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    folder = tempfile.mkdtemp(prefix="jaxrl-agents-")
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
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    say({"ready": True})
    await serve(play, lines, say)
    for group in [*_groups]:
        _kill(group)
    with contextlib.suppress(OSError):
        for file in os.listdir(folder):
            os.remove(os.path.join(folder, file))
        os.rmdir(folder)
    os._exit(0)  # threads of agents may hang


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what agents print
    asyncio.run(main(json.loads(sys.argv[1]), output))
