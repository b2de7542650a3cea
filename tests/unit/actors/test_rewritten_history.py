"""Chat templates and environments that rewrite the history: several sequences, each token-exact, in one trajectory."""

import logging
from itertools import pairwise

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.render import Renderer
from actors.rollout import run_group, sendable
from actors.settings import episode_rules
from actors.trajectory import conversation
from actors.trajectory.conversation import Conversation, rest_after
from streamrl.config.load import load_config
from streamrl.environment import ChatMessage, InputText, Step
from streamrl.messages import Limits, MemberStatus, Outcome, ReturnReason
from streamrl.messages.codec import unpack_ids
from tests.kit.loops import run
from tests.unit.actors.fakes import TableTask, installed_engine, lease, make_runner

LETTERS = "abcdefghijklmnopqrstuvwxyz .,:;!?0123456789ABCDEFGHIJ</>\n_{}\""
LIMITS = Limits(vocab_size=64, max_prompt_tokens=40, max_new_tokens=400, max_sequences=8)
TEMPLATE = """
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set said = m.content %}
{%- if m.role == 'assistant' and loop.index0 < last.user %}{% set said = said.split('</think>')[-1] %}{% endif %}
{{- '<start>' + m.role[0] + ':' + said.strip() + '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start>a:' }}{% endif %}
""".strip()
"""As Qwen3 documents its own: what an assistant thought before the last words of the user is left out."""


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Token 0 pads, 1 ends and 2 starts a turn, the others are one character each."""
    vocab = {"<pad>": 0, "<end>": 1, "<start>": 2, **{letter: place for place, letter in enumerate(LETTERS, 3)}}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", additional_special_tokens=["<start>"]
    )
    made.chat_template = template
    return made


TOKENIZER = tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def shown(token_ids) -> str:
    return TOKENIZER.decode(list(token_ids), skip_special_tokens=False)


def replies(*texts: str):
    """The texts in order, one a request."""
    left = list(texts)
    return lambda prompt, seed, version: ids(left.pop(0))


def talk(*answers: Step):
    """A task whose environment opens with `q` and answers with these steps."""
    def env():
        left = list(answers)
        return TableTask(lambda action: left.pop(0), lambda record: [ChatMessage("user", "q")])

    return env()


def says(role: str, content: str, reward: float = 0.0) -> Step:
    return Step(reward, done=False, messages=[ChatMessage(role, content)])


async def play(task, *texts: str, renderer: Renderer | None = None, **rules):
    engine = await installed_engine(replies(*texts))
    rules = {"max_prompt_tokens": 40, "max_new_tokens": 40, "max_turns": 5, **rules}
    group = await run_group(lease(), make_runner(task, engine, renderer=renderer or Renderer(TOKENIZER), **rules))
    if group.outcome == Outcome.COMPLETE:
        assert sendable(group, lease(), LIMITS) is group
    return group, [list(request.prompt_ids) for request in engine.requests]


def sequences(member) -> list[str]:
    """Each sequence as the learner reads it: its prompt, a bar, what follows."""
    starts = [0, *(one.start for one in member.sequences), len(member.token_ids) // 4]
    prompts = [member.prompt_ids, *(one.prompt_ids for one in member.sequences)]
    tokens = unpack_ids(member.token_ids)
    return [
        f"{shown(unpack_ids(prompt))}|{shown(tokens[start:end])}"
        for prompt, (start, end) in zip(prompts, pairwise(starts), strict=True)
    ]


# --- a chat template that leaves out earlier thinking ----------------------------------------------------------------


def test_a_template_that_strips_thinking_gives_a_sequence_for_each_of_the_users_turns(caplog, monkeypatch):
    monkeypatch.setattr(conversation, "_warned", set())
    caplog.set_level(logging.INFO, "streamrl.actor")

    async def work():
        for _ in range(2):
            task = talk(says("user", "u", 0.25), says("user", "v", 0.5), Step(1.0))
            group, read = await play(task, "<think>a</think>x<end>", "<think>b</think>y<end>", "z<end>")
            (member,) = group.members
            assert sequences(member) == [
                "<start>u:q<end><start>a:|<think>a</think>x<end>",
                "<start>u:q<end><start>a:x<end><start>u:u<end><start>a:|<think>b</think>y<end>",
                "<start>u:q<end><start>a:x<end><start>u:u<end><start>a:y<end><start>u:v<end><start>a:|z<end>",
            ]
            # The prompts are what the engine was given, and every sampled token stands there once.
            assert [list(unpack_ids(p)) for p in (member.prompt_ids, *(s.prompt_ids for s in member.sequences))] == read
            assert member.mask == ((0, 18), (18, 36), (36, 38))
            assert [turn.reward for turn in member.turns] == [0.25, 0.5, 1.0] and member.reward == 1.75
            assert member.status == MemberStatus.FINISHED

    run(work)
    (line,) = caplog.messages  # once, whatever the number of episodes
    assert line.startswith("The chat template rewrites earlier turns") and "env.history=append" in line


async def test_turns_that_the_template_repeats_stay_one_sequence():
    """Answers of tools leave the thinking in place, and so does the text of a user who follows a turn without any."""
    task = talk(says("tool", "7"), says("tool", "8"), says("user", "u"), Step(1.0))
    group, _ = await play(task, "<think>a</think>x<end>", "y", "<think>c</think>z<end>", "w<end>")
    (member,) = group.members
    assert sequences(member) == [
        "<start>u:q<end><start>a:|<think>a</think>x<end><start>t:7<end><start>a:y<end><start>t:8<end><start>a:"
        "<think>c</think>z<end>",
        "<start>u:q<end><start>a:x<end><start>t:7<end><start>a:y<end><start>t:8<end><start>a:z<end><start>u:u<end>"
        "<start>a:|w<end>",
    ]
    assert len(member.turns) == 4


@pytest.mark.shows("env.history")
async def test_env_history_append_keeps_the_thinking_in_one_sequence():
    for word, append in (("auto", False), ("append", True)):
        config = load_config(["experiment=quickstart", f"env.history={word}"])
        assert episode_rules(config, config.rollout.train.sampling).append_history is append

    task = talk(says("user", "u"), Step(1.0))
    group, _ = await play(task, "<think>a</think>x<end>", "y<end>", append_history=True)
    (member,) = group.members
    assert sequences(member) == [
        "<start>u:q<end><start>a:|<think>a</think>x<end><start>u:u<end><start>a:y<end>"
    ]


async def test_white_space_that_a_template_trims_is_no_rewriting():
    group, _ = await play(talk(says("user", "u"), Step(1.0)), "\n x \n<end>", "y<end>")
    (member,) = group.members
    assert sequences(member) == ["<start>u:q<end><start>a:|\n x \n<end><start>u:u<end><start>a:y<end>"]


@pytest.mark.parametrize(
    ("text", "beginning", "rest"),
    [
        ("ab cd", "ab", " cd"), ("ab cd", "ab ", "cd"), ("ab\ncd", "ab \n", "\ncd"), ("a b c", "ab", " c"),
        ("abc", "ab  ", "c"), ("ab", "ab", ""), ("ab", "abc", None), ("xb", "a", None), ("a", "", "a"),
        (" a", " ", "a"),
        ("ab\n\nc", "ab\n", "\nc"), ("abab", "a b", "ab"),
    ],
)
def test_what_a_text_adds_to_its_beginning(text, beginning, rest):
    assert rest_after(text, beginning) == rest


async def test_a_template_without_the_models_words_is_followed_or_refused():
    forgets = Renderer(tokenizer("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"))

    group, _ = await play(talk(says("user", "u"), Step(1.0)), "x<end>", "y<end>", renderer=forgets)
    assert sequences(group.members[0]) == ["q|x<end>", "qu|y<end>"]
    group, _ = await play(talk(says("user", "u")), "x<end>", renderer=forgets, append_history=True)
    assert group.reason == ReturnReason.ENV_ERROR and "set env.history=auto" in group.detail


# --- an environment that rewrites the context ------------------------------------------------------------------------


async def test_an_environment_may_give_the_whole_next_input():
    own = [ChatMessage("user", "only this")]
    task = talk(Step(0.5, done=False, context=own), Step(0.0, done=False, context=InputText("raw")), Step(1.0))
    group, _ = await play(task, "x<end>", "y<end>", "z<end>")
    (member,) = group.members
    assert sequences(member) == [
        "<start>u:q<end><start>a:|x<end>", "<start>u:only this<end><start>a:|y<end>", "raw|z<end>"
    ]
    assert [(turn.start, turn.end, turn.reward) for turn in member.turns] == [
        (0, 2, 0.5), (2, 4, 0.0), (4, 6, 1.0)
    ]


async def test_a_context_that_begins_with_all_that_was_said_goes_on_in_the_same_sequence():
    whole = [ChatMessage("user", "q"), ChatMessage("assistant", "x"), ChatMessage("user", "u")]
    group, _ = await play(talk(Step(0.0, done=False, context=whole), Step(1.0)), "x<end>", "y<end>")
    assert sequences(group.members[0]) == ["<start>u:q<end><start>a:|x<end><start>u:u<end><start>a:y<end>"]


@pytest.mark.parametrize("more", ["y", " or y"])
async def test_a_context_with_more_in_a_turn_that_the_model_had_ended_is_read_as_it_is(more):
    now = [ChatMessage("user", "q"), ChatMessage("assistant", f"x{more}"), ChatMessage("user", "u")]
    group, _ = await play(talk(Step(0.0, done=False, context=now), Step(1.0)), "x<end>", "z<end>")
    first = "<start>u:q<end><start>a:"
    assert sequences(group.members[0]) == [f"{first}|x<end>", f"{first}x{more}<end><start>u:u<end><start>a:|z<end>"]


async def test_messages_after_a_context_of_messages_belong_to_its_conversation():
    own = [ChatMessage("user", "n")]
    task = talk(Step(0.0, done=False, context=own), says("user", "u"), Step(1.0))
    group, _ = await play(task, "x<end>", "<think>b</think>y<end>", "z<end>")
    assert sequences(group.members[0])[1:] == [
        "<start>u:n<end><start>a:|<think>b</think>y<end>",
        "<start>u:n<end><start>a:y<end><start>u:u<end><start>a:|z<end>",
    ]


# --- budgets and edges -----------------------------------------------------------------------------------------------


async def test_the_prompts_of_all_sequences_count_against_the_tokens_of_a_trajectory():
    """The learner packs all of them in one pass: 12 + 18 tokens, then 19 of the second prompt and one new."""
    task = talk(says("user", "u"), Step(1.0))
    texts = ("<think>a</think>x<end>", "y<end>")
    whole = len(ids("<start>u:q<end><start>a:" + texts[0]))
    second = len(ids("<start>u:q<end><start>a:x<end><start>u:u<end><start>a:"))
    group, read = await play(task, *texts, max_tokens=whole + second + 1)
    assert len(read) == 2 and len(group.members[0].sequences) == 1
    assert unpack_ids(group.members[0].token_ids)[-1] == ids("y")[0]  # there was room for one token

    group, read = await play(talk(says("user", "u")), *texts, max_tokens=whole + second)
    (member,) = group.members
    assert len(read) == 1 and (member.status, member.finish) == (MemberStatus.TRUNCATED, "length")


async def test_a_turn_without_tokens_begins_no_sequence():
    task = talk(says("user", "u", 0.5), says("user", "v", 0.25), Step(1.0))
    group, _ = await play(task, "<think>a</think>x<end>", "", "z<end>")
    (member,) = group.members
    assert [one.partition("|")[2] for one in sequences(member)] == ["<think>a</think>x<end>", "z<end>"]
    assert [turn.reward for turn in member.turns] == [0.75, 1.0]


async def test_words_that_were_read_before_the_model_said_anything_belong_to_no_sequence():
    group, _ = await play(talk(Step(0.0, done=False, context=InputText("raw")), Step(1.0)), "", "z<end>")
    assert sequences(group.members[0]) == ["raw|z<end>"]


async def test_a_hub_of_an_earlier_release_is_not_sent_what_it_would_train_in_the_wrong_context():
    group, _ = await play(talk(says("user", "u"), Step(1.0)), "<think>a</think>x<end>", "y<end>")
    old = msgspec.structs.replace(LIMITS, max_sequences=1)
    back = sendable(group, lease(), old)
    assert back.outcome == Outcome.RETURNED and "consists of 2 sequences, the limit is 1" in back.detail


async def test_a_prefilled_answer_is_continued_and_is_part_of_the_prompt():
    begun = [ChatMessage("user", "q"), ChatMessage("assistant", "so")]
    group, _ = await play(TableTask(lambda action: Step(1.0), lambda record: begun), "x<end>")
    assert sequences(group.members[0]) == ["<start>u:q<end><start>a:so|x<end>"]


def test_the_text_of_a_conversation_is_what_the_model_saw():
    talked = Conversation(Renderer(TOKENIZER))
    talked.open([ChatMessage("user", "q")])
    talked.hear(ids("x<end>"))
    talked.answer(says("user", "u"))

    assert talked.text == "<start>u:q<end><start>a:x<end><start>u:u<end><start>a:"
    assert talked.ids == ids(talked.text)
