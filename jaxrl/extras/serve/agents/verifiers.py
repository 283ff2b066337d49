"""Agent for environments of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers).

`play` runs one episode. verifiers renders the prompts, runs the environment's tools and computes
the reward; verifiers' training client requests token ids from the endpoint. This file does not
import jaxrl, so it runs in any Python environment with verifiers. As a script, it writes the tasks
of an environment:

    python verifiers.py ENVIRONMENT [--arguments=JSON] [--num=N] > tasks.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # otherwise, `import verifiers` would import this file
    folder = Path(__file__).parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != folder]

CHAT_HARNESS = "jaxrl_chat"
"""Name under which the chat loop below is registered as a harness."""

NO_ANSWER = "judged by the environment"
"""Placeholder answer of tasks without an answer."""

MAX_TURNS_TEXT = "config.rollout.max_turns"
"""Text in the endpoint's error message for an episode without remaining turns."""

_environments: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]] = (
    weakref.WeakKeyDictionary()
)


async def play(
    task: Mapping[str, Any],
    *,
    base_url: str,
    api_key: str,
    model: str,
    environment: str,
    tokenizer: str,
    arguments: Mapping[str, Any] | None = None,
    renderer: str | Mapping[str, Any] = "qwen3",
    sampling: Mapping[str, Any] | None = None,
    traces: str = "",
) -> dict[str, Any]:
    """Run an episode of an environment and return its reward.

    Episodes on the same event loop share the environment and its tool processes. Task-specific
    tools get one process per episode.

    Args:
        task: Task record written by the command; `metadata["verifiers"]` is verifiers' task.
        base_url: URL of the endpoint for this episode, ending in `/v1`.
        api_key: Bearer token for the endpoint.
        model: Model name to request, as in `GET /v1/models`.
        environment: Module of a taskset, such as "textarena", or a file, such as "my/rooms.py".
        tokenizer: Folder with the trained model's `tokenizer.json`.
        arguments: verifiers' `[env]` block without `taskset.id`, such as
            `{"taskset": {"game": "Hangman-v0"}, "agent": {"max_turns": 8}}`.
        renderer: Name of the model family's renderer, or a renderer config such as
            `{"name": "qwen3", "thinking_retention": "all"}`.
        sampling: Extra fields of the requests, such as `{"max_tokens": 256}`.
        traces: File to which verifiers' trace of the episode is appended; "" for none.

    Returns:
        A dict with `reward` and `final_answer` (the model's last message).

    Raises:
        ValueError: The task or the environment does not support training.
        RuntimeError: The episode failed.
    """
    if not isinstance(data := task.get("metadata", {}).get("verifiers"), Mapping):
        raise ValueError(
            f"task {task.get('id')!r} has no metadata.verifiers; expected a record written by "
            f"`python {Path(__file__).name} {environment}`."
        )
    env = await open_environment(environment, arguments or {})
    task_class = type(env.taskset).task_type()
    vf_task = task_class(task_class.data_type().model_validate(data), env.config.taskset.task)
    renderer = {"name": renderer} if isinstance(renderer, str) else renderer
    client = {"base_url": base_url, "renderer": renderer, "renderer_model_name": tokenizer}
    context = build_context(model, client, api_key, sampling or {})
    episode = await env.run_episode(vf_task, context)
    if traces:
        record = json.dumps(episode.to_record(float_decimals=None), ensure_ascii=False)
        # Without a buffer, each line is one write, since processes share the file.
        with open(traces, "ab", buffering=0) as file:
            file.write(f"{record}\n".encode())
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(
            f"verifiers' episode of {environment} failed: "
            + "; ".join(f"{error.type}: {error.message}" for error in errors)
        )
    trace = find_policy_trace(episode, base_url)
    return {"reward": trace.reward, "final_answer": trace.last_reply}


def build_context(
    model: str, client: Mapping[str, Any], api_key: str, sampling: Mapping[str, Any]
) -> Any:
    """Build verifiers' model context for an episode, with the training client."""
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.types import SamplingConfig

    # verifiers reads keys from environment variables, which all episodes share.
    headers = {"Authorization": f"Bearer {api_key}"}
    config = TrainClientConfig(**client, headers=headers, api_key_var="")
    return ModelContext(model=model, client=config, sampling=SamplingConfig(**sampling))


def find_policy_trace(episode: Any, base_url: str) -> Any:
    """Return the trace of the agent that called the endpoint.

    Raises:
        ValueError: No agent, or several agents, called the endpoint.
    """
    traces = [t for t in episode.traces if t.agent.config.client.base_url == base_url]
    if len(traces) != 1:
        names = ", ".join(trace.agent.name for trace in traces) or "none"
        raise ValueError(
            f"agents that called the endpoint: {names}; expected one, since an episode has one "
            "reward. Give the others a client of their own in `arguments`."
        )
    return traces[0]


async def open_environment(environment: str, arguments: Mapping[str, Any]) -> Any:
    """Return an environment whose servers are running; it is loaded once per event loop."""
    loop = asyncio.get_running_loop()
    loaded = _environments.setdefault(loop, {})
    name = json.dumps([environment, arguments], sort_keys=True)
    if name not in loaded:
        ready: asyncio.Future[Any] = loop.create_future()
        # The same task must enter and exit the environment's context managers.
        loaded[name] = ready, loop.create_task(_serve_environment(environment, arguments, ready))
    ready, _ = loaded[name]
    try:
        return await asyncio.shield(ready)
    except Exception:
        loaded.pop(name, None)  # the next episode tries again
        raise


async def _serve_environment(
    environment: str, arguments: Mapping[str, Any], ready: asyncio.Future[Any]
) -> None:
    """Serve an environment until cancelled; pass the environment or an error to `ready`."""
    try:
        env = load_env(environment, arguments)
        async with env.serving():
            # Each episode has a separate URL. verifiers keeps the client for a URL as long as the
            # interception server, so each episode also gets a separate server.
            env._interception = None
            ready.set_result(env)
            await asyncio.get_running_loop().create_future()
    except Exception as error:
        if ready.done():
            raise
        ready.set_exception(error)


def load_env(environment: str, arguments: Mapping[str, Any]) -> Any:
    """Load an environment that runs its agents locally, as subprocesses or in-process chats.

    Raises:
        ValueError: verifiers rejects the arguments.
        ModuleNotFoundError: The module does not exist.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import (
        default_harness_id,
        env_config_type,
        load_environment,
        resolve_env_config,
    )

    _register_chat_harness()
    environment = make_importable(environment)
    env_config = json.loads(json.dumps(arguments))  # a deep copy
    env_config["taskset"] = {**env_config.get("taskset", {}), "id": environment}
    for name, field in env_config_type(environment, env_config.get("id", "")).model_fields.items():
        if isinstance(default_agent := field.default, AgentConfig):
            agent = env_config.setdefault(name, {})
            if "runtime" not in default_agent.model_fields_set:
                agent.setdefault("runtime", {"type": "subprocess"})
            if default_agent.harness is None and default_harness_id(environment) != environment:
                agent.setdefault("harness", {"id": CHAT_HARNESS})
    return load_environment(resolve_env_config(env_config))


def make_importable(environment: str) -> str:
    """Make an environment's file importable, also in tool processes; return its module name.

    Raises:
        ValueError: The file does not exist.
    """
    path = Path(environment)
    if path.suffix != ".py":
        return environment
    if not path.is_file():
        raise ValueError(f"environment is {environment!r}; there is no file {path.resolve()}.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
        existing = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*([existing] if existing else []), folder])
    return path.stem


def _register_chat_harness() -> None:
    """Register an in-process chat loop, because verifiers' harnesses start a program per turn."""
    if CHAT_HARNESS in sys.modules:
        return
    from openai import APIStatusError, AsyncOpenAI, omit
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harness import Harness
    from verifiers.v1.harnesses.utils.compaction import bound_tool_message, is_context_overflow
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.runtimes import ProgramResult

    class ChatHarness(Harness[HarnessConfig]):
        """Chat loop that ends with the first message without tool calls."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages.extend(message_to_wire(message) for message in prompt or ())
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout}
                for name, url in mcp_urls.items()
            }
            # The environment serves its tools over MCP.
            async with contextlib.AsyncExitStack() as stack:
                client: Any = await stack.enter_async_context(
                    AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None)
                )
                tools, routes, connections = await connect_mcp({"mcpServers": servers}, stack)
                while True:
                    try:
                        completion = await client.chat.completions.create(
                            model=ctx.model, messages=messages, tools=tools or omit
                        )
                    except APIStatusError as error:
                        # A limit of the environment, the run or the context ends the chat.
                        is_out_of_budget = MAX_TURNS_TEXT in str(error) or is_context_overflow(
                            error
                        )
                        if trace.stop_condition is None and not is_out_of_budget:
                            return ProgramResult(exit_code=1, stdout="", stderr=str(error))
                        break
                    message = completion.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        break
                    for call in message.tool_calls:
                        content = await self.call_tool(call.function, routes, connections)
                        result = {"role": "tool", "tool_call_id": call.id, "content": content}
                        messages.append(bound_tool_message(result))
            return ProgramResult(exit_code=0, stdout="", stderr="")

        async def call_tool(self, call: Any, routes: Any, connections: Any) -> Any:
            """Call a tool; return the result, or an error message for the model."""
            try:
                arguments = json.loads(call.arguments or "{}")
            except json.JSONDecodeError as error:
                return f"error: the arguments are not JSON: {error}"
            if not isinstance(arguments, dict):
                return f"error: the arguments are {call.arguments}; expected an object"
            if call.name not in routes:
                return f"error: no tool {call.name!r}; expected one of {', '.join(routes)}"
            return await call_mcp(connections, routes, call.name, arguments)

    # verifiers imports a harness by its module name.
    module = types.ModuleType(CHAT_HARNESS)
    vars(module).update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    sys.modules[CHAT_HARNESS] = module


def iter_records(
    environment: str, arguments: Mapping[str, Any], num_tasks: int | None
) -> Iterator[dict[str, Any]]:
    """Yield the tasks of an environment as jaxrl task records.

    Raises:
        ValueError: The taskset is infinite and `num_tasks` is None.
    """
    taskset = load_env(environment, arguments).taskset
    environment = make_importable(environment)
    if not taskset.bounded and num_tasks is None:
        raise ValueError(f"the taskset {environment} is infinite; expected --num=N.")
    for task in itertools.islice(taskset, num_tasks):
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        prompt = data.get("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not messages:  # the environment starts the conversation
            messages = [{"role": "user", "content": task.data.name or f"task {task.data.idx}"}]
        if task.data.system_prompt:
            messages = [{"role": "system", "content": task.data.system_prompt}, *messages]
        yield {
            "id": f"{environment}/{task.data.idx}",
            "messages": messages,
            "answers": data.get("answer") or data.get("answers") or NO_ANSWER,
            "data_source": environment,
            "metadata": {"verifiers": data},
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tasks of an environment to stdout."""
    parser = argparse.ArgumentParser(description="Write the tasks of an environment as JSONL.")
    parser.add_argument("environment", help="module or file of a taskset, such as textarena")
    parser.add_argument("--arguments", default="{}", metavar="JSON", help="arguments of play")
    parser.add_argument("--num", type=int, metavar="N", help="default: all")
    flags = parser.parse_args(argv)
    try:
        for record in iter_records(flags.environment, json.loads(flags.arguments), flags.num):
            print(json.dumps(record, ensure_ascii=False))
    except (ValueError, ImportError) as error:
        sys.exit(f"{flags.environment}: {error}")


if __name__ == "__main__":
    main()
