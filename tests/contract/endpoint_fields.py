"""The page of the fields of a request, from the tables that check them: `python -m tests.contract.endpoint_fields`."""

import msgspec

from actors.endpoint import fields
from actors.endpoint.reading import table

ROUTES = {
    "/v1/chat/completions": fields.ChatFields, "/v1/responses": fields.ResponsesFields,
    "/v1/messages": fields.MessagesFields, "/inference/v1/generate": fields.TokensFields,
}
HEAD = """# Fields of a request

Made from `actors/endpoint/fields.py`, whose types check every request of [the endpoint](endpoint.md). An illegal value
is 400, with the field's name and its legal values.
"""


def page() -> str:
    sections = {**ROUTES, "sampling_params": fields.SamplingParams}
    return HEAD + "".join(_section(title, one) for title, one in sections.items())


def _section(title: str, struct: type[msgspec.Struct]) -> str:
    known = {name: one for name, one in table(struct).items() if one.get("use")}
    parts = [f"\n## {title}\n"]
    for use, heading in ((fields.USED, "decides the answer"), (fields.DEFAULT, "accepted where it changes nothing")):
        rows = [f"| `{name}` | {one['description']} |" for name, one in known.items() if one["use"] == use]
        parts += ["\n".join([f"\n| {heading} | value |\n|---|---|", *rows, ""])] if rows else []
    ignored = [f"`{name}`" for name, one in known.items() if one["use"] == fields.NO_EFFECT]
    return "".join(parts) + (f"\nAccepted, without effect here: {', '.join(ignored)}.\n" if ignored else "")


if __name__ == "__main__":
    print(page(), end="")
