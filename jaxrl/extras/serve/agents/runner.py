"""The process in which agents run: `PYTHON runner.py AGENT`, started by `processes.AgentProcesses`.

It may be another Python than the run's, without jaxrl, so it imports only the standard library.
Each line of its input starts or stops an episode; each line of its output reports an end. What
agents print goes to standard error. When its input ends, so do they.
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

MAX_OUTPUT = 1 << 16
"""Bytes of a program's output to keep, the last ones."""

MAX_REWARD = 1 << 20
"""Bytes of JSON in a reward."""

POLL_S = 0.1
"""Seconds between checks for processes that a program has left behind."""

PARENT_POLL_S = 1.0
"""Seconds between checks whether the run is alive."""

CANCEL_S = 5.0
"""Seconds for a stopped agent to end, after which it is left behind."""

FOLDER = "JAXRL_AGENTS_FOLDER"
"""Variable with the folder of a process, which marks all that an agent has started."""

STOPPED = "it was stopped"

Play = Callable[[Mapping[str, Any]], Awaitable[Any]]


def load(name: str) -> Callable[..., Any]:
    """Load the function `module.function`, `module:function` or `path/file.py:function`.

    Raises:
        ImportError, AttributeError, TypeError: There is none.
    """
    file, _, attribute = name.rpartition(":")
    if attribute.endswith(".py"):
        raise ImportError(f"{name} names no function; expected {name}:FUNCTION")
    if file.endswith(".py"):
        spec = importlib.util.spec_from_file_location("jaxrl_agent_" + Path(file).stem, file)
        if spec is None or spec.loader is None or not Path(file).is_file():
            raise ImportError(f"there is no file {os.path.abspath(file)}")
        # Modules beside it are found last, so that none hides one of a library.
        sys.path.append(os.path.dirname(os.path.abspath(file)))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        path, attribute = (file, attribute) if file else name.rsplit(".", 1)
        module = importlib.import_module(path)
    function: Any = functools.reduce(getattr, attribute.split("."), module)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}; expected a function")
    return function


def play_function(function: Callable[..., Any], settings: Mapping[str, Any]) -> Play:
    """Return a player that calls a function, in a thread of its own unless it is async."""

    async def play(episode: Mapping[str, Any]) -> Any:
        arguments = {name: episode[name] for name in ("base_url", "api_key", "model")}
        if inspect.iscoroutinefunction(function):
            try:
                return await function(episode["task"], **arguments, **settings)
            except (SystemExit, KeyboardInterrupt) as error:  # would end the other episodes too
                raise RuntimeError(_describe(error)) from None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def resolve(method: Callable[[Any], None], value: Any) -> None:
            if not done.done():
                method(value)

        def call() -> None:
            try:
                value = function(episode["task"], **arguments, **settings)
                outcome = done.set_result, value
            except BaseException as error:
                outcome = done.set_exception, RuntimeError(_describe(error))
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(resolve, *outcome)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        try:
            return await done
        finally:
            if not done.done() or done.cancelled():
                _left_threads.append(thread)

    return play


def play_program(command: list[str], folder: str) -> Play:
    """Return a player that runs a program: the task is its input, the model in its environment.

    The reward's file, address and key are part of the input: unlike the environment, it is not
    inherited by what the program starts.
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
        data = json.dumps({**episode["task"], "reward": reward}).encode()
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
        # A cancelled start would end the program alone, not what that has started, and may wait
        # forever for pipes that do not exist yet. `asyncio.wait` does not cancel it.
        is_stopped = False
        while not starting.done():
            try:
                await asyncio.wait([starting])
            except asyncio.CancelledError:
                is_stopped = True
        process = starting.result()
        if is_stopped:
            _kill_all(process.pid, mark)
            raise asyncio.CancelledError
        _groups.add(process.pid)
        # It may print before it reads, or leave behind what prints after its end.
        writing = asyncio.ensure_future(_write(process.stdin, data))
        reading = asyncio.ensure_future(_read_end(process.stdout))
        waiting = asyncio.ensure_future(process.wait())
        try:
            while process.returncode is None:  # known before all of its pipes are closed
                await asyncio.wait([waiting], timeout=POLL_S)
        finally:
            writing.cancel()
            waiting.cancel()
            _kill_all(process.pid, mark)
        while not (await asyncio.wait([reading], timeout=POLL_S))[0]:
            kill_marked(mark)  # a process that was just being started had no environment yet
        value = _read_reward(file)
        if process.returncode:
            raise RuntimeError(f"the program ended with {process.returncode}: {reading.result()}")
        return value

    return play


def _read_reward(file: str) -> Any:
    """Read the reward that a program wrote; None if it wrote none."""
    if not os.path.exists(file):
        return None
    if not os.path.isfile(file):  # opening a pipe may take forever
        raise RuntimeError("the reward file is no file; expected one with JSON")
    with open(file, "rb") as stream:
        data = stream.read(MAX_REWARD + 1)
    os.remove(file)
    if len(data) > MAX_REWARD:
        raise RuntimeError(f"the reward file has more than {MAX_REWARD} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RuntimeError(f"the reward file is no JSON: {error}") from None


async def _write(stream: Any, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the program does not read it
        stream.write(data)
        await stream.drain()
    stream.close()


async def _read_end(stream: Any) -> str:
    """Read a stream to its end; return the end of its text."""
    data = b""
    while piece := await stream.read(MAX_OUTPUT):
        data = (data + piece)[-MAX_OUTPUT:]
    return data.decode(errors="replace").strip()[-2000:]


_LIBRARIES = tuple(
    os.path.join(path, "") for name, path in sysconfig.get_paths().items() if "lib" in name
)
_groups: set[int] = set()  # process groups of programs
_left_threads: list[threading.Thread] = []  # of stopped functions
_left_tasks: list[asyncio.Task[Any]] = []  # of async functions that ignored their end


def _kill_all(group: int, mark: str) -> None:
    """Kill a process group, and processes of other groups with a mark."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    _groups.discard(group)
    kill_marked(mark)


def kill_marked(mark: str) -> None:
    """Kill processes with a text in their environment, whatever session they are in.

    Does nothing on systems without `/proc`.
    """
    for _ in range(20):  # they may start others meanwhile
        marked = []
        for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as file:  # empty once it is dead
                    is_marked = int(name) != os.getpid() and mark.encode() in file.read()
                if is_marked:
                    marked.append(name)
                    os.kill(int(name), signal.SIGKILL)
        if not marked:
            return
        time.sleep(0.01)


def _exit(folder: str) -> None:
    """Exit with all that agents have started; threads of agents may hang."""
    for group in [*_groups]:
        _kill_all(group, folder)
    shutil.rmtree(folder, ignore_errors=True)
    kill_marked(folder)
    os._exit(0)


def _exit_with(parent: int, folder: str) -> None:
    """Exit once the run has ended, also while an agent blocks the event loop."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    time.sleep(PARENT_POLL_S)  # in which the loop may exit by itself
    _exit(folder)


def _describe(error: BaseException) -> str:
    """Describe an error, with the last line in the agent's own files if there is one."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    frames = own or frames
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:2000] + where


class Episodes:
    """The episodes of this process, and the reports of their ends."""

    def __init__(self, play: Play, send: Callable[[Mapping[str, Any]], None]):
        """Start empty.

        Args:
            play: Plays an episode.
            send: Sends a message to the run.
        """
        self._play, self._send = play, send
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def start(self, episode: Mapping[str, Any]) -> None:
        """Start an episode."""
        name = episode["episode"]
        task = asyncio.ensure_future(self._play(episode))
        self._tasks[name] = task
        task.add_done_callback(functools.partial(self._report, name))

    def stop(self, name: str) -> None:
        """Stop an episode, and leave it behind if it ignores that."""
        if task := self._tasks.get(name):
            task.cancel()
            loop = asyncio.get_running_loop()
            loop.call_later(CANCEL_S, self._leave_behind, name, task)

    def _leave_behind(self, name: str, task: asyncio.Task[Any]) -> None:
        if not task.done():
            _left_tasks.append(task)
            self._end(name, {"error": STOPPED})

    def _report(self, name: str, task: asyncio.Task[Any]) -> None:
        try:
            value = task.result()
            if (count := len(json.dumps(value, allow_nan=False))) > MAX_REWARD:
                raise RuntimeError(
                    f"the reward has {count} bytes as JSON; expected at most {MAX_REWARD}"
                )
            outcome = {"reward": value}
        except asyncio.CancelledError:
            outcome = {"error": STOPPED}
        except Exception as error:
            outcome = {"error": str(error) if type(error) is RuntimeError else _describe(error)}
        self._end(name, outcome)

    def _end(self, name: str, outcome: Mapping[str, Any]) -> None:
        if self._tasks.pop(name, None) is None:  # reported when it was left behind
            return
        num_left = sum(thread.is_alive() for thread in _left_threads)
        num_left += sum(not task.done() for task in _left_tasks)
        self._send({"episode": name, "num_left": num_left, **outcome})


async def main(agent: Mapping[str, Any], given: Any, out: Any) -> None:
    """Load the agent, report that it is ready, and play until the input ends.

    Args:
        agent: Arguments of `processes.AgentProcesses`.
        given: Pipe from the run.
        out: Pipe to the run.
    """

    def send(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    folder = os.environ[FOLDER]
    threading.Thread(target=_exit_with, args=(os.getppid(), folder), daemon=True).start()
    try:
        if agent["command"]:
            if shutil.which(agent["command"][0]) is None:
                raise FileNotFoundError(f"there is no program {agent['command'][0]}")
            play = play_program(agent["command"], folder)
        else:
            play = play_function(load(agent["function"]), agent["settings"])
    except BaseException as error:
        send({"failed": _describe(error)})
        return
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 28)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), given)
    send({"ready": True})
    episodes = Episodes(play, send)
    while line := await lines.readline():
        message = json.loads(line)
        if "end" in message:
            break
        if "stop" in message:
            episodes.stop(message["stop"])
        else:
            episodes.start(message)
    _exit(folder)


if __name__ == "__main__":
    # Copies of the pipes are not inherited: what agents start neither reads the run's lines, which
    # hold the reward keys of episodes, nor prints among ours.
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what agents print
    asyncio.run(main(json.loads(sys.argv[1]), *pipes))
