"""A template whose calls or thoughts are not read is told at the start of a run, and when an agent offers tools."""

import logging

import pytest

from actors.render import Renderer
from envs.tools.parsing import parse_written
from envs.tools.taught import merged_thought, unread_call
from learner.model.tiny import make_tiny_model
from learner.setup.preflight import check_run
from streamrl.config.load import load_config
from tests.unit.envs.tool_templates import TEMPLATES, tool_tokenizer

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}},
}}}  # fmt: skip
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALL = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}|{{ c.function.arguments }}</call>{% endfor %}"
SHOWS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.thinking %}<|im_start|>analysis{{ m.thinking }}<|im_end|>"
    "<|im_start|>final{% endif %}{{ m.content }}<|im_end|>{% endfor %}" + ASKS.replace("\n", "")
)
THINKS = "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}"


def says(after: str = "", before: str = "") -> str:
    content = before + "{{ m.content }}" + after
    return "{% for m in messages %}<|im_start|>{{ m.role }}\n" + content + "<|im_end|>\n{% endfor %}" + ASKS


def taught(name: str, template: str | None = None) -> tuple[bool, bool]:
    tokenizer = tool_tokenizer(name)
    call = unread_call(tokenizer, TOOL, lambda text: parse_written(text, [TOOL]), template)
    return bool(call), bool(merged_thought(tokenizer, template))


@pytest.mark.parametrize(("name", "unread"), [("qwen", False), ("llama-3.1", False), ("mistral", False)])
def test_templates_whose_calls_are_read_are_not_told(name, unread):
    assert name in TEMPLATES and taught(name) == (unread, False)


@pytest.mark.parametrize(("template", "told"), [
    (SHOWS + says(CALL), (True, False)),  # a form that nobody reads
    (says(CALL), (False, False)),  # it shows no tools: the system message describes them, with a form
    (SHOWS + says(), (False, False)),  # it writes no calls
    (CHANNELS, (False, True)),  # marks that decoding strips
    (says(before=THINKS), (False, False)),
    ("{{ raise_exception('no') }}", (False, False)),
])  # fmt: skip
def test_a_form_that_is_not_read_is_found_by_the_template_itself(template, told):
    assert taught("qwen", template) == told


@pytest.mark.timeout(120)
def test_a_launch_tells_both_before_it_starts(tmp_path):
    characters = "abcdefghij0123456789 =+?<>|/_{}\":,()'\nklmnopqrstuvwxyz"
    make_tiny_model(tmp_path / "m", characters=characters, max_positions=512)
    (tmp_path / "m" / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.thinking }}"
        f"{{{{ m.content }}}}{CALL}{{% endfor %}}{{% if add_generation_prompt %}}assistant:{{% endif %}}"
    )

    def told(*words: str) -> list[str]:
        said: list[str] = []
        model = f"policy.model_path={tmp_path / 'm'}"
        check_run(load_config(["experiment=quickstart", model, *words]), notify=said.append)
        return [kind for kind in ("'<call>calculator|", "around thoughts") for one in said if kind in one]

    assert told("env.tools=[calculator]", "env.max_turns=2") == ["'<call>calculator|", "around thoughts"]
    assert told() == ["around thoughts"] and told("data.apply_chat_template=false") == []


def test_the_endpoint_tells_it_once_at_the_first_request_with_tools(caplog):
    renderer = Renderer(tool_tokenizer("qwen"), chat_template=SHOWS + says(CALL))

    with caplog.at_level(logging.WARNING):
        for tools in ([], [7], [{"function": 7}], [TOOL], [TOOL]):
            renderer.tell_unread(tools)

    assert caplog.text.count("'<call>weather|") == 1 and "which the endpoint does not read" in caplog.text
