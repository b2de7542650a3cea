"""Real chat templates: the ids are those of the whole rendering, and what is trained is what the model has to say."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from learner.supervised.records import Encoder
from streamrl.config.schema import DataConfig
from streamrl.environment import ChatMessage
from streamrl.errors import ConfigError, TaskError

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN25 = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{%- endif %}"
    + CHATML
)
QWEN3 = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' %}{%- set thought = '' %}{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- else %}{{- content }}"
    "{%- endif %}{{- '<|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}{%- for message in rest %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{%- if message['role'] == 'user' %}"
    "{%- if loop.first and system is defined %}{{- ' [INST] ' + system + '\n\n' + message['content'] + ' [/INST]' }}"
    "{%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}"
    "{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' }}"
    "{{ (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% else %}{% set content = "
    "message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + content + '<|end_of_sentence|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
OLMO = (
    "{{ eos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{% if not loop.last %}{{ '\n' }}{% elif message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|assistant|>\n' }}{% endif %}"
)
TALK = [
    ("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4, of course."), ("user", "And 4?\n"),
    ("assistant", "The same: 4, of course."),
]
FIRST, SECOND = TALK[2][1], TALK[4][1]
TEMPLATES = {  # template, beginning of sequence, end of sequence, special tokens, what is trained
    "llama3": (LLAMA3, "<|begin|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"],
               [FIRST + "<|eot_id|>", SECOND + "<|eot_id|>"]),
    "chatml": (CHATML, None, "<|im_end|>", ["<|im_start|>"], [FIRST + "<|im_end|>", SECOND + "<|im_end|>"]),
    "qwen2.5": (QWEN25, None, "<|im_end|>", ["<|im_start|>"], [FIRST + "<|im_end|>", SECOND + "<|im_end|>"]),
    "qwen3": (QWEN3, None, "<|im_end|>", ["<|im_start|>", "<think>", "</think>"],
              [FIRST + "<|im_end|>", "<think>\n\n</think>\n\n" + SECOND + "<|im_end|>"]),
    "mistral": (MISTRAL, "<s>", "</s>", [], [FIRST + "</s>", SECOND + "</s>"]),
    "gemma": (GEMMA, "<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"],
              [FIRST + "<end_of_turn>", SECOND + "<end_of_turn>"]),
    "phi3": (PHI3, "<s>", "<|endoftext|>", ["<|user|>", "<|assistant|>", "<|end|>", "<|system|>"],
             [FIRST + "<|end|>", SECOND + "<|end|>"]),
    "deepseek": (DEEPSEEK, "<|begin|>", "<|end_of_sentence|>", ["<|User|>", "<|Assistant|>"],
                 [FIRST + "<|end_of_sentence|>", SECOND + "<|end_of_sentence|>"]),
    # its generation prompt leaves the line break to the model
    "zephyr": (ZEPHYR, "<s>", "</s>", [], ["\n" + FIRST + "</s>", "\n" + SECOND + "</s>"]),
    # only the last turn ends with a token
    "olmo": (OLMO, None, "<|endoftext|>", ["<|user|>", "<|assistant|>", "<|system|>"],
             [FIRST, SECOND + "<|endoftext|>"]),
}


def encoder(tmp_path, template: str, bos: str | None = None, eos: str = "</s>", special: Sequence[str] = ()) -> Encoder:
    """An encoder whose tokenizer has a token for each byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, additional_special_tokens=list(special),
        chat_template=template,
    )
    tokenizer.save_pretrained(tmp_path)
    return Encoder(tmp_path, DataConfig())


def trained(made: Encoder, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """The texts of the trained runs."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [made.tokenizer.decode(ids[a:b], clean_up_tokenization_spaces=False) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_the_whole_rendering_and_answers_alone_are_trained(tmp_path, name):
    template, bos, eos, special, expected = TEMPLATES[name]
    made = encoder(tmp_path, template, bos, eos, special)
    plain = [{"role": role, "content": content} for role, content in TALK]

    ids, mask = made.encode([ChatMessage(*turn) for turn in TALK])

    assert ids.tolist() == made.tokenizer.apply_chat_template(plain, tokenize=True, return_dict=False)
    assert trained(made, ids, mask) == expected


def test_a_thought_is_trained_where_the_template_shows_it_and_not_where_it_drops_it(tmp_path):
    template, bos, eos, special, _ = TEMPLATES["qwen3"]
    made = encoder(tmp_path, template, bos, eos, special)
    answers = "<think>\nhm\n</think>\n\n4", "<think>\nagain\n</think>\n\n4"
    talk = [("user", "2 + 2?"), ("assistant", answers[0]), ("user", "And?"), ("assistant", answers[1])]

    ids, mask = made.encode([ChatMessage(*turn) for turn in talk])

    assert trained(made, ids, mask) == ["4<|im_end|>", answers[1] + "<|im_end|>"]


@pytest.mark.shows("data.train_roles")
@pytest.mark.parametrize(("roles", "expected"), [
    (["assistant"], ["call<|im_end|>", "it is 4<|im_end|>"]),
    (["tool"], ["4<|im_end|>"]),
    (["assistant", "tool"], ["call<|im_end|>", "4<|im_end|>", "it is 4<|im_end|>"]),
    (["user"], ["2 + 2?<|im_end|>"]),
])
def test_the_messages_of_the_named_roles_are_trained_on(tmp_path, roles, expected):
    encoder(tmp_path, CHATML, None, "<|im_end|>", ["<|im_start|>"])
    chosen = Encoder(tmp_path, DataConfig(train_roles=roles))
    talk = [("user", "2 + 2?"), ("assistant", "call"), ("tool", "4"), ("assistant", "it is 4")]

    ids, mask = chosen.encode([ChatMessage(*turn) for turn in talk])

    assert [text.rstrip("\n") for text in trained(chosen, ids, mask)] == expected


def test_roles_are_chosen_without_a_template_too(tmp_path):
    encoder(tmp_path, "")
    chosen = Encoder(tmp_path, DataConfig(train_roles=["tool"]))

    ids, mask = chosen.encode([ChatMessage("user", "q"), ChatMessage("tool", "4"), ChatMessage("assistant", "it is 4")])

    assert trained(chosen, ids, mask) == ["4"]


@pytest.mark.parametrize("roles", [[], ["assistent"]])
def test_roles_that_do_not_exist_are_refused(tmp_path, roles):
    encoder(tmp_path, CHATML)

    with pytest.raises(ConfigError, match="data.train_roles=.* must name one or more of assistant, tool, user, system"):
        Encoder(tmp_path, DataConfig(train_roles=roles))


def test_an_answer_like_its_surroundings_is_found_and_so_is_an_empty_one(tmp_path):
    made = encoder(tmp_path, CHATML, None, "<|im_end|>", ["<|im_start|>"])
    talk = [("user", "a"), ("assistant", "assistant\n"), ("user", "b"), ("assistant", "")]

    ids, mask = made.encode([ChatMessage(*turn) for turn in talk])

    assert trained(made, ids, mask) == ["assistant\n<|im_end|>", "<|im_end|>"]


def test_without_a_template_the_answer_and_the_end_of_sequence_follow_the_prompt(tmp_path):
    made = encoder(tmp_path, "")

    ids, mask = made.encode([ChatMessage("system", "s"), ChatMessage("user", "q?"), ChatMessage("assistant", "yes")])

    assert made.tokenizer.decode(ids) == "s\nq?yes</s>" and trained(made, ids, mask) == ["yes</s>"]


def test_a_conversation_that_the_template_refuses_is_named_with_its_reason(tmp_path):
    made = encoder(tmp_path, MISTRAL, "<s>")

    with pytest.raises(TaskError, match="roles must alternate.*data.chat_template"):
        made.encode([ChatMessage("user", "a"), ChatMessage("user", "b"), ChatMessage("assistant", "c")])


def test_an_answer_that_the_template_leaves_out_is_refused(tmp_path):
    made = encoder(tmp_path, "{{ messages[0].content }}")

    with pytest.raises(TaskError, match="message 2"):
        made.encode([ChatMessage("user", "a"), ChatMessage("assistant", json.dumps({}))])
