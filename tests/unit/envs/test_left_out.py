"""A message that a chat template does not write is refused by its role, and tools that it does not show are told."""

import logging

import pytest

from actors.render import Renderer
from envs.data import chat_template
from envs.data.shapes import RecordShape
from learner.supervised.records import AnswerShape, Encoder
from streamrl.config.schema import DataConfig
from streamrl.errors import TaskError
from tests.unit.envs.tool_templates import tool_tokenizer

GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
WRITES = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PARTS = "{{ m.role }}: {% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"


def loop(condition, writes=WRITES):
    return f"{{% for m in messages %}}{{% if {condition} %}}{writes}{{% endif %}}{{% endfor %}}{GENERATION}"


TEMPLATES = {  # the roles that each leaves out, or a place
    "zephyr": (loop("m.role in ['system', 'user', 'assistant']"), "3, of tool"),
    "mistral-v0.3": (loop("m.role != 'system'"), "4, of system"),
    "qwen3-vl": (loop("m.role != 'system' or loop.first"), "4, of system"),
    "vision": (loop("true", PARTS), "1, of user"),
    "spelled": (loop("true", "{{ m.role }}{% if m.role == 'tool' %}{{ m.content | list }}{% else %}{{ m.content }}"
                     "{% endif %}"), "3, of tool"),
    "upper": (loop("true", "{{ m.role }}{{ m.content | upper if m.role == 'tool' else m.content | trim }}"), None),
    "whole": (loop("true"), None),
}
TALK = [
    {"role": "user", "content": "Rain in Bonn?"}, {"role": "assistant", "content": "I look: 4."},
    {"role": "tool", "content": "4"}, {"role": "system", "content": "4"}, {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "No."},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_that_is_left_out_is_refused_also_where_its_text_stands_elsewhere(tmp_path, name):
    template, left_out = TEMPLATES[name]
    tool_tokenizer("qwen").save_pretrained(tmp_path)
    renderer = Renderer(tool_tokenizer("qwen"), chat_template=template)
    made = Encoder(tmp_path, DataConfig(chat_template=template))
    prompt, talk = RecordShape().messages({"messages": TALK[:-1]}), AnswerShape().messages({"messages": TALK})

    for read in (lambda: renderer.render(prompt), lambda: made.encode(talk)):
        for _ in range(2):  # a finding is kept
            if left_out is None:
                assert len(read()) > 1
                continue
            with pytest.raises(TaskError, match=f"leaves out message {left_out}.*data.chat_template"):
                read()


def test_a_template_that_refuses_a_role_is_named_with_its_remedy():
    template = loop("m.role in ['user', 'assistant'] or raise_exception('roles must alternate')")
    renderer = Renderer(tool_tokenizer("qwen"), chat_template=template)

    with pytest.raises(TaskError, match=r"user, assistant, tool \(roles must alternate\).*env.tool_use.role=user"):
        renderer.render(RecordShape().messages({"messages": TALK[:3]}))


SHOWS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(("opening", "shows"), [
    ("{# no tools here #}", False), ("{% if tools %}{% endif %}", False), (SHOWS, True),
    ("{% if messages[0].role == 'system' %}" + SHOWS + "{% endif %}", None),
])
@pytest.mark.parametrize("system", [True, False])
def test_tools_reach_the_model_by_the_template_or_the_prompt_or_their_loss_is_told(opening, shows, system, caplog):
    shows, tokenizer = system if shows is None else shows, tool_tokenizer("qwen")
    template = opening + loop("true")
    said = RecordShape().messages({"messages": [{"role": "system", "content": "Be kind."}] * system + TALK[:1]})
    with_prompt = Renderer(tokenizer, chat_template=template, tool_prompt="You may call weather.")
    without = Renderer(tokenizer, chat_template=template)
    chat_template._warned.clear()

    with caplog.at_level(logging.WARNING):
        text = with_prompt.input_text(said, [TOOL])
        assert text.count("weather") == 1 and not caplog.text and ("You may call" in text) != shows
        text = without.input_text(said, [TOOL])
    assert ("weather" in text) == shows != ("shows no tools" in caplog.text)


def test_a_template_that_speaks_of_developers_and_thinking_does_not_write_them(caplog):
    template = "{# developer_preamble: enable_thinking, or no reasoning #}" + loop("m.role in ['system', 'user']")
    renderer = Renderer(tool_tokenizer("qwen"), chat_template=template)
    chat_template._warned.clear()

    with caplog.at_level(logging.WARNING):
        text = renderer.input_text(RecordShape().messages({"messages": [
            {"role": "developer", "content": "Be brief."}, {**TALK[0], "reasoning_content": "Hm."},
        ]}))

    assert "<|im_start|>system\nBe brief." in text and "does not write reasoning_content" in caplog.text
