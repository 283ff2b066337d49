"""Pydantic models of the request bodies of all APIs."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    WrapValidator,
    model_validator,
)

from jaxrl.extras.serve.chats import ChatMessage, make_tool_call, parse_arguments
from jaxrl.extras.serve.errors import RequestError

MAX_STOPS, MAX_CHOICES = 16, 128

UNSUPPORTED = (
    # Sampling.
    "logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "length_penalty", "top_k", "min_p", "min_tokens", "best_of", "use_beam_search",
    "ignore_eos", "bad_words", "allowed_token_ids", "logits_processors", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format",
    # Prompt.
    "truncate_prompt_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template", "documents", "functions", "function_call", "thinking", "reasoning_effort",
    "verbosity", "mcp_servers", "container", "web_search_options", "features", "content_parts",
    # Output.
    "top_logprobs", "prompt_logprobs", "echo", "include_stop_str_in_output",
    "skip_special_tokens", "modalities", "audio", "output_format", "output_config",
)  # fmt: skip
"""Unsupported fields, which are rejected unless their value has no effect."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "thinking": ({"type": "disabled"},),
}
"""Values without effect, by field. For other fields, these are the falsy values."""


class RequestModel(BaseModel):
    """Base class of JSON objects in requests. Null fields count as missing."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: item for name, item in value.items() if item is not None}
        return value


RequestType = TypeVar("RequestType", bound=RequestModel)


def parse_body(data: bytes, model: type[RequestType]) -> RequestType:
    """Parse and validate the body of a request.

    Raises:
        RequestError: The body is not JSON, or invalid. The message names the first invalid field.
    """
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise _make_request_error(error) from None


def parse_value(value: Any, model: type[RequestType]) -> RequestType:
    """Validate a JSON value and convert it to `model`.

    Raises:
        RequestError: The value is invalid. The message names the first invalid field.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _make_request_error(error) from None


def _make_request_error(error: ValidationError) -> RequestError:
    first_error = error.errors(include_url=False, include_context=False)[0]
    location = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in first_error["loc"])
    param = "".join(location).removeprefix(".")
    is_missing = first_error["type"] == "missing"
    received = "missing" if is_missing else shorten_repr(first_error["input"])
    message = f"{param or 'the body'} is {received}. {first_error['msg']}."
    return RequestError(400, message, param=param or None)


def shorten_repr(value: Any) -> str:
    """Return a value's `repr`, shortened for an error message."""
    return reprlib.repr(value)[:80]


def make_unsupported_error(param: str, value: Any, expected: str = "nothing") -> RequestError:
    """Build the error for an unsupported field."""
    message = f"{param} is {shorten_repr(value)}, which is not supported; expected {expected}."
    return RequestError(400, message, param=param, code="unsupported_parameter")


def reject_unsupported_fields(fields: Mapping[str, Any] | None, prefix: str = "") -> None:
    """Reject unsupported fields, unless their value has no effect.

    Args:
        fields: Fields that the schema does not declare.
        prefix: Path of the object that contains the fields, with a trailing dot.

    Raises:
        RequestError: A field is not supported.
    """
    for name, value in (fields or {}).items():
        is_neutral = value in NEUTRAL_VALUES[name] if name in NEUTRAL_VALUES else not value
        if name in UNSUPPORTED and not is_neutral:
            raise make_unsupported_error(prefix + name, value)


def _wrap_in_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _wrap_in_text_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(_wrap_in_list),
    Field(max_length=MAX_STOPS),
]


class SamplingFields(RequestModel, extra="allow"):
    """Sampling settings common to all APIs."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops | None = None
    stop_token_ids: list[NonNegativeInt] = []
    max_tokens: PositiveInt | None = None


class ReplyFields(SamplingFields):
    """Output options of a chat request in OpenAI's and Anthropic's APIs."""

    stream: bool = False
    logprobs: bool = False
    return_token_ids: bool = False


class TextPart(RequestModel, extra="forbid"):
    """Text block of a message.

    The fields after `text` are ignored; unknown fields are rejected.
    """

    type: Literal["text", "input_text", "output_text"] = "text"
    text: str
    cache_control: Any = None
    annotations: Any = None
    citations: Any = None
    logprobs: Any = None


TextParts = Annotated[list[TextPart], BeforeValidator(_wrap_in_text_parts)]


def join_text(parts: Sequence[Any] | None) -> str:
    """Concatenate the text of all text parts."""
    return "".join(part.text for part in parts or () if isinstance(part, TextPart))


# OpenAI's chat completions


class FunctionCall(RequestModel, extra="forbid"):
    """Function name and arguments of a tool call. The arguments are JSON text or an object."""

    name: str
    arguments: Annotated[Any, BeforeValidator(parse_arguments)] = {}


class ToolCallParam(RequestModel, extra="forbid"):
    """Tool call in an assistant message."""

    id: str = ""
    type: str = "function"
    index: int = 0
    function: FunctionCall


class MessageParam(RequestModel, extra="allow"):
    """Chat message. The chat template receives undeclared fields."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextParts | None = None
    tool_calls: list[ToolCallParam] = []

    def to_message(self) -> ChatMessage:
        """Convert the message for the chat history."""
        role = "system" if self.role == "developer" else self.role
        message: ChatMessage = {"role": role, "content": join_text(self.content)}
        message |= self.model_extra or {}
        if self.tool_calls:
            message["tool_calls"] = [
                make_tool_call(call.function.name, call.function.arguments, call.id)
                for call in self.tool_calls
            ]
        return message


class FunctionDefinition(RequestModel):
    """Function that the model may call. `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ToolParam(RequestModel):
    """Tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


def _validate_tool(value: Any, validate: Any) -> Any:
    """Validate a tool, but return the client's object to preserve the order of its fields."""
    validate(value)
    return {name: item for name, item in value.items() if item is not None}


class StreamOptions(RequestModel):
    """Options of a streamed response."""

    include_usage: bool = False


class ChatCompletionRequest(ReplyFields):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[MessageParam], Field(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    tools: list[Annotated[ToolParam, WrapValidator(_validate_tool)]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    stream_options: StreamOptions = StreamOptions()
    return_tokens_as_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    def build_chat(self) -> list[ChatMessage]:
        """Convert the messages for the chat history."""
        return [message.to_message() for message in self.messages]

    def get_template_tools(self) -> Sequence[Any]:
        """Return the tools for the chat template, or none if tool calls are disabled."""
        return [] if self.tool_choice == "none" else self.tools


# Anthropic's messages


class ToolUseBlock(RequestModel):
    """Tool call in an assistant message."""

    type: Literal["tool_use"]
    id: str = ""
    name: str
    input: dict[str, Any] = {}


class ToolResultBlock(RequestModel):
    """Result of a tool call, in a user message."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextParts = []


class AnthropicMessage(RequestModel, extra="forbid"):
    """Message from the user or the model, as a list of content blocks."""

    role: Literal["user", "assistant"]
    content: Annotated[
        list[Annotated[TextPart | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]],
        BeforeValidator(_wrap_in_text_parts),
        Field(min_length=1),
    ]

    @model_validator(mode="after")
    def _check_blocks(self) -> AnthropicMessage:
        disallowed_type = ToolUseBlock if self.role == "user" else ToolResultBlock
        has_calls = False
        for block in self.content:
            if isinstance(block, disallowed_type):
                raise ValueError(f"expected no block {block.type} in a message of the {self.role}")
            has_calls = has_calls or isinstance(block, ToolUseBlock)
            if has_calls and isinstance(block, TextPart) and block.text.strip():
                raise ValueError("expected text before the tool calls of a message, not after one")
        return self

    def to_messages(self) -> list[ChatMessage]:
        """Convert to chat-history messages: one per tool result or series of text blocks."""
        if self.role == "assistant":
            message: ChatMessage = {"role": "assistant", "content": join_text(self.content)}
            blocks = [block for block in self.content if isinstance(block, ToolUseBlock)]
            if blocks:
                message["tool_calls"] = [make_tool_call(b.name, b.input, b.id) for b in blocks]
            return [message]
        messages: list[ChatMessage] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                text = join_text(block.content)
                messages.append(
                    {"role": "tool", "content": text, "tool_call_id": block.tool_use_id}
                )
            elif messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += join_text([block])
            else:
                messages.append({"role": "user", "content": join_text([block])})
        return messages


class ClientTool(RequestModel):
    """Definition of a tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: str
    description: str = ""
    input_schema: dict[str, Any] = {}

    def to_template_tool(self) -> dict[str, Any]:
        """Convert the tool to OpenAI's format."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
        }
        return {"type": "function", "function": function}


class ToolChoice(RequestModel):
    """Options that enable or disable tool calls and multiple calls per response."""

    type: Literal["auto", "none"] = "auto"
    disable_parallel_tool_use: bool = False


class CountTokensRequest(ReplyFields):
    """Body of `/v1/messages/count_tokens`."""

    system: TextParts | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    stop: Stops | None = Field(None, validation_alias="stop_sequences")
    tools: list[ClientTool] = []
    tool_choice: ToolChoice = ToolChoice()

    @property
    def parallel_tool_calls(self) -> bool:
        """True if a response may contain several tool calls."""
        return not self.tool_choice.disable_parallel_tool_use

    def build_chat(self) -> list[ChatMessage]:
        """Convert the messages for the chat history, with the system message first."""
        chat = [message for body in self.messages for message in body.to_messages()]
        if self.system is not None:
            chat.insert(0, {"role": "system", "content": join_text(self.system)})
        return chat

    def get_template_tools(self) -> Sequence[Any]:
        """Return the tools for the chat template, or none if tool calls are disabled."""
        is_disabled = self.tool_choice.type == "none"
        return [] if is_disabled else [tool.to_template_tool() for tool in self.tools]


class MessagesRequest(CountTokensRequest):
    """Body of `/v1/messages`."""

    max_tokens: PositiveInt


# Token ids


class GenerateSamplingFields(SamplingFields):
    """Sampling settings of `/inference/v1/generate`."""

    n: Literal[1] = 1


class GenerateRequest(RequestModel, extra="allow"):
    """Body of `/inference/v1/generate`."""

    token_ids: Annotated[list[NonNegativeInt], Field(min_length=1)]
    sampling_params: GenerateSamplingFields = GenerateSamplingFields()
    stream: Literal[False] = False
