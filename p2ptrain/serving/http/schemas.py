"""Requests and answers of OpenAI's API, with their bounds. Bytes of clients become values in `read`, nowhere else.

The forms are those of https://platform.openai.com/docs/api-reference, with fields of vLLM's server beside them:
``top_k``, ``repetition_penalty``, ``ignore_eos`` and ``return_token_ids``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from p2ptrain.serving.http.problems import RequestError
from p2ptrain.serving.sampling import LEAST

T = TypeVar("T", bound="Settings")

MAX_CHOICES = 16
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 32
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TOKENS = 1 << 20
"""Bound of a number of tokens in a request; a model's context is smaller."""
MAX_SHOWN_CHARS = 100
"""Of a client's own words in an error."""
MAX_SEED = (1 << 63) - 1

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (), "background": (False,), "best_of": (1,), "conversation": (), "function_call": ("none", "auto"),
    "functions": ([],), "include": ([],), "metadata": ({},), "modalities": (["text"],),
    "parallel_tool_calls": (True, False), "prediction": (), "previous_response_id": (), "reasoning": ({},),
    "reasoning_effort": (), "response_format": ({"type": "text"},), "service_tier": ("auto", "default"),
    "store": (False,), "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "truncation": ("disabled",),
    "web_search_options": (),
}  # fmt: skip
"""Fields of OpenAI's API that are not supported, with the values that ask for nothing and are accepted."""


SCHEMA_FIELDS = ("schema", "parameters")
"""Fields with a JSON Schema, in which null is a value."""


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """``include_usage`` sends one more chunk at the end, with the numbers of tokens; no chunk has obfuscation."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model calls; ``arguments`` is JSON."""

    name: Name
    arguments: str


class Call(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of an answer, or of an earlier one."""

    id: Name
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation; one of the role ``tool`` is the result of a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Meta(max_length=256)] | UnsetType = UNSET
    name: Name | None = None
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_TOOLS)] = []
    tool_call_id: Name | None = None

    def __post_init__(self) -> None:
        if self.content is UNSET and not self.tool_calls:
            raise ValueError("Object missing required field `content`")
        if bool(self.tool_calls) and self.role != "assistant":
            raise ValueError("only a message of the assistant has tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a message of the role tool has a tool_call_id, and no other has")

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates take it; raise `RequestError` if a call's arguments are no object."""
        content = "" if self.content is UNSET else self.content
        content = content if isinstance(content, str) else "".join(part.text for part in content)
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        if self.name is not None and self.role == "tool":
            plain["name"] = self.name
        if self.tool_calls:
            plain["tool_calls"] = [
                {"id": each.id, "type": "function",
                 "function": {"name": each.function.name, "arguments": _object(each.function.arguments)}}
                for each in self.tool_calls
            ]  # fmt: skip
        return plain


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(400, "messages: a call's arguments are no text of a JSON object", "messages") from error


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON Schema; answers follow it whether it is called strict or not."""

    name: Name
    schema: dict[str, Any] = {}
    description: Annotated[str, Meta(max_length=4096)] = ""
    strict: bool = True


class JsonSchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call; ``parameters`` is a JSON Schema of an object."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: Annotated[str, Meta(max_length=16384)] = ""
    parameters: dict[str, Any] = {}
    strict: bool = True


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"] = "function"


class FunctionName(Struct, frozen=True, forbid_unknown_fields=True):
    name: Name


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """The function that the model has to call."""

    function: FunctionName
    type: Literal["function"] = "function"


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that all requests share."""

    model: Name
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=LEAST, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    seed: Annotated[int, Meta(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    ignore_eos: bool = False
    user: Annotated[str, Meta(max_length=256)] = ""


class GenerationRequest(Settings, frozen=True, kw_only=True):
    """Fields that chat and completion requests share."""

    max_tokens: TokenCount | None = None
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] = []
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIASES)] = {}
    return_token_ids: bool = False
    prompt_field: ClassVar[str] = "prompt"

    @property
    def asked(self) -> tuple[str, int | None]:
        """The field that bounds the answer's length, and its value."""
        return "max_tokens", self.max_tokens


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    response_format: ResponseFormat = TextFormat()
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    prompt_field: ClassVar[str] = "messages"

    @property
    def asked(self) -> tuple[str, int | None]:
        name, value = "max_completion_tokens", self.max_completion_tokens
        return (name, value) if value is not None else super().asked


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of ``/v1/completions``: a prompt or several, each a text or token ids."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1, max_length=MAX_TOKENS)]
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, whichever of four forms the field has; raise `RequestError` if it mixes them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [each for each in self.prompt if isinstance(each, int)]
        if len(tokens) == len(self.prompt):
            return [tokens]
        if tokens:
            raise RequestError(400, "prompt: mixes token ids with prompts: give one list of ids for each", "prompt")
        if len(self.prompt) > MAX_PROMPTS:
            raise RequestError(400, f"prompt: {len(self.prompt)} prompts are more than {MAX_PROMPTS}", "prompt")
        return [each for each in self.prompt if not isinstance(each, int)]


class InputPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of an item; one of an earlier answer has more fields, which are empty."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] = []
    logprobs: Annotated[list[Any], Meta(max_length=0)] = []


class InputItem(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation, a call of an earlier answer, or the result of a call."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | UnsetType = UNSET
    content: str | Annotated[list[InputPart], Meta(max_length=256)] | UnsetType = UNSET
    call_id: Name | UnsetType = UNSET
    name: Name | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    output: str | Annotated[list[InputPart], Meta(max_length=256)] | UnsetType = UNSET
    id: Name | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    phase: Name | None = None

    def __post_init__(self) -> None:
        for name in dict.fromkeys(name for fields in ITEM_FIELDS.values() for name in fields):
            if name in ITEM_FIELDS[self.type] and getattr(self, name) is UNSET:
                raise ValueError(f"Object missing required field `{name}`")
            if name not in ITEM_FIELDS[self.type] and getattr(self, name) is not UNSET:
                raise ValueError(f"an item of the type {self.type} has no {name}")


ITEM_FIELDS = {
    "message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}  # fmt: skip
"""Fields that an `InputItem` of each type has, and no other."""


class TextSchemaFormat(NamedSchema, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The form of an answer's text."""

    format: TextFormat | JsonObjectFormat | TextSchemaFormat = TextFormat()
    verbosity: Literal["medium"] = "medium"


class FunctionTool(Function, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call, in the newer form."""

    type: Literal["function"] = "function"


class NamedFunctionTool(FunctionName, frozen=True, forbid_unknown_fields=True):
    """The function that the model has to call, in the newer form."""

    type: Literal["function"] = "function"


class ResponseRequest(Settings, frozen=True, kw_only=True):
    """The body of ``/v1/responses``: a text or a conversation, whole each time."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    text: TextOptions = TextOptions()
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool = "auto"
    parallel_tool_calls: bool = True

    def chat(self) -> ChatRequest:
        """Return the chat request with the same answer."""
        messages = [ChatMessage("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            messages.append(ChatMessage("user", self.input))
        else:
            messages += _messages(self.input)
        format_: ResponseFormat = JsonObjectFormat()
        if isinstance(self.text.format, TextFormat):
            format_ = self.text.format
        elif isinstance(self.text.format, TextSchemaFormat):
            format_ = JsonSchemaFormat(self.text.format)
        choice = self.tool_choice
        return ChatRequest(
            **{name: getattr(self, name) for name in Settings.__struct_fields__},
            messages=messages, max_completion_tokens=self.max_output_tokens, response_format=format_,
            tools=[Tool(Function(tool.name, tool.description, tool.parameters, tool.strict)) for tool in self.tools],
            tool_choice=NamedTool(choice) if isinstance(choice, NamedFunctionTool) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
        )  # fmt: skip


def _messages(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Return items as messages. Calls belong to the message of the assistant before them."""
    messages: list[ChatMessage] = []
    for item in items:
        if item.type == "message":
            messages.append(ChatMessage(item.role, _joined(item.content)))  # type: ignore[arg-type]
        elif item.type == "function_call_output":
            messages.append(ChatMessage("tool", _joined(item.output), tool_call_id=item.call_id))  # type: ignore[arg-type]
        else:
            call = Call(item.call_id, CalledFunction(item.name, item.arguments))  # type: ignore[arg-type]
            last = messages.pop() if messages and messages[-1].role == "assistant" else ChatMessage("assistant", "")
            messages.append(msgspec.structs.replace(last, tool_calls=[*last.tool_calls, call]))
    return messages


def _joined(content: str | list[InputPart] | UnsetType) -> str:
    assert content is not UNSET
    return content if isinstance(content, str) else "".join(part.text for part in content)


class CachedTokens(Struct, frozen=True):
    """Tokens of prompts that were computed before."""

    cached_tokens: int = 0


class Usage(Struct, frozen=True):
    """Numbers of tokens; those of a prompt count once, whatever ``n`` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens = CachedTokens()


class TopLogprob(Struct, frozen=True):
    """A likely token, with its log-probability in nats."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    """A drawn token, with the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """Lists with one entry for each token; offsets count the text's characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


Finish = Literal["stop", "length", "tool_calls"]


class AnswerMessage(Struct, frozen=True):
    """An answer; ``content`` is null if it consists of tool calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish
    token_ids: list[int] | UnsetType = UNSET


class Answer(Struct, frozen=True, kw_only=True):
    """Fields of every answer; the fingerprint names the weights, equal ones give equal answers to equal seeds."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatAnswer(Answer, frozen=True, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class CallDelta(Call, frozen=True, kw_only=True):
    """A tool call in a stream; it comes whole."""

    index: int


class Delta(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Answer, frozen=True, kw_only=True):
    """One event of a chat's stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(Answer, frozen=True, kw_only=True):
    """An answer, or one event of a completion's stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class OutputText(Struct, frozen=True, kw_only=True):
    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class OutputCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A function that the model calls; ``arguments`` is JSON, and ``call_id`` stands in the result."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class ReasoningTokens(Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    """Numbers of tokens; there is no reasoning."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens_details: ReasoningTokens = ReasoningTokens()


class Incomplete(Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseAnswer(Struct, frozen=True, kw_only=True):
    """The answer of ``/v1/responses``; nothing of it is kept."""

    id: str
    created_at: int
    model: str
    system_fingerprint: str
    status: Status
    output: list[OutputMessage | OutputCall]
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    object: Literal["response"] = "response"
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: bool = False
    text: TextOptions
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool
    tools: list[FunctionTool]


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """One event of a response's stream; ``type`` says which fields there are."""

    type: str
    sequence_number: int
    response: ResponseAnswer | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputMessage | OutputCall | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class Model(Struct, frozen=True, kw_only=True):
    """The model that is served; ``max_model_len`` is its context in tokens."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "p2ptrain"


class ModelList(Struct, frozen=True, kw_only=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Health(Struct, frozen=True):
    status: str


def read(schema: type[T], body: bytes) -> T:
    """Convert the bytes of a request to a schema; raise `RequestError`, which names the field and its bound.

    A field that is null counts as absent.
    """
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise RequestError(400, "the body is no JSON object", code="invalid_json")
    known = {field.encode_name for field in msgspec.structs.fields(schema)}
    for name in [name for name in values if name not in known and name in NEUTRAL]:
        if values[name] is not None and values[name] not in NEUTRAL[name]:
            raise RequestError(400, f"{name}: this server does not support it: leave it out", name, "unsupported")
        del values[name]
    try:
        return msgspec.convert(_normal(values), schema, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        reason, field = _located(str(error))
        raise RequestError(400, f"{field}: {reason}" if field else reason, field or None, "invalid_value") from error


def _normal(value: Any) -> Any:
    """Return JSON without fields that are null, and with 2 for 2.0, which JSON Schema calls an integer."""
    if isinstance(value, dict):
        return {
            name: each if name in SCHEMA_FIELDS else _normal(each) for name, each in value.items() if each is not None
        }
    if isinstance(value, list):
        return [_normal(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _located(text: str) -> tuple[str, str]:
    """Return the reason in msgspec's message, and the field that it is about."""
    reason, _, place = text.partition(" - at `$")
    field = _shown(place.rstrip("`").lstrip("."))
    for beginning, told in (
        ("Object missing required field `", "is missing"),
        ("Object contains unknown field `", "is not a field of this request: leave it out"),
    ):
        if reason.startswith(beginning):
            name = _shown(reason.removeprefix(beginning).removesuffix("`"))
            return told, f"{field}.{name}" if field else name
    return _shown(f"{reason[:1].lower()}{reason[1:]}".replace("`", "")), field


def _shown(text: str) -> str:
    """Return text of a client as one short line."""
    line = text if text.isprintable() else repr(text)
    return line if len(line) <= MAX_SHOWN_CHARS else f"{line[:MAX_SHOWN_CHARS]}…"
