"""Agent process: `PYTHON runner.py AGENT`, started by `processes.AgentProcesses`.

jaxrl may not be installed in the agent's environment, so this file imports only the standard
library. Each line on stdin starts or stops an episode; each line on stdout reports the end of an
episode. Agents' output goes to stderr. When stdin closes, the process stops all agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import inspect
import json
import os
import pkgutil
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MAX_OUTPUT = 1 << 16
"""Maximum bytes of a program's output to keep, from its end."""

POLL_S = 0.1
"""Seconds between checks for processes that outlived their program."""

PARENT_POLL_S = 1.0
"""Seconds between checks that the parent process is alive."""

FOLDER_VARIABLE = "JAXRL_AGENTS_FOLDER"
"""Environment variable that marks all processes of this process's agents."""

RunAgent = Callable[[Mapping[str, Any]], Awaitable[Any]]


def load_function(name: str) -> Callable[..., Any]:
    """Load a function named `module.function`, `module:function` or `path/file.py:function`.

    Raises:
        OSError, ImportError, AttributeError, ValueError, TypeError: The function does not exist.
    """
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py"):
        spec = importlib.util.spec_from_file_location("jaxrl_agent_" + Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        # Search the file's folder last, so that its modules do not shadow libraries.
        sys.path.append(os.path.dirname(os.path.abspath(file)))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        name = f"{spec.name}:{attribute}"
    function = pkgutil.resolve_name(name)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}; expected a function")
    return function


def wrap_function(function: Callable[..., Any], settings: Mapping[str, Any]) -> RunAgent:
    """Wrap an agent function as a `RunAgent`. A synchronous function runs in a thread."""

    async def run_agent(episode: Mapping[str, Any]) -> Any:
        arguments = {name: episode[name] for name in ("base_url", "api_key", "model")}
        call = functools.partial(function, episode["task"], **arguments, **settings)
        if not inspect.iscoroutinefunction(function):
            call = functools.partial(_run_in_thread, call)
        try:
            return await call()
        except (SystemExit, KeyboardInterrupt) as error:  # would also end the other episodes
            raise RuntimeError(_describe_error(error)) from None

    return run_agent


async def _run_in_thread(call: Callable[[], Any]) -> Any:
    def call_and_wrap_errors() -> Any:
        try:
            return call()
        except BaseException as error:  # an asyncio task cannot raise StopIteration, for example
            raise RuntimeError(_describe_error(error)) from None

    return await asyncio.wrap_future(_threads.submit(call_and_wrap_errors))


def wrap_program(command: list[str], folder: str) -> RunAgent:
    """Return a `RunAgent` that runs a program for each episode.

    The program reads the task from stdin and the endpoint's URL from environment variables. Only
    stdin contains the reward's file, URL and key, so child processes do not inherit them.
    """

    async def run_agent(episode: Mapping[str, Any]) -> Any:
        marker, file = (os.path.join(folder, secrets.token_hex(16)) for _ in range(2))
        variables = {
            "OPENAI_BASE_URL": episode["base_url"],
            "OPENAI_API_KEY": episode["api_key"],
            "ANTHROPIC_BASE_URL": episode["base_url"].removesuffix("/v1"),
            "ANTHROPIC_API_KEY": episode["api_key"],
            "JAXRL_MODEL": episode["model"],
            FOLDER_VARIABLE: marker,
        }
        reward = {"file": file, "url": episode["reward_url"], "key": episode["episode"]}
        data = json.dumps({**episode["task"], "reward": reward}).encode()
        # Do not await before the program is registered, or a stop would miss it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | variables,
        )
        _process_groups.add(process.pid)
        # Use threads: the program may write before it reads, and its children may outlive it.
        _threads.submit(_write_input, process.stdin, data)
        output_future = _threads.submit(_read_tail, process.stdout)
        exit_future = _threads.submit(process.wait)
        try:
            await asyncio.wrap_future(exit_future)
        finally:
            _kill_all(process.pid, marker)
        while not output_future.done():
            await asyncio.sleep(POLL_S)
            kill_by_marker(marker)  # also kill processes started in the meantime
        value = _read_reward(file)
        if process.returncode:
            raise RuntimeError(
                f"the program ended with {process.returncode}: {output_future.result()}"
            )
        return value

    return run_agent


def _read_reward(file: str) -> Any:
    """Read and delete the reward file of a program; return None if it does not exist."""
    if not os.path.isfile(file):  # opening a pipe may block forever
        return None
    data = Path(file).read_bytes()
    os.remove(file)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RuntimeError(f"the reward file is not JSON: {error}") from None


def _write_input(stream: Any, data: bytes) -> None:
    with contextlib.suppress(OSError), stream:  # the program may not read it
        stream.write(data)


def _read_tail(stream: Any) -> str:
    """Read a stream until it ends; return the last 2000 characters."""
    data = b""
    with stream:
        while chunk := stream.read1(MAX_OUTPUT):
            data = (data + chunk)[-MAX_OUTPUT:]
    return data.decode(errors="replace").strip()[-2000:]


_LIBRARIES = tuple(
    os.path.join(path, "") for name, path in sysconfig.get_paths().items() if "lib" in name
)
_threads = ThreadPoolExecutor(1 << 20)  # effectively unlimited, so no call waits
_process_groups: set[int] = set()  # process groups of programs


def _kill_all(group: int, marker: str) -> None:
    """Kill a process group and all other processes with `marker` in their environment."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    _process_groups.discard(group)
    kill_by_marker(marker)


def kill_by_marker(marker: str) -> None:
    """Kill all processes with `marker` in their environment, in any session.

    Does nothing on systems without `/proc`.
    """
    for _ in range(20):  # processes may start others in the meantime
        killed = []
        for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as file:  # empty for a dead process
                    is_marked = int(name) != os.getpid() and marker.encode() in file.read()
                if is_marked:
                    killed.append(name)
                    os.kill(int(name), signal.SIGKILL)
        if not killed:
            return
        time.sleep(0.01)


def _kill_agents_and_exit(folder: str) -> None:
    """Kill all processes that agents started, then exit without joining threads."""
    for group in [*_process_groups]:
        _kill_all(group, folder)
    shutil.rmtree(folder, ignore_errors=True)
    kill_by_marker(folder)
    os._exit(0)


def _exit_with_parent(parent: int, folder: str) -> None:
    """Exit when the parent process exits, even if an agent blocks the event loop."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    time.sleep(PARENT_POLL_S)  # time for the loop to exit by itself
    _kill_agents_and_exit(folder)


def _describe_error(error: BaseException) -> str:
    """Describe an error and its location, preferably the last line in the agent's files."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    agent_frames = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    frames = agent_frames or frames
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:2000] + where


class EpisodeRunner:
    """Runner for the episodes of this process."""

    def __init__(self, run_agent: RunAgent, send: Callable[[Mapping[str, Any]], None]):
        """Create a runner with no episodes.

        Args:
            run_agent: Coroutine function that runs an episode and returns its reward.
            send: Function that sends a message to the run.
        """
        self._run_agent, self._send = run_agent, send
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def start(self, episode: Mapping[str, Any]) -> None:
        """Start an episode as an asyncio task."""
        name = episode["episode"]
        self._tasks[name] = task = asyncio.ensure_future(self._run_agent(episode))
        task.add_done_callback(functools.partial(self._report_end, name))

    def stop(self, name: str) -> None:
        """Cancel an episode, which is then reported as ended."""
        if task := self._tasks.get(name):
            task.cancel()

    def _report_end(self, name: str, task: asyncio.Task[Any]) -> None:
        del self._tasks[name]
        try:
            outcome = {"reward": task.result()}
            json.dumps(outcome, allow_nan=False)
        except asyncio.CancelledError:
            outcome = {"error": "it was stopped"}
        except Exception as error:
            text = str(error) if type(error) is RuntimeError else _describe_error(error)
            outcome = {"error": text}
        self._send({"episode": name, **outcome})


async def main(agent: Mapping[str, Any], input_pipe: Any, output_pipe: Any) -> None:
    """Load the agent, report that it is ready, and run episodes until the input closes.

    Args:
        agent: Agent settings: `function`, `command` and `settings`.
        input_pipe: Input pipe from the run.
        output_pipe: Output pipe to the run.
    """

    def send(message: Mapping[str, Any]) -> None:
        output_pipe.write(json.dumps(message).encode() + b"\n")
        output_pipe.flush()

    folder = os.environ[FOLDER_VARIABLE]
    threading.Thread(target=_exit_with_parent, args=(os.getppid(), folder), daemon=True).start()
    try:
        if agent["command"]:
            if shutil.which(agent["command"][0]) is None:
                raise FileNotFoundError(f"there is no program {agent['command'][0]}")
            run_agent = wrap_program(agent["command"], folder)
        else:
            run_agent = wrap_function(load_function(agent["function"]), agent["settings"])
    except BaseException as error:
        send({"failed": _describe_error(error)})
        return
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 28)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), input_pipe)
    send({"ready": True})
    episodes = EpisodeRunner(run_agent, send)
    while line := await lines.readline():
        message = json.loads(line)
        if "end" in message:
            break
        if "stop" in message:
            episodes.stop(message["stop"])
        else:
            episodes.start(message)
    _kill_agents_and_exit(folder)


if __name__ == "__main__":
    # Child processes do not inherit duplicated descriptors. Programs that agents start therefore
    # cannot read the run's messages, which contain reward keys, or write to its pipe.
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), 0)
    os.dup2(2, 1)  # agents' output
    asyncio.run(main(json.loads(sys.argv[1]), *pipes))
