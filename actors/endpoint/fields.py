"""The fields of every request: their types and ranges, and what becomes of them. All is checked before it is used.

    used        it decides the answer
    no effect   accepted, and changes nothing here
    default     accepted where it asks for what is done anyway, otherwise refused by name

Fields that stand nowhere below are left alone: SDKs send ones of their own. The header X-Streamrl-Ignored names them.
`python -m bench.requests` draws requests from these tables; `docs/endpoint_fields.md` shows them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, defstruct

from actors.engines.base import LARGEST_TOP_K
from actors.trajectory.client import GREEDY_BELOW, MAX_STOP_CHARS, MAX_STOPS

USED, NO_EFFECT, DEFAULT = "used", "no effect", "default"


def _field(kind: Any, says: str, use: str = USED) -> Any:
    return Annotated[kind if kind is None else kind | None, Meta(description=says, extra={"use": use})]


def _default(kind: Any, says: str) -> Any:
    return _field(kind, says, DEFAULT)


def _integer(low: int, high: int) -> Any:
    return Annotated[int, Meta(ge=low, le=high)]


def _role(*names: str) -> Any:
    return Annotated[Literal[names], Meta(description=", ".join(names[:-1]) + f" or {names[-1]}")]


LONGEST = (1 << 63) - 1
_STOP = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
_SCHEMA = dict[str, Any]

COUNT = _field(_integer(1, LONGEST), "a positive integer")
TEMPERATURE = _field(Annotated[float, Meta(ge=0, le=100)], f"a number from 0 to 100; less than {GREEDY_BELOW} is 0")
TOP_P = _field(Annotated[float, Meta(gt=0, le=1)], "a number above 0, up to 1")
TOP_K = _field(_integer(-1, LARGEST_TOP_K), f"an integer from 1 to {LARGEST_TOP_K}, or -1 or 0 for all tokens")
MIN_P = _field(Annotated[float, Meta(ge=0, le=1)], "a number from 0 to 1")
STOP = _field(
    _STOP | Annotated[list[_STOP], Meta(max_length=MAX_STOPS)],
    f"a text or a list of at most {MAX_STOPS} texts, of at most {MAX_STOP_CHARS} characters; empty ones are left out",
)
TRAIN = _field(bool, "false for a turn outside of the trajectory")
STREAM = _field(bool, "true or false")
MODEL = _field(Annotated[str, Meta(max_length=1000)], "a name, which the answer repeats", NO_EFFECT)
ANY = _field(Any, "anything", NO_EFFECT)
NULL = _default(None, "null")
ONE = _default(_integer(1, 1), "1")
EMPTY = _default(Annotated[dict[str, Any], Meta(max_length=0)], "{}")
NO_LIST = _default(Annotated[list[Any], Meta(max_length=0)], "[]")
FALSE = _default(Literal[False], "false")
ZERO = _default(Annotated[float, Meta(ge=0, le=0)], "0")


AUTO = _default(Literal["auto", "none"], "auto or none")
NO_LOGPROBS = _default(Annotated[float, Meta(ge=0, le=0)], "0: only sampled tokens have log-probs")
NEUTRAL = _default(Annotated[float, Meta(ge=1, le=1)], "1")


class _Sampled(Struct, kw_only=True):
    temperature: TEMPERATURE = None
    top_p: TOP_P = None
    top_k: TOP_K = None
    min_p: MIN_P = None


class _Turn(_Sampled, kw_only=True):
    train: TRAIN = None
    stream: STREAM = None
    model: MODEL = None


def _with(base: type[Struct], name: str, kinds: list[tuple[Any, str]]) -> type[Struct]:
    """The table with further fields that may be left out: their kind, and their names."""
    fields = [(one, kind, None) for kind, names in kinds for one in names.split()]
    return defstruct(name, fields, bases=(base,), kw_only=True)


class _Part(Struct):
    type: Literal["text"]
    text: str


# --- POST /v1/chat/completions ----------------------------------------------------------------------------------------


class _Function(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(Struct):
    function: _Function
    id: str | None = None
    type: Literal["function"] | None = None


class ChatTurn(Struct):
    role: _role("system", "developer", "user", "assistant", "tool")
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None


class _Shape(Struct):
    name: str
    description: str | None = None
    parameters: _SCHEMA | None = None


class _ChatTool(Struct):
    function: _Shape
    type: Literal["function"] = "function"


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _TextFormat(Struct):
    type: Literal["text"]


class _Chat(_Turn, kw_only=True):
    messages: Annotated[list[ChatTurn], Meta(min_length=1, description="a list of messages", extra={"use": USED})]
    tools: _field(list[_ChatTool], "a list of functions") = None
    max_tokens: COUNT = None
    max_completion_tokens: COUNT = None
    stop: STOP = None
    stream_options: _field(_StreamOptions, "an object with include_usage") = None
    logprobs: _field(bool, "true or false") = None
    return_token_ids: _field(bool, "true or false") = None
    response_format: _default(_TextFormat, 'an object of type "text": ask for another form in words') = None
    modalities: _default(list[Literal["text"]], '["text"]') = None
    skip_special_tokens: _default(Literal[True], "true") = None
    repetition_penalty: NEUTRAL = None
    top_logprobs: NO_LOGPROBS = None


ChatFields = _with(_Chat, "ChatFields", [
    (ANY, "metadata parallel_tool_calls seed service_tier store timeout user"),
    (NULL, "audio chat_template documents guided_choice guided_grammar guided_json guided_regex prediction"),
    (NULL, "prompt_logprobs structured_outputs truncate_prompt_tokens web_search_options"),
    (ONE, "n best_of"),
    (ZERO, "frequency_penalty presence_penalty min_tokens"),
    (EMPTY, "logit_bias chat_template_kwargs"),
    (NO_LIST, "functions bad_words"),
    (AUTO, "tool_choice function_call"),
    (FALSE, "ignore_eos echo continue_final_message use_beam_search"),
])


# --- POST /v1/responses -----------------------------------------------------------------------------------------------


class _AnyPart(Struct):
    type: str
    text: str | None = None


class _Item(Struct):
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: _role("system", "developer", "user", "assistant") | None = None
    content: str | list[_AnyPart] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | list[_AnyPart] | None = None


class _ResponsesTool(Struct):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: _SCHEMA | None = None


class _TextForm(Struct):
    type: str


class _Text(Struct):
    format: _TextForm | None = None


class _Responses(_Turn, kw_only=True):
    input: Annotated[
        str | Annotated[list[_Item], Meta(min_length=1)],
        Meta(description="a text or a list of items", extra={"use": USED}),
    ]
    instructions: _field(str, "a text") = None
    previous_response_id: _field(str, "the id of a response of this session") = None
    tools: _field(list[_ResponsesTool], "a list of functions") = None
    max_output_tokens: COUNT = None
    text: _field(_Text, 'an object whose format is of type "text"') = None
    metadata: _field(dict[str, str], "an object of texts, which the answer repeats", NO_EFFECT) = None


ResponsesFields = _with(_Responses, "ResponsesFields", [
    (ANY, "include max_tool_calls parallel_tool_calls prompt_cache_key reasoning safety_identifier service_tier store"),
    (ANY, "stream_options truncation user"),
    (NULL, "conversation prompt"),
    (AUTO, "tool_choice"),
    (FALSE, "background"),
    (NO_LOGPROBS, "top_logprobs"),
])


# --- POST /v1/messages ------------------------------------------------------------------------------------------------


class _Block(Struct):
    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[_Part] | None = None


class _Message(Struct):
    role: _role("user", "assistant", "system")
    content: str | list[_Block]


class _Tool(Struct):
    name: str
    input_schema: _SCHEMA
    type: Literal["custom"] | None = None
    description: str | None = None


class _Choice(Struct):
    type: Literal["auto", "none"]


class _OutputConfig(Struct):
    format: None = None


class _Messages(_Turn, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1, description="a list of messages", extra={"use": USED})]
    system: _field(str | list[_Part], "a text or a list of text parts") = None
    tools: _field(list[_Tool], "a list of tools with an input_schema") = None
    tool_choice: _default(_Choice, "auto or none") = None
    max_tokens: COUNT = None
    stop_sequences: STOP = None
    output_config: _default(_OutputConfig, "without a format: ask for it in words") = None


MessagesFields = _with(_Messages, "MessagesFields", [
    (ANY, "cache_control context_management metadata service_tier thinking user_profile_id"),
    (NULL, "container"),
    (NO_LIST, "mcp_servers"),
])


# --- POST /inference/v1/generate --------------------------------------------------------------------------------------

IDS = Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]], Meta(min_length=1)]


class _Sampling(_Sampled, kw_only=True):
    max_tokens: COUNT = None
    stop: STOP = None
    stop_token_ids: _field(
        Annotated[list[_integer(0, (1 << 31) - 1)], Meta(max_length=MAX_STOPS)], f"a list of at most {MAX_STOPS} ids"
    ) = None
    n: ONE = None
    logprobs: _default(_integer(0, 1), "0 or 1: only sampled tokens have log-probs") = None
    repetition_penalty: NEUTRAL = None


SamplingParams = _with(_Sampling, "SamplingParams", [
    (ANY, "detokenize include_stop_str_in_output seed skip_special_tokens spaces_between_special_tokens"),
    (NULL, "prompt_logprobs allowed_token_ids structured_outputs truncate_prompt_tokens"),
    (ZERO, "frequency_penalty presence_penalty min_tokens"),
    (EMPTY, "logit_bias"),
    (NO_LIST, "bad_words"),
    (FALSE, "ignore_eos"),
])


class _Tokens(Struct, kw_only=True):
    token_ids: Annotated[IDS, Meta(description="a list of ids", extra={"use": USED})]
    sampling_params: _field(SamplingParams, "an object") = None


TokensFields = _with(_Tokens, "TokensFields", [
    (TRAIN, "train"), (FALSE, "stream"), (MODEL, "request_id model"), (ANY, "cache_salt priority return_token_ids"),
])
