"""Families whose thoughts and calls are special tokens, or whose templates write results only after calls.

Each small template has the traits of a published one, which its name says; the oracle is the template itself, given the
conversation with thoughts and calls as fields.
"""

import json
import re

import pytest
from transformers import AddedToken

from actors.render import Renderer
from actors.rollout import run_group
from actors.trajectory.conversation import Conversation
from envs.registry import task_of
from envs.thoughts import spoken
from envs.tools.calculator import Calculator
from envs.tools.parsing import parse_auto, parse_written
from envs.tools.taught import merged_thought, unread_call
from envs.tools.tool import schema
from streamrl.config.load import load_config
from streamrl.environment import ChatMessage, Step
from tests.kit.loops import run
from tests.unit.actors.fakes import installed_engine, lease, make_runner
from tests.unit.actors.test_agents import AgentLoop, ask
from tests.unit.envs.tool_templates import tool_tokenizer
from tests.unit.envs.tools.test_tools import FAMILIES as WRITTEN

TOOLS = [schema(Calculator())]
SHOWN = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
REFUSES = "{{ raise_exception('a result without a call') }}"
THINKS = "m.thinking and not m.content"
HARMONY = (
    "{% set ns = namespace(name='') %}<|start|>system<|message|>" + SHOWN + "<|end|>{% for m in messages %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}{% set ns.name = c.name %}"
    "{% if " + THINKS + " %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json<|message|>"
    "{{ c.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('channels in the content') }}{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% elif m.role == 'tool' %}"
    "{% if not ns.name %}" + REFUSES + "{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GEMMA = (
    "<|turn>system\n" + SHOWN + "<turn|>\n{% for m in messages %}{% if m.role == 'assistant' %}<|turn>model\n"
    "{% if m.reasoning %}<|channel>thought\n{{ m.reasoning }}\n<channel|>{% endif %}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name + '{' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}:<|\"|>{{ v }}<|\"|>{% endfor %}}<tool_call|>{% endfor %}"
    "{% if m.tool_calls %}<|tool_response>{% for r in messages[loop.index:] if r.role == 'tool' %}"
    "response:{{ r.name }}{{ '{' }}value:<|\"|>{{ r.content }}<|\"|>}<tool_response|>{% endfor %}"
    "{% if m.content %}{{ m.content }}<turn|>\n{% endif %}"
    "{% else %}{{ m.content }}<turn|>\n{% endif %}{% elif m.role != 'tool' %}"
    "<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
)
LOOP = (
    SHOWN + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<minimax:tool_call>\n<invoke name=\"{{ c.function.name }}\">\n"
    "{% for k, v in c.function.arguments.items() %}<parameter name=\"{{ k }}\">{{ v }}</parameter>\n{% endfor %}"
    "</invoke>\n</minimax:tool_call>{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}"
    "{% if not messages[loop.index0 - 1].tool_calls %}REFUSED{% endif %}<|im_start|>tool\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nOPENED{% endif %}"
)
CALL = '<minimax:tool_call>\n<invoke name="calculator">\n<parameter name="expression">3+4</parameter>\n</invoke>\n'
MISTRAL = (
    SHOWN + "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"
)
SEED = (
    SHOWN + "{% for m in messages %}<seed:bos>{{ m.role }}\n{% if m.role == 'assistant' %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<seed:tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}"
    "</function>\n</seed:tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<seed:eos>{% endfor %}"
    "{% if add_generation_prompt %}<seed:bos>assistant\n{% endif %}"
)
COHERE = (
    SHOWN + "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>"
    "{% if m.thinking %}<|START_THINKING|>{{ m.thinking }}<|END_THINKING|>{% endif %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}<|START_ACTION|>["
    "{{ {'tool_name': c.name, 'parameters': c.arguments} | tojson }}]<|END_ACTION|>{% else %}"
    "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
    "{% else %}{{ m.role }}: {{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
FAMILIES = {  # template, its special tokens, ends of a turn, a call after a thought, an answer after a thought
    "gpt-oss": (
        HARMONY, ["<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"],
        ("<|call|>", "<|return|>"),
        '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.calculator '
        '<|constrain|>json<|message|>{"expression": "3+4"}<|call|>',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>",
    ),
    "gemma-4": (
        GEMMA, ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>',
                "<|tool_response>", "<tool_response|>"],
        ("<turn|>", "<|tool_response>"),
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:calculator{expression:<|"|>3+4<|"|>}<tool_call|>'
        "<|tool_response>",
        "<|channel>thought\nHm.\n<channel|>7<turn|>",
    ),
    "minimax-m2": (
        LOOP.replace("REFUSED", REFUSES).replace("OPENED", "<think>\n"), ["<|im_start|>", "<|im_end|>"],
        ("<|im_end|>",), f"Hm.\n</think>\n\n{CALL}</minimax:tool_call><|im_end|>", "Hm.\n</think>\n\n7<|im_end|>",
    ),
    "nemotron-3": (
        LOOP.replace("REFUSED", "").replace("OPENED", "<think>\n"), ["<|im_start|>", "<|im_end|>"],
        ("<|im_end|>",), f"Hm.\n</think>\n\n{CALL}</minimax:tool_call><|im_end|>", "Hm.\n</think>\n\n7<|im_end|>",
    ),
    "magistral": (
        MISTRAL, ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[TOOL_RESULTS]",
                  "[/TOOL_RESULTS]", "</s>"],
        ("</s>",), '[THINK]Hm.[/THINK][TOOL_CALLS]calculator[ARGS]{"expression": "3+4"}</s>', "[THINK]Hm.[/THINK]7</s>",
    ),
    "seed-oss": (
        SEED, ["<seed:bos>", "<seed:eos>", "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"],
        ("<seed:eos>",), "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=calculator>\n"
        "<parameter=expression>3+4</parameter>\n</function>\n</seed:tool_call><seed:eos>",
        "<seed:think>Hm.</seed:think>7<seed:eos>",
    ),
    "command-a": (
        COHERE, ["<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|START_THINKING|>",
                 "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
        ("<|END_OF_TURN_TOKEN|>",), '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[{"tool_name": "calculator", '
        '"parameters": {"expression": "3+4"}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>',
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>7<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ),
}  # fmt: skip
MARK = re.compile(r"</?(?!/?(?:function|parameter|invoke)>|｜DSML)[\w:|｜▁]+>|\[[A-Z_]+\]|｜DSML｜")
RESULT = ChatMessage("tool", "7", {"name": "calculator", "tool_call_id": "call00001"})


def renderer_of(family: str, **options) -> Renderer:
    template, special, ends, *_ = FAMILIES[family]
    tokenizer = tool_tokenizer("qwen")
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return Renderer(tokenizer, end_ids=tokenizer.convert_tokens_to_ids(list(ends)), **options)


def conversation(renderer: Renderer, *, append: bool) -> Conversation:
    found = Conversation(renderer, append=append)
    found.open([ChatMessage("user", "3+4?")], TOOLS)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_thoughts_and_calls_are_read_in_what_the_model_says(family):
    renderer, (*_, called, answered) = renderer_of(family), FAMILIES[family]
    talk = conversation(renderer, append=False)

    heard = talk.hear(renderer.encode(called))

    (call,) = parse_written(spoken(heard), TOOLS)
    assert (call.name, call.arguments) == ("calculator", {"expression": "3+4"})
    assert "Hm." in heard and "Hm." not in spoken(heard)
    assert spoken(conversation(renderer, append=False).hear(renderer.encode(answered))).strip() == "7"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_launch_has_nothing_to_tell_of_them(family):
    tokenizer = renderer_of(family).tokenizer

    assert merged_thought(tokenizer) == ""
    assert unread_call(tokenizer, TOOLS[0], lambda text: parse_written(text, TOOLS)) == ""


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", [WRITTEN[name] for name in WRITTEN if name != "gpt-oss"])
def test_calls_and_thoughts_are_read_whether_or_not_their_marks_are_special_tokens(text, special):
    tokenizer = tool_tokenizer("qwen")
    marks = sorted({*MARK.findall(text), "<think>", "</think>"})
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in marks], special_tokens=special)
    renderer = Renderer(tokenizer)

    for said in (text, f"I look. {text}", f"{text}\nSo it is.", f"<think>Hm.</think>\n{text}"):
        calls = parse_auto(spoken(renderer.text(renderer.encode(said))), [Calculator()])
        assert [(one.name, one.arguments) for one in calls] == [("calculator", {"expression": "3+4"})]
    only = f"<think>Hm. {text}</think>It is 7."
    assert spoken(renderer.text(renderer.encode(only))) == "It is 7."


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_result_follows_the_call_as_it_was_sampled(family, append):
    renderer, (*_, called, _) = renderer_of(family), FAMILIES[family]
    talk = conversation(renderer, append=append)
    prompt, sampled = talk.ids, renderer.encode(called)

    talk.hear(sampled)
    talk.answer(Step(0.0, done=False, messages=[RESULT]))

    assert talk.ids[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    function = {"name": "calculator", "arguments": {"expression": "3+4"}}
    thought = {**dict.fromkeys(["gpt-oss", "gemma-4", "command-a"], ("", "Hm.")),
               "magistral": ("[THINK]Hm.[/THINK]", ""), "seed-oss": ("<seed:think>Hm.</seed:think>", "")}  # fmt: skip
    content, thinking = thought.get(family, ("<think>\nHm.\n</think>\n\n", ""))
    said = {"role": "assistant", "content": content, "thinking": thinking, "reasoning": thinking,
            "tool_calls": [{"id": "call00001", "type": "function", "function": function}]}  # fmt: skip
    whole = renderer.tokenizer.apply_chat_template(
        [{"role": "user", "content": "3+4?"}, said, RESULT.as_dict()], tools=TOOLS, tokenize=False,
        add_generation_prompt=True,
    )
    assert renderer.tokenizer.decode(talk.ids) == whole


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_cut_gets_its_error_as_a_result(family, append):
    renderer, (*_, called, _) = renderer_of(family), FAMILIES[family]
    for said in (called[: called.rindex("3+4")], called[: called.rindex("<")]):
        talk = conversation(renderer, append=append)
        sampled = [*talk.ids, *renderer.encode(said)]
        talk.hear(renderer.encode(said))

        talk.answer(Step(0.0, done=False, messages=[ChatMessage("tool", "Error 17", RESULT.fields)]))

        assert "Error 17" in renderer.tokenizer.decode(talk.ids)
        assert not append or talk.ids[: len(sampled)] == sampled


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_is_paid_for_what_was_said_after_the_thought(tmp_path, family):
    (tmp_path / "train.jsonl").write_text('{"question": "3+4?", "answer": "7"}\n' * 20)
    task = task_of(load_config(["experiment=quickstart", f"data.path={tmp_path}/train.jsonl", "reward.type=math"]))
    renderer, (*_, answered) = renderer_of(family), FAMILIES[family]
    prompt = b'{"question": "3+4?", "answer": "7"}'

    async def earned(text: str) -> float:
        engine = await installed_engine(lambda *_: renderer.encode(text), vocab_size=400)
        runner = make_runner(task, engine, renderer=renderer, max_prompt_tokens=400, max_new_tokens=400)
        group = await run_group(lease(prompt=prompt), runner)
        return group.members[0].reward

    async def work() -> None:
        assert await earned(answered) == 1.0
        assert await earned(answered.replace("7", "8").replace("Hm.", "It is 7.")) == 0.0

    run(work)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_agent_that_sends_the_call_and_its_result_back_continues_the_sequence(family):
    renderer, (*_, called, answered) = renderer_of(family), FAMILIES[family]
    left = [called, answered]
    seen = []

    async def agent(session, asks):
        user = {"role": "user", "content": "3+4?"}
        first = (await ask(asks, user, tools=TOOLS)).json()["choices"][0]["message"]
        (call,) = first["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"expression": "3+4"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
        second = await ask(asks, user, first, result, tools=TOOLS)
        seen.append(second.json()["choices"][0]["message"]["content"])
        return 1.0

    async def work() -> None:
        engine = await installed_engine(lambda *_: renderer.encode(left.pop(0)), vocab_size=400)
        runner = make_runner(AgentLoop(agent), engine, renderer=renderer, max_prompt_tokens=600, max_new_tokens=400,
                             max_turns=4)  # fmt: skip
        group = await run_group(lease(), runner)
        (member,) = group.members
        assert not member.sequences and len(member.turns) == 2
        assert "7" in seen[0]

    run(work)


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("thought", [True, False])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt-oss"])
def test_words_beside_a_call_never_stand_after_its_result(family, thought, append):
    renderer, (*_, called, _) = renderer_of(family), FAMILIES[family]
    call = re.search(r"<\|tool_call>|\[TOOL_CALLS\]|\n<seed:tool_call>|<minimax:|<\|START_ACTION", called).start()
    before = called[:call] if thought or "</think>" in called else ""
    talk = conversation(renderer, append=append)
    talk.hear(renderer.encode(f"{before}I look.{called[call:]}"))

    talk.answer(Step(0.0, done=False, messages=[ChatMessage("tool", "Result 17", RESULT.fields)]))

    text = renderer.whole_text(talk.ids)
    assert text.count("Result 17") == 1 and "I look." not in text.partition("Result 17")[2]


CLOSED = (
    "{% for m in messages %}<|START_OF_TURN_TOKEN|>{{ m.role }}<|START_TEXT|>{{ m.content }}<|END_TEXT|>"
    "<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|>assistant"
    "<|START_TEXT|>{% endif %}"
)
HERMES2 = (
    "<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}"
    "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = HERMES2.replace("{% for t in tools %}{{ t | tojson }}{% endfor %}", "").replace("tool_response>", "user>")


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("template", [HERMES2, {"default": PLAIN, "tool_use": HERMES2}], ids=["one", "chosen by tools"])
@pytest.mark.parametrize("more", [RESULT, ChatMessage("user", "Sure?")])
def test_what_follows_is_written_by_the_template_that_conversations_with_tools_have(template, append, more):
    tokenizer = tool_tokenizer("qwen")
    tokenizer.chat_template = template
    renderer = Renderer(tokenizer)
    talk = conversation(renderer, append=append)
    said = '<tool_call>{"name": "calculator", "arguments": {"expression": "3+4"}}</tool_call>'

    talk.hear(renderer.encode(f"{said}<|im_end|>"))
    talk.answer(Step(0.0, done=False, messages=[more]))

    messages = [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": said}, more.as_dict()]
    whole = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert renderer.whole_text(talk.ids) == whole


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize(
    ("template", "closing", "ends"),
    [(tool_tokenizer("llama-3.1").chat_template, "<|eot_id|>", ["<|eom_id|>", "<|eot_id|>"]),
     (HARMONY, "<|end|>", ["<|return|>", "<|call|>"]), (GEMMA, "<turn|>", ["<eos>", "<turn|>"]),
     (CLOSED, "<|END_TEXT|><|END_OF_TURN_TOKEN|>", ["<|END_OF_TURN_TOKEN|>"]),
     (HERMES2.replace("in tools", "in tools or []"), "<|im_end|>", ["<|endoftext|>", "<|im_end|>"])],
    ids=["llama-3.1", "gpt-oss", "gemma-4", "command-a", "chatml"],
)  # fmt: skip
def test_a_turn_ends_once_whichever_end_the_model_chose(template, closing, ends, append):
    tokenizer = tool_tokenizer("qwen")
    tokenizer.chat_template = template
    special = sorted({*re.findall(r"<\|?\w+\|?>", template + "".join(ends)), *FAMILIES["gpt-oss"][1]})
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    renderer = Renderer(tokenizer, end_ids=tokenizer.convert_tokens_to_ids(ends))
    messages = [("user", "3+4?"), ("assistant", "It is 7."), ("user", "Sure?")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in messages], tools=TOOLS, tokenize=False,
        add_generation_prompt=True,
    )
    for end in ends:
        talk = conversation(renderer, append=append)
        begun = whole.removeprefix(talk.text).partition("It is 7.")[0]
        talk.hear(renderer.encode(f"{begun}It is 7.{end}"))

        talk.answer(Step(0.0, done=False, messages=[ChatMessage("user", "Sure?")]))

        follows = whole.partition("It is 7.")[2]
        assert follows.startswith(closing)
        assert renderer.whole_text(talk.ids).rpartition("It is 7.")[2] == end + follows.removeprefix(closing)


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("family", ["gpt-oss", "gemma-4", "nemotron-3"])
def test_two_calls_of_a_turn_get_both_results_also_where_a_message_has_one_call(family, append):
    """gpt-oss' template writes the first call of a message alone."""
    renderer, (*_, called, _) = renderer_of(family), FAMILIES[family]
    if family == "gpt-oss":
        both = called + "<|start|>assistant" + called[called.index("<|channel|>comm") :]
    elif family == "gemma-4":
        both = called.replace("<tool_call|>", "<tool_call|>" + called[called.index("<|tool_call>") :], 1)
    else:
        both = called.replace("</minimax", CALL.removeprefix("<minimax:tool_call>\n") + "</minimax")
    talk = conversation(renderer, append=append)
    assert len(parse_written(spoken(talk.hear(renderer.encode(both))), TOOLS)) == 2

    results = [ChatMessage("tool", f"Result {n}", {**RESULT.fields, "tool_call_id": f"call0000{n}"}) for n in (1, 2)]
    talk.answer(Step(0.0, done=False, messages=results))

    whole = renderer.tokenizer.decode(talk.ids)
    assert 0 < whole.index("3+4?") < whole.index("Result 1") < whole.index("Result 2")
