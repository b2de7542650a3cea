"""Messages become ids once; what the model said is never tokenized again."""

import pytest
from tokenizers import processors

from actors.render import Renderer, SharedPrompts, load_tokenizer
from streamrl.environment import ChatMessage, InputText
from streamrl.errors import TaskError
from tests.unit.engines.tiny_models import character_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] + ':' + message.content + '<end>!' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
USER = [ChatMessage("user", "hi")]


def chat_tokenizer():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def shown(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_the_chat_template_opens_the_models_turn():
    tokenizer = chat_tokenizer()
    assert shown(tokenizer, Renderer(tokenizer).render(USER)) == "u:hi<end>!a:"


def test_a_system_prompt_goes_first_unless_the_task_brings_one():
    tokenizer = chat_tokenizer()
    renderer = Renderer(tokenizer, system_prompt="be kind")
    assert shown(tokenizer, renderer.render(USER)).startswith("s:be kind<end>!u:hi")
    own = [ChatMessage("system", "mine"), *USER]
    assert shown(tokenizer, renderer.render(own)) == "s:mine<end>!u:hi<end>!a:"


@pytest.mark.parametrize(("last_token", "expected"), [(1, "!"), (9, "<end>!")])
def test_a_conversation_grown_turn_by_turn_is_the_one_rendered_whole(last_token, expected):
    tokenizer = chat_tokenizer()
    renderer = Renderer(tokenizer)
    more = renderer.follow(renderer.more_text([ChatMessage("user", "and now")]), last_token=last_token)
    assert shown(tokenizer, more) == expected + "u:and now<end>!a:"

    action = tokenizer("well", add_special_tokens=False)["input_ids"] + ([1] if expected == "!" else [])
    grown = renderer.render(USER) + action + more
    whole = [*USER, ChatMessage("assistant", "well"), ChatMessage("user", "and now")]
    assert grown == renderer.render(whole)


def test_a_template_that_drops_the_models_words_is_refused():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    with pytest.raises(TaskError, match="set env.history=auto"):
        Renderer(tokenizer).more_text(USER)


def test_without_a_template_contents_are_joined_and_the_tokenizers_own_start_token_is_kept():
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A <end>", special_tokens=[("<pad>", 0), ("<end>", 1)]
    )
    renderer = Renderer(tokenizer, apply_chat_template=True)
    assert shown(tokenizer, renderer.render(USER)) == "<pad>hi"
    assert renderer.more_text([ChatMessage("user", "ok")]) == "ok"


def test_apply_chat_template_false_ignores_the_template():
    tokenizer = chat_tokenizer()
    assert shown(tokenizer, Renderer(tokenizer, apply_chat_template=False).render(USER)) == "hi"


def test_text_leaves_special_tokens_out():
    tokenizer = character_tokenizer()
    ids = tokenizer("a b", add_special_tokens=False)["input_ids"]
    assert Renderer(tokenizer).text([*ids, 1]) == "a b"


def test_a_saved_tokenizer_is_loaded_from_its_folder(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert Renderer(loaded).render(USER) == Renderer(tokenizer).render(USER)


TOOLS = [{"function": {"name": "calculator"}}]
PROMPT = "call the calculator"


def test_tools_go_into_the_template_that_shows_them():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for tool in tools %}{{ tool.function.name + '!' }}{% endfor %}" + TEMPLATE
    assert shown(tokenizer, Renderer(tokenizer, tool_prompt=PROMPT).render(USER, TOOLS)) == "calculator!u:hi<end>!a:"


def test_tools_go_into_the_system_message_where_the_template_does_not_show_them():
    tokenizer = chat_tokenizer()
    renderer = Renderer(tokenizer, tool_prompt=PROMPT)
    assert shown(tokenizer, renderer.render(USER, TOOLS)) == "s:call the calculator<end>!u:hi<end>!a:"
    assert shown(tokenizer, renderer.render(USER)) == "u:hi<end>!a:"
    renderer = Renderer(tokenizer, tool_prompt=PROMPT, system_prompt="be kind")  # this tokenizer has no line break
    text = shown(tokenizer, renderer.render(USER, TOOLS))
    assert text == "s:be kind<pad><pad>call the calculator<end>!u:hi<end>!a:"
    plain = Renderer(tokenizer, tool_prompt=PROMPT, apply_chat_template=False)
    assert shown(tokenizer, plain.render(USER, TOOLS)) == "call the calculator<pad>hi"


def test_a_prompt_is_shared_only_by_those_that_are_asked_the_same():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ tools | length if tools else 0 }}" + TEMPLATE
    renderer = Renderer(tokenizer)
    prompts = SharedPrompts(renderer)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    asked = [
        (USER, ()), ([ChatMessage("system", "hi")], ()), (USER, [tool]), (InputText("hi"), ()), (USER, [tool, tool]),
        ([ChatMessage("user", ["no", "text"])], ()),  # cannot be compared: rendered by itself, and refused like before
    ]
    for messages, tools in asked[:-1] * 2:
        ids, text = prompts.render(messages, tools)
        assert (list(ids), text) == (renderer.render(messages, tools), renderer.input_text(messages, tools))
    assert prompts.render(USER)[0] is prompts.render([ChatMessage("user", "hi")])[0]
    tool["function"]["name"] = "much longer"  # changed after it was rendered
    tokenizer.chat_template = "{{ tools[0].function.name if tools }}" + TEMPLATE
    assert prompts.render(USER, [tool])[1] == Renderer(tokenizer).input_text(USER, [tool])
    with pytest.raises(TypeError):
        prompts.render(*asked[-1])
