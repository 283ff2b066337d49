"""Environments of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers) as an agent.

`play` plays one episode: verifiers renders the prompts, runs the environment's tools and scores,
and its training client asks the endpoint for token ids. This file runs in the interpreter that
verifiers is installed for and needs nothing of jaxrl there. The command writes an environment's
tasks:

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

if __name__ == "__main__":  # else this file would be imported by the name of the package
    sys.path[:] = [one for one in sys.path if Path(one or ".").resolve() != Path(__file__).parent]

CHAT = "jaxrl_chat"
"""Name under which verifiers finds the chat loop below among its harnesses."""

NO_ANSWER = "judged by the environment"
"""Accepted answer of a task that has none of its own, which nothing reads."""

SPENT = "config.rollout.max_turns"
"""Named where the endpoint refuses an answer since the episode has had as many as it gets."""

_opened: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]] = (
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
    solved_from: float = 1.0,
    traces: str = "",
) -> dict[str, Any]:
    """Plays an episode of an environment; returns its reward.

    Many may run at once in an event loop. They share the environment, which is loaded once, and
    the processes of tools that its taskset declares. Tools that its tasks declare cost a process
    an episode.

    Args:
        task: a record that the command below wrote; `metadata["verifiers"]` is verifiers' task.
        base_url: address of the endpoint for this episode, ending in `/v1`.
        api_key: sent as `Authorization: Bearer`.
        model: name under which `GET /v1/models` lists the model.
        environment: module of a taskset, as "textarena", or a file, as "my/rooms.py".
        tokenizer: folder with `tokenizer.json` of the model that is trained.
        arguments: verifiers' `[env]` block without `taskset.id`, as
            `{"taskset": {"game": "Hangman-v0"}, "agent": {"max_turns": 8}}`.
        renderer: name of the renderer of the model's family, or its configuration, as
            `{"name": "qwen3", "thinking_retention": "all"}`.
        sampling: further fields of the requests, as `{"max_tokens": 256}`.
        solved_from: reward from which an episode counts as correct.
        traces: file to which verifiers' record of the episode is appended; "" writes none.

    Returns:
        `reward`, `is_correct` and `final_answer`, the last message of the model.

    Raises:
        ValueError: the task or the environment is not of the kind that can be trained.
        RuntimeError: verifiers says that the episode failed.
    """
    if not isinstance(data := task.get("metadata", {}).get("verifiers"), Mapping):
        raise ValueError(
            f"task {task.get('id')!r} has no metadata.verifiers; expected a record written by "
            f"`python {Path(__file__).name} {environment}`."
        )
    env = await opened(environment, arguments or {})
    kind = type(env.taskset).task_type()
    built = kind(kind.data_type().model_validate(data), env.config.taskset.task)
    renderer = {"name": renderer} if isinstance(renderer, str) else renderer
    asked = {"base_url": base_url, "renderer": renderer, "renderer_model_name": tokenizer}
    episode = await env.run_episode(built, context_of(model, asked, api_key, sampling or {}))
    if traces:
        record = json.dumps(episode.to_record(float_decimals=None), ensure_ascii=False)
        with open(traces, "ab", buffering=0) as file:  # a line at once: processes may share it
            file.write(f"{record}\n".encode())
    if not episode.ok:
        errors = [*episode.errors, *(error for one in episode.traces for error in one.errors)]
        raise RuntimeError(
            f"verifiers' episode of {environment} failed: "
            + "; ".join(f"{error.type}: {error.message}" for error in errors)
        )
    trace = trained_trace(episode, base_url)
    return {
        "reward": trace.reward,
        "is_correct": trace.reward >= solved_from,
        "final_answer": trace.last_reply,
    }


def context_of(
    model: str, asked: Mapping[str, Any], api_key: str, sampling: Mapping[str, Any]
) -> Any:
    """The model of an episode, as verifiers' training client is to ask it."""
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.types import SamplingConfig

    # verifiers reads keys from variables; one of an episode cannot stand there.
    headers = {"Authorization": f"Bearer {api_key}"}
    client = TrainClientConfig(**asked, headers=headers, api_key_var="")
    return ModelContext(model=model, client=client, sampling=SamplingConfig(**sampling))


def trained_trace(episode: Any, base_url: str) -> Any:
    """The trace of the one agent that asked the endpoint.

    Raises:
        ValueError: several did, or none.
    """
    asked = [one for one in episode.traces if one.agent.config.client.base_url == base_url]
    if len(asked) != 1:
        seats = ", ".join(one.agent.name for one in asked) or "none"
        raise ValueError(
            f"agents that asked the endpoint: {seats}; expected one, since an episode has one "
            "reward and all that its address samples is trained. Give the others a client of "
            "their own by `arguments`."
        )
    return asked[0]


async def opened(environment: str, arguments: Mapping[str, Any]) -> Any:
    """An environment with its servers up, loaded once an event loop; they end with the loop."""
    loop = asyncio.get_running_loop()
    known = _opened.setdefault(loop, {})
    name = json.dumps([environment, arguments], sort_keys=True)
    if name not in known:
        ready: asyncio.Future[Any] = loop.create_future()
        # Entered and left by one task, as its scopes ask.
        known[name] = ready, loop.create_task(_hold(environment, arguments, ready))
    ready, _ = known[name]
    try:
        return await asyncio.shield(ready)
    except Exception:
        known.pop(name, None)  # the next episode tries again
        raise


async def _hold(environment: str, arguments: Mapping[str, Any], ready: asyncio.Future[Any]) -> None:
    try:
        env = load(environment, arguments)
        async with env.serving():
            # Each episode has an address of its own, for which verifiers makes a client that lives
            # as long as the server between it and the agent: that server is the episode's too.
            env._interception = None
            ready.set_result(env)
            await asyncio.get_running_loop().create_future()
    except Exception as error:
        if ready.done():
            raise
        ready.set_exception(error)


def load(environment: str, arguments: Mapping[str, Any]) -> Any:
    """An environment whose agents run here: as subprocesses, chats in this process.

    Raises:
        ValueError: verifiers refuses the arguments.
        ModuleNotFoundError: there is no module of that name.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import (
        default_harness_id,
        env_config_type,
        load_environment,
        resolve_env_config,
    )

    _add_chat()
    environment = module_of(environment)
    block = json.loads(json.dumps(arguments))  # a copy, all of it
    block["taskset"] = {**block.get("taskset", {}), "id": environment}
    for name, field in env_config_type(environment, block.get("id", "")).model_fields.items():
        if isinstance(seat := field.default, AgentConfig):
            agent = block.setdefault(name, {})
            if "runtime" not in seat.model_fields_set:
                agent.setdefault("runtime", {"type": "subprocess"})
            if seat.harness is None and default_harness_id(environment) != environment:
                agent.setdefault("harness", {"id": CHAT})
    return load_environment(resolve_env_config(block))


def module_of(environment: str) -> str:
    """Name by which an environment is imported, of a file also by the processes of its tools.

    Raises:
        ValueError: there is no such file.
    """
    path = Path(environment)
    if path.suffix != ".py":
        return environment
    if not path.is_file():
        raise ValueError(f"environment is {environment!r}, and {path.resolve()} is no file.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*([others] if others else []), folder])
    return path.stem


def _add_chat() -> None:
    """Adds a chat loop in this process to the harnesses; verifiers' own start a program a turn."""
    if CHAT in sys.modules:
        return
    from openai import APIStatusError, AsyncOpenAI, omit
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harness import Harness
    from verifiers.v1.harnesses.utils.compaction import bound_tool_message, is_context_overflow
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.runtimes import ProgramResult

    class ChatHarness(Harness[HarnessConfig]):
        """Answers until a message calls no tool."""

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
                messages.extend(message_to_wire(one) for one in prompt or ())
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout}
                for name, url in mcp_urls.items()
            }
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
                        # Limits end a chat: of the environment, of the run, of the context.
                        is_spent = SPENT in str(error) or is_context_overflow(error)
                        if trace.stop_condition is None and not is_spent:
                            return ProgramResult(exit_code=1, stdout="", stderr=str(error))
                        break
                    message = completion.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        break
                    for call in message.tool_calls:
                        content = await self.answer(call.function, routes, connections)
                        result = {"role": "tool", "tool_call_id": call.id, "content": content}
                        messages.append(bound_tool_message(result))
            return ProgramResult(exit_code=0, stdout="", stderr="")

        async def answer(self, call: Any, routes: Any, connections: Any) -> Any:
            """The result of a tool; what is wrong with a call is told to the model."""
            try:
                arguments = json.loads(call.arguments or "{}")
            except json.JSONDecodeError as error:
                return f"error: the arguments are no JSON: {error}"
            if not isinstance(arguments, dict):
                return f"error: the arguments are {call.arguments}; expected an object"
            if call.name not in routes:
                return f"error: no tool {call.name!r}; there are {', '.join(routes)}"
            return await call_mcp(connections, routes, call.name, arguments)

    module = types.ModuleType(CHAT)
    vars(module).update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    sys.modules[CHAT] = module


def records(
    environment: str, arguments: Mapping[str, Any], num_tasks: int | None
) -> Iterator[dict[str, Any]]:
    """The tasks of an environment, as jaxrl reads them.

    Raises:
        ValueError: the tasks never end and `num_tasks` is None.
    """
    taskset = load(environment, arguments).taskset
    environment = module_of(environment)
    if not taskset.bounded and num_tasks is None:
        raise ValueError(f"the tasks of {environment} never end; say how many by --num=N.")
    fields = type(taskset).task_type().data_type().model_fields
    if lost := [name for name, field in fields.items() if field.exclude]:
        raise ValueError(
            f"its tasks keep {', '.join(lost)} out of their JSON; none can be written."
        )
    for task in itertools.islice(taskset, num_tasks):
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        prompt = data.get("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not messages:  # the environment speaks first
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
    """Writes tasks to the standard output."""
    parser = argparse.ArgumentParser(description="Writes the tasks of an environment as JSONL.")
    parser.add_argument("environment", help="module or file of a taskset, as textarena")
    parser.add_argument("--arguments", default="{}", metavar="JSON", help="as play takes them")
    parser.add_argument("--num", type=int, metavar="N", help="default: all")
    given = parser.parse_args(argv)
    try:
        for record in records(given.environment, json.loads(given.arguments), given.num):
            print(json.dumps(record, ensure_ascii=False))
    except (ValueError, ImportError) as error:
        sys.exit(f"{given.environment}: {error}")


if __name__ == "__main__":
    main()
