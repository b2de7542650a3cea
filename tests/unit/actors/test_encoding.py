"""Texts to ids: by the short way where a tokenizer is of the library's own class, else by its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from actors.render import Renderer
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
