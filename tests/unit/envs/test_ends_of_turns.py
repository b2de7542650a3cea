"""Where a turn of the model ends, in templates that write more than one token there, or a call's name with its result.

Each small template has one trait of a published family, which its name says.
"""

import numpy as np
import pytest

from actors.render import Renderer
from actors.trajectory.conversation import Conversation
from envs.data.shapes import RecordShape
from learner.supervised.records import AnswerShape, Encoder
from streamrl.config.schema import DataConfig
from streamrl.environment import ChatMessage, Step
from tests.unit.envs.tool_templates import tool_tokenizer

END = "<|im_end|>"
LOOP = "{% for m in messages %}{% if m.role == 'assistant' %}ANSWER{% else %}<|im_start|>{{ m.role + '\n' }}"
LOOP += "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}HEADER{% endif %}"
ENDS = {  # header, and what ends a turn
    "llama-2": ("[/INST]", " " + END), "deepseek-coder": ("### Response:\n", f"\n{END}\n"),
    "cohere2": ("<|im_start|>assistant\n", f"<|said|>{END}"), "qwen": ("<|im_start|>assistant\n", f"{END}\n"),
    "glm": ("<|im_start|>assistant\n", ""),
}
CALLS = {  # what ends a call, and what comes before its result
    "gpt-oss": (f"<tool_call>NAME ARGUMENTS{END}", "<|im_start|>functions.NAME says "),
    "gemma-4": ("<tool_call>NAME ARGUMENTS</tool_call>", "<|im_start|>response:NAME "),
    "command-r": ("Action: NAME ARGUMENTS", "\n<|im_start|>system\n"),
    "kimi-k2": (f"ID ARGUMENTS{END}", "Return of ID "),
    "qwen": (f"<tool_call>NAME ARGUMENTS</tool_call>{END}\n", "<|im_start|>tool\n"),
}
FOOTERS = {"command-r": "\n<|im_start|>system\nWrite."}


def made_tokenizer():
    tokenizer = tool_tokenizer("qwen")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|said|>"]})
    return tokenizer


def encoder(folder, template):
    made_tokenizer().save_pretrained(folder)
    return Encoder(folder, DataConfig(chat_template=template))


def trained(made, messages):
    ids, mask = made.encode(AnswerShape().messages({"messages": messages}))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [made.tokenizer.decode(ids[a:b], clean_up_tokenization_spaces=False) for a, b in edges.reshape(-1, 2)]


def template_of(name):
    header, end = ENDS[name]
    answer = f"{header}{{{{ m.content + {end!r} }}}}"
    return LOOP.replace("ANSWER", answer).replace("HEADER", header)


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_every_turn_is_trained(tmp_path, name):
    talk = [{"role": role, "content": f"{role}{number}"} for number in range(2) for role in ("user", "assistant")]

    said = trained(encoder(tmp_path, template_of(name)), talk)

    assert said == [f"assistant{number}{ENDS[name][1].removesuffix(chr(10))}" for number in range(2)]


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("name", ENDS)
def test_the_end_that_the_model_sampled_stands_once(name, append):
    tokenizer, (_, end) = made_tokenizer(), ENDS[name]
    renderer = Renderer(tokenizer, chat_template=template_of(name))
    asked, again = ChatMessage("user", "Rain?"), ChatMessage("user", "Sure?")
    for sampled in ({end.strip(), END} if end else {END}):
        for answer in ("No.", ""):
            conversation = Conversation(renderer, append=append)
            conversation.open([asked])
            before = tokenizer.decode(conversation.ids)
            conversation.hear(renderer.encode(answer + sampled))
            conversation.answer(Step(0.0, done=False, messages=[again]))
            whole = tokenizer.decode(conversation.ids)
            rest = renderer.input_text([asked, ChatMessage("assistant", answer), again]).removeprefix(before + answer)
            assert whole == before + answer + sampled + rest.removeprefix(end.removesuffix("\n")).removeprefix(end)


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_trained_to_its_end_and_its_result_is_not(tmp_path, name, num_calls, thinks):
    written, opening = CALLS[name]
    for word, value in (("NAME", "c.function.name"), ("ID", "c.id")):
        written = written.replace(word, f"{{{{ {value} }}}}")
    written = written.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
    opening = opening.replace("NAME", "{{ messages[1].tool_calls[loop.index0 - 2].function.name }}")
    opening = opening.replace("ID", "{{ m.tool_call_id }}")
    header = "<|im_start|>assistant\n"
    template = (
        "{% for m in messages %}{% if m.tool_calls %}" + header
        + "{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }}{% endif %}{% for c in m.tool_calls %}"
        + written + "{% endfor %}{% elif m.role == 'tool' %}" + opening + "{{ m.content }}{% else %}<|im_start|>"
        "{{ m.role + '\n' + m.content }}<|im_end|>\n{% endif %}{% endfor %}" + FOOTERS.get(name, "") +
        "{% if add_generation_prompt %}" + header + "{% endif %}"
    )
    names = ["weather", "clock.time"][:num_calls]
    calls = [{"id": f"call{at}", "type": "function", "function": {"name": one, "arguments": {"city": "Bonn"}}}
             for at, one in enumerate(names)]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    turn |= {"reasoning_content": "Hm."} if thinks else {}
    results = [{"role": "tool", "content": "weather, no", "tool_call_id": one["id"]} for one in calls]
    talk = [{"role": "user", "content": "Rain?"}, turn, *results, {"role": "assistant", "content": "No rain."}]

    said = trained(encoder(tmp_path, template), talk)

    texts = [
        CALLS[name][0].replace("NAME", one).replace("ID", f"call{at}").replace("ARGUMENTS", '{"city": "Bonn"}')
        for at, one in enumerate(names)
    ]
    assert said == ["".join(texts).rstrip("\n"), f"No rain.{END}"]
    prompt = Renderer(tool_tokenizer("qwen"), chat_template=template).input_text(
        RecordShape().messages({"messages": talk[:-1]})
    )
    assert "".join(texts) in prompt
