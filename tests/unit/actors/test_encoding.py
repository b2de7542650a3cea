"""Texts to ids: by the short way where a tokenizer is of the library's own class, else by its own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from actors.render import Renderer
from actors.trajectory.conversation import Conversation
from streamrl.environment import ChatMessage, Step
from tests.unit.actors.fakes import tokenizer as letters

TEXTS = st.lists(st.sampled_from([*"abcxyz 019", "<end>", "<pad>", "é", "\n"]), max_size=30).map("".join)


class Doubling(PreTrainedTokenizerFast):
    """A tokenizer with a way of its own."""

    def __call__(self, text, **options):
        return super().__call__(text + text, **options)


def with_limits(kind=PreTrainedTokenizerFast):
    """A tokenizer whose file truncates and pads."""
    backend = letters().backend_tokenizer
    backend.enable_truncation(3)
    backend.enable_padding(length=5)
    return kind(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


@settings(deadline=None, max_examples=60)
@given(TEXTS)
def test_ids_are_those_of_the_tokenizer_whatever_its_file_says_of_limits(text):
    given_, renderer = with_limits(), Renderer(with_limits(), apply_chat_template=False)
    assert renderer.encode(text) == list(given_(text, add_special_tokens=False)["input_ids"])


def test_a_tokenizer_with_a_way_of_its_own_keeps_it():
    assert Renderer(with_limits(Doubling), apply_chat_template=False).encode("ab") == letters()("abab")["input_ids"]


@pytest.mark.parametrize("text", ["\ud800", None])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(TypeError):
        Renderer(with_limits(), apply_chat_template=False).encode(text)


def test_what_a_loop_sets_on_its_tokenizer_changes_no_prompt():
    renderer = Renderer(letters(), chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    before = renderer.render([ChatMessage("user", "abcdefghijkl")])
    told = [{"role": "user", "content": "ab"}]
    assert renderer.users_tokenizer.apply_chat_template(told, tokenize=False) == "ab"
    for theirs in (renderer.users_tokenizer, renderer.users_tokenizer):
        assert len(theirs("abcdefghijkl", truncation=True, max_length=5)["input_ids"]) == 5
        theirs(["abc", "a"], padding="max_length", max_length=40)
        theirs.chat_template += "{{ 'more' }}"
        theirs.add_tokens(["abc"])
    assert renderer.render([ChatMessage("user", "abcdefghijkl")]) == before and len(before) == 12


def test_renderers_of_other_templates_share_a_tokenizer():
    shared = letters()
    one, other = (Renderer(shared, chat_template="{{ messages[0]['content'] }}" + end) for end in ("x", "y"))
    said = [ChatMessage("user", "a")]
    assert (one.input_text(said), other.input_text(said)) == ("ax", "ay") and shared.chat_template is None


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("declared", ["tokenizer", "generation"])
def test_the_end_of_a_turn_is_no_text_and_stands_once_in_the_next_prompt(special, declared):
    """An end of turn need not be a special token: rewards read the answer without it, templates write it once."""
    made = letters()
    made.add_tokens([AddedToken("<|im_end|>", special=special, normalized=False)])
    end = made.convert_tokens_to_ids("<|im_end|>")
    if declared == "tokenizer":
        made.eos_token = "<|im_end|>"
    template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    renderer = Renderer(made, chat_template=template, end_ids=[end] if declared == "generation" else ())
    answer = [*renderer.encode("12"), end]
    assert renderer.text(answer) == "12" == renderer.text(answer[:-1]) and renderer.text([]) == ""

    for said in (answer, answer[:-1]):  # ended, and cut by its length
        conversation = Conversation(renderer)
        conversation.open([ChatMessage("user", "a")])
        assert conversation.hear(said) == "12"
        conversation.answer(Step(0.0, done=False, messages=[ChatMessage("user", "b")]))
        whole = [ChatMessage("user", "a"), ChatMessage("assistant", "12"), ChatMessage("user", "b")]
        assert renderer.whole_text(conversation.ids) == renderer.input_text(whole)
        assert conversation.ids.count(end) == 3
