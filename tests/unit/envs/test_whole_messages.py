"""Everything that a message holds reaches the chat template: RL prompts, SFT, DPO and evaluation, and what it calls is
trained.
"""

import asyncio
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from actors.render import Renderer
from actors.trajectory.chat_form import FunctionCall, ToolCall, Written, as_messages
from envs.adapters.reward_functions import DialogueEnv
from envs.data import chat_template
from envs.data.shapes import RecordShape
from envs.data_task import AnswerEnv, task_from_data
from envs.reward_file import written_reward
from envs.rewards.services import RewardModel
from learner.supervised.records import AnswerShape, Encoder, PairShape
from streamrl.config.load import load_config
from streamrl.config.schema import DataConfig
from streamrl.environment import ChatMessage, SingleTurnTask
from streamrl.errors import TaskError
from streamrl.messages import Turn
from streamrl.messages.codec import pack_ids, pack_logprobs
from streamrl.stream.export import TokenText, row
from tests.unit.envs.tool_templates import TEMPLATES, tool_tokenizer

ARGUMENTS = {"city": "Zürich", "days": 2}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def call(arguments=None, name="weather"):
    return {"id": "call12345", "type": "function", "function": {"name": name, "arguments": arguments or ARGUMENTS}}


ASKED = {"role": "user", "content": "Rain?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call()]}
RESULT = {"role": "tool", "content": "no", "tool_call_id": "call12345", "name": "weather"}
ANSWERED = {"role": "assistant", "content": "No rain."}
AGAIN = {"role": "user", "content": "Sure?"}
TALK = [ASKED, CALLED, RESULT, ANSWERED, AGAIN, {"role": "assistant", "content": "Yes."}]
JSON_ARGUMENTS = json.dumps(ARGUMENTS, ensure_ascii=False)
SAID = {  # what is trained of TALK
    "qwen": ["<tool_call>\n{\"name\": \"weather\", \"arguments\": " + JSON_ARGUMENTS + "}\n</tool_call><|im_end|>",
             "No rain.<|im_end|>", "Yes.<|im_end|>"],
    "llama-3.1": ["{\"name\": \"weather\", \"parameters\": " + JSON_ARGUMENTS + "}<|eom_id|>", "No rain.<|eot_id|>",
                  "Yes.<|eot_id|>"],
    "mistral": ["[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": " + JSON_ARGUMENTS
                + ", \"id\": \"call12345\"}]</s>",
                "No rain.</s>", "Yes.</s>"],
    "deepseek": ["<|calls_begin|><|call_begin|>function<|sep|>weather\n```json\n" + JSON_ARGUMENTS + "\n```<|call_end|>"
                 "<|calls_end|><|end|>", "No rain.<|end|>", "Yes.<|end|>"],
    "developer": ["<|call|>weather~" + JSON_ARGUMENTS + "<|return|>", "No rain.<|return|>", "Yes.<|return|>"],
}
TEXT_ARGUMENTS = ("deepseek", "developer")


def expected(tokenizer, messages, name, **options):
    """The library's rendering of these messages, arguments in the form that the template wants."""
    plain = with_json_arguments(messages) if name in TEXT_ARGUMENTS else messages
    if name == "deepseek":  # the library leaves out a content of None, which this template writes
        plain = [{**one, "content": one["content"] or ""} for one in plain]
    return tokenizer.apply_chat_template(plain, tokenize=False, **options)


def encoder(tmp_path, name):
    tool_tokenizer(name).save_pretrained(tmp_path)
    return Encoder(tmp_path, DataConfig())


def trained(made, ids, mask):
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [made.tokenizer.decode(ids[a:b], clean_up_tokenization_spaces=False) for a, b in edges.reshape(-1, 2)]


def with_json_arguments(messages):
    return [
        {**one, "tool_calls": [call(JSON_ARGUMENTS) for _ in one["tool_calls"]]} if one.get("tool_calls") else one
        for one in messages
    ]


FORMS = {
    "objects": TALK,
    "JSON": with_json_arguments(TALK),
    "text parts": [{**one, "content": [{"type": "text", "text": one["content"]}]} if one["content"] else one
                   for one in TALK],
    "no content": [{key: value for key, value in one.items() if value is not None} for one in TALK],
    "empty fields": [{"tool_calls": None, "name": None, **one} for one in TALK],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_with_calls_is_rendered_as_the_library_does_and_its_calls_are_trained(tmp_path, name, form):
    made, given = encoder(tmp_path, name), FORMS[form]
    tools = TOOLS if name != "developer" else ()
    options = {"tools": TOOLS} if tools else {}

    prompt = Renderer(tool_tokenizer(name)).input_text(RecordShape().messages({"messages": given[:-1]}), tools)
    ids, mask = made.encode(AnswerShape().messages({"messages": given}), tools)
    chosen, rejected = PairShape().pair({"prompt": given[:-1], "chosen": "Yes.", "rejected": [given[3]]})

    assert prompt == expected(made.tokenizer, TALK[:-1], name, add_generation_prompt=True, **options)
    assert made.tokenizer.decode(ids) == expected(made.tokenizer, TALK, name, **options)
    assert trained(made, ids, mask) == SAID[name]
    assert trained(made, *made.encode(chosen, tools)) == SAID[name]
    assert trained(made, *made.encode(rejected, tools))[::2] == [SAID[name][0], SAID[name][1]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_that_ends_with_a_call_is_trained_on_the_call(tmp_path, name):
    made = encoder(tmp_path, name)

    ids, mask = made.encode(AnswerShape().messages({"prompt": [ASKED], "completion": [CALLED]}))

    assert trained(made, ids, mask) == SAID[name][:1]


def test_words_and_several_calls_of_a_turn_are_trained_together(tmp_path):
    made = encoder(tmp_path, "qwen")
    turn = {"role": "assistant", "content": "I look.", "tool_calls": [call(), {"name": "now", "arguments": {}}]}

    ids, mask = made.encode(AnswerShape().messages({"messages": [ASKED, turn, RESULT, ANSWERED]}))

    text = "<tool_call>\n{\"name\": \"weather\", \"arguments\": " + JSON_ARGUMENTS + "}\n</tool_call>\n<tool_call>\n"
    text += "{\"name\": \"now\", \"arguments\": {}}\n</tool_call><|im_end|>"
    assert trained(made, ids, mask) == ["I look.\n" + text, "No rain.<|im_end|>"]


def test_thoughts_beside_the_content_are_trained_and_reach_the_prompt(tmp_path):
    made = encoder(tmp_path, "qwen")
    thinks = [{**CALLED, "reasoning_content": "I must look."}, {**ANSWERED, "reasoning_content": "So no."}]
    talk = [ASKED, thinks[0], RESULT, thinks[1]]

    ids, mask = made.encode(AnswerShape().messages({"messages": talk}))
    prompt = Renderer(made.tokenizer).input_text(RecordShape().messages({"messages": talk[:-1]}))

    assert trained(made, ids, mask) == [
        "<think>\nI must look.\n</think>\n\n" + SAID["qwen"][0], "<think>\nSo no.\n</think>\n\nNo rain.<|im_end|>"
    ]
    assert "<think>\nI must look.\n</think>\n\n<tool_call>" in prompt


def test_names_roles_and_unknown_fields_reach_the_template():
    qwen, developer = Renderer(tool_tokenizer("qwen")), Renderer(tool_tokenizer("developer"))
    talk = [{"role": "developer", "content": "Be brief."}, {**ASKED, "name": "Ann", "mood": "sad", "id": None}]
    messages = RecordShape().messages({"messages": talk})

    assert "<|im_start|>user Ann\nRain?" in qwen.input_text(messages)
    assert qwen.input_text(messages).startswith("<|im_start|>system\nBe brief.")  # it knows no developer
    assert developer.input_text(messages).startswith("<|developer|>Be brief.<|return|><|user|>Rain?[sad]")


@pytest.mark.parametrize(("message", "named"), [
    ({"role": "assistant", "content": None}, "tool_calls"),
    ({"role": "user"}, "tool_calls"),
    ({"role": "function", "content": "4"}, "role 'function'"),
    ({"role": "assistant", "content": None, "tool_calls": {"name": "f"}}, "give a list"),
    ({"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}, "in its tool_calls"),
    ({"role": "assistant", "content": None, "tool_calls": [call('{"city": ')]}, "arguments of its call of 'weather'"),
    ({"role": "assistant", "content": None, "tool_calls": [call("[1]")]}, "arguments of its call of 'weather'"),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}, "image_url"),
    ({"role": "user", "content": [{"type": "text"}]}, "text only"),
])
def test_what_cannot_reach_a_template_is_refused_by_its_name(message, named):
    with pytest.raises(TaskError, match=rf"field 'messages', message 2 .*{named}"):
        RecordShape().check({"messages": [ASKED, message, AGAIN]})


def test_a_template_or_a_join_that_writes_no_calls_refuses_them(tmp_path, caplog):
    chatml = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    messages = RecordShape().messages({"messages": TALK[:-1]})
    thinks = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    thought = RecordShape().messages({"messages": [thinks, ASKED]})
    for renderer in (Renderer(tool_tokenizer("qwen"), chat_template=chatml),
                     Renderer(tool_tokenizer("qwen"), apply_chat_template=False)):
        with pytest.raises(TaskError, match="tool_calls"):
            renderer.render(messages)
    made = encoder(tmp_path, "qwen")
    made.chat = False
    with pytest.raises(TaskError, match="tool_calls"):
        made.encode(messages)
    chat_template._warned.clear()
    with caplog.at_level(logging.WARNING):
        assert "2+2" not in Renderer(tool_tokenizer("qwen"), chat_template=chatml).input_text(thought)
    assert "does not write reasoning_content" in caplog.text


RESULTS = ["no", f"Error: {ARGUMENTS}", json.dumps(ARGUMENTS)]


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("content", [None, "", "I look."])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_result_that_repeats_the_arguments_changes_nothing(tmp_path, name, content, result, caplog):
    """Programs print them in Python's form, which a template that knows no JSON would write, too."""
    talk = [ASKED, {**CALLED, "content": content}, {**RESULT, "content": result}, ANSWERED, AGAIN]
    made, messages = encoder(tmp_path, name), RecordShape().messages({"messages": talk})
    chat_template._warned.clear()

    prompt = Renderer(made.tokenizer).input_text(messages)

    assert prompt == expected(made.tokenizer, talk, name, add_generation_prompt=True)
    assert made.render(messages)[0] == expected(made.tokenizer, talk, name)
    assert ("does not write the content" in caplog.text) == (content == "I look." and content not in prompt)


BESIDE = "{{ m.content if m.content else '' }}{% if not m.content %}CALLS{% endif %}"
LEAVES_OUT = {  # what a template writes of an assistant's message, and the contents with which it writes no call
    "none with content": (BESIDE, ["I look."]),
    "none with text": ("{% if m.content is string %}{{ m.content }}{% else %}CALLS{% endif %}", ["I look."]),
    "only the first": ("{% set c = m.tool_calls[0] %}{{ c.function.name }}{{ c.function.arguments }}", ["I look.", ""]),
}
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize("content", ["I look.", ""])
@pytest.mark.parametrize("kind", LEAVES_OUT)
def test_a_template_that_leaves_out_some_calls_refuses_those(tmp_path, kind, content):
    """Templates do so: DeepSeek R1's in messages with content, gpt-oss' all but the first."""
    form, refused = LEAVES_OUT[kind]
    template = "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}" + form.replace("CALLS", CALLS)
    template += "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    calls = [call(), call({"now": 1}, "clock")]
    messages = RecordShape().messages({"messages": [ASKED, {**CALLED, "content": content, "tool_calls": calls}, AGAIN]})
    renderer, made = Renderer(tool_tokenizer("qwen"), chat_template=template), encoder(tmp_path, "qwen")
    made.tokenizer.chat_template = template

    if content in refused:
        for refuses in (renderer.input_text, made.render):
            with pytest.raises(TaskError, match=r"message 2 has tool_calls.*leaves out one.*data\.chat_template"):
                refuses(messages)
    else:
        assert renderer.input_text(messages).count("weather") == 1 == renderer.input_text(messages).count("clock")


def test_training_and_evaluation_rewards_and_environments_get_the_whole_messages(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(
        json.dumps({"messages": [{**ASKED, "content": f"Rain {n}?"}, *TALK[1:-1]], "answer": "Yes."}) + "\n"
        for n in range(4)
    ))
    task = task_from_data(load_config([
        "experiment=quickstart", f"data.path={tmp_path}/a.jsonl", "reward.type=exact", "data.test_ratio=0.5"
    ]))
    for split in ("train", "test"):
        opening = task.env().reset(task.record(split, 0))
        opening = asyncio.run(opening) if asyncio.iscoroutine(opening) else opening
        assert [one.as_dict() for one in opening][1:] == TALK[1:-1], split

    seen = []
    record = {"messages": TALK[:-1], "answer": "Yes."}
    reward = written_reward(lambda messages, answer: seen.append(messages) or 1.0, RecordShape(), {}, "r")
    env = AnswerEnv(reward, "r", RecordShape())
    opening = env.reset(record)
    asyncio.run(env.step("Yes."))
    assert seen == [TALK]

    talk = DialogueEnv(reward, lambda messages: seen.append(messages) or [RESULT], "f", RecordShape())
    talk.reset(record)
    step = asyncio.run(talk.step("Yes."))
    assert seen[1] == TALK and [one.as_dict() for one in step.messages] == [RESULT]

    task = SingleTurnTask()
    assert [one.as_dict() for one in task.messages({"prompt": TALK[:-1]})] == TALK[:-1]

    posted = []

    class Model(RewardModel):
        def __init__(self):
            self._model = type("Settings", (), {"model": "m"})()

        async def _ready(self):
            class Service:
                async def post(self, body):
                    posted.append(body)
                    return {"score": 1.0}

            return Service()

    asyncio.run(Model()(record, "Yes.", opening))
    assert posted[0]["messages"] == TALK and f'"arguments": {JSON_ARGUMENTS}' in posted[0]["input"]


def test_a_program_s_own_messages_keep_their_fields_and_foreign_calls_are_the_templates():
    found = as_messages([*TALK[:-2], {**AGAIN, "name": "Ann"}], Written(), writes_calls=True)

    assert [one.as_dict() for one in found] == [*TALK[:-2], {**AGAIN, "name": "Ann"}]
    unnamed = {key: value for key, value in RESULT.items() if key != "name"}  # as the OpenAI client sends it
    assert as_messages([ASKED, CALLED, unnamed], Written(), writes_calls=True)[2].as_dict() == RESULT
    strange = {**unnamed, "tool_call_id": "another"}
    assert as_messages([ASKED, CALLED, strange], Written(), writes_calls=True)[2].as_dict() == strange
    written = as_messages(TALK[:-1], Written())[1]
    assert written == ChatMessage("assistant", chat_template.call_text(call()))
    texts = Written()
    texts.add("what I wrote", [ToolCall("call12345", FunctionCall("weather", JSON_ARGUMENTS))])
    own = as_messages(TALK[:-1], texts, writes_calls=True)[1]
    assert own == ChatMessage("assistant", "what I wrote")
    cut = as_messages([ASKED, {**CALLED, "tool_calls": [call('{"ci')]}], Written(), writes_calls=True)[1]
    assert '{"ci' in cut.content and not cut.fields


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_exported_answer_is_trained_with_the_tokens_that_were_sampled(tmp_path, name):
    made = encoder(tmp_path, name)
    tokenizer, answer = made.tokenizer, made.tokenizer("Yes.")["input_ids"][-4:] + [made.tokenizer.eos_token_id]
    prompt = Renderer(tokenizer).render(RecordShape().messages({"messages": TALK[:-1]}))
    member = SimpleNamespace(
        token_ids=pack_ids(answer), versions=(), index=0, reward=1.0, scores={}, finish="stop", status=0,
        turns=(Turn(0, len(answer), 1.0),), sequences=(), agents=(), logprobs=pack_logprobs([0.0] * len(answer)),
    )
    group = SimpleNamespace(
        prompt_ids=lambda member: pack_ids(prompt), sequence=1, outcome="trained", reason="", trained_at=0, group=None,
        arrived=SimpleNamespace(group_id=1, actor_id="a", prompt_index=0), finished_at=None,
    )

    found = row(group, member, TokenText(tokenizer.backend_tokenizer))

    assert found["answer"] == "Yes." and found["token_ids"] == answer
    made.chat = False  # the prompt is rendered already
    for text in ("Yes.", "Yes." + tokenizer.eos_token):  # as older exports have it
        ids, mask = made.encode(AnswerShape().messages({**found, "answer": text}))
        assert ids.tolist() == [*prompt, *answer] and ids[mask].tolist() == answer
