"""The interface of a tool, and the arguments that a call of it must have.

    class Weather:
        name = "weather"
        description = "The weather in a city."
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

        def call(self, arguments):
            return "rain"

A tool may raise anything: the model reads the error and the episode goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from streamrl.errors import StreamrlError
from streamrl.extension import did_you_mean

PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip
"""Types of JSON schema. Anything else in a schema is for the model to read, and for the tool itself to check."""


class ToolError(StreamrlError):
    """A call that cannot be answered. Its text is what the model reads."""


@runtime_checkable
class Tool(Protocol):
    """One tool; episodes of an actor share it, and calls may run side by side. `call` may be `async`."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""

    def call(self, arguments: Mapping[str, Any]) -> str | Awaitable[str]:
        """The answer for the model; the arguments have passed `check_arguments`."""
        ...


def schema(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates and model servers describe it: https://platform.openai.com/docs/guides/tools."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def required(tool: Tool) -> Sequence[str]:
    """Names of the arguments that every call must have."""
    return list(tool.parameters.get("required", ()))


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """Raise ToolError, naming the argument, for one that is missing, unknown or of a wrong type."""
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    for name in required(tool):
        if name not in arguments:
            raise ToolError(f"{tool.name}: the argument {name!r} is missing.")
    for name, value in arguments.items():
        if name not in properties:
            hint, known = did_you_mean(name, list(properties)), ", ".join(properties) or "none"
            raise ToolError(f"{tool.name}: unknown argument {name!r}.{hint} It takes: {known}.")
        wanted = properties[name].get("type")
        kinds = PYTHON_TYPES.get(wanted, (object,)) if isinstance(wanted, str) else (object,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and wanted in ("integer", "number")):
            raise ToolError(f"{tool.name}: the argument {name!r} must be of type {wanted}, got {value!r:.80}.")
