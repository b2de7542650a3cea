"""Real chat templates: the ids are those of the whole rendering, and what is trained is what the model has to say."""

import copy
import json
import re
import shutil
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import learner.supervised.__main__
from actors.render import Renderer, load_tokenizer
from actors.reward_model.scorer import RewardScorer
from envs.data.dataset import open_dataset
from learner.checkpoint.checkpoint import ResumeState
from learner.data.packing import pack
from learner.model.networks import FrozenPolicy
from learner.model.policy import Policy, load_policy
from learner.model.tiny import make_tiny_model
from learner.publish.export import used_template
from learner.ranks.mesh import Ranks
from learner.supervised.methods import (
    Dpo,
    RewardModel,
    Sft,
    check_losses,
    export_reward_model,
    load_reward_network,
    preference_loss,
)
from learner.supervised.records import Encoder, PairShape, places_of, plain_template, row_of, shape_of
from learner.supervised.run import Opened, make_method, open_records
from streamrl.architectures.miniature import build_miniature
from streamrl.config.catalog import settings
from streamrl.config.load import load_config
from streamrl.config.schema import DataConfig, DpoConfig, DpoLoss, LearnerConfig, ReferenceConfig
from streamrl.environment import ChatMessage
from streamrl.errors import ConfigError, ControlError, TaskError
from streamrl.messages import Group, Member, MemberStatus, Outcome, ReturnReason, Sampling, Span, Turn
from streamrl.messages.codec import encode, pack_ids, pack_logprobs
from streamrl.stream.records import GroupArrived, RunStarted
from streamrl.stream.writer import LogWriter
from streamrl.verbs.stream import stream

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


SPECIAL = {"begun": "<s> $A", "begun and ended": "<s> $A </s>", "ended": "$A </s>", "bare": "$A"}


@pytest.mark.parametrize("form", SPECIAL)
def test_without_a_template_a_text_begins_as_actors_and_readers_of_reward_models_begin_it(tmp_path, form):
    tokenizer = encoder(tmp_path, "", "<s>").tokenizer
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=SPECIAL[form], special_tokens=[(one, tokenizer.convert_tokens_to_ids(one)) for one in ("<s>", "</s>")]
    )
    tokenizer.save_pretrained(tmp_path)
    made, actor = Encoder(tmp_path, DataConfig()), Renderer(load_tokenizer(tmp_path))
    talk = [ChatMessage("system", "s"), ChatMessage("user", "q?"), ChatMessage("assistant", "yes"),
            ChatMessage("user", "why?\n"), ChatMessage("assistant", "so</s>")]
    again = [ChatMessage("user", made.tokenizer.decode(actor.render(talk[:2]))), *talk[2:]]  # as a log's prompt is

    ids, mask = made.encode(talk)
    opened = Encoder(tmp_path, DataConfig(chat_template=plain_template(made.tokenizer)))

    assert ids.tolist()[: len(actor.render(talk[:2]))] == actor.render(talk[:2])
    assert trained(made, ids, mask) == ["yes</s>", "so</s>"]
    assert opened.encode(talk)[0].tolist() == made.encode(again)[0].tolist() == ids.tolist()


def test_a_conversation_that_the_template_refuses_is_named_with_its_reason(tmp_path):
    made = encoder(tmp_path, MISTRAL, "<s>")

    with pytest.raises(TaskError, match="roles must alternate.*data.chat_template"):
        made.encode([ChatMessage("user", "a"), ChatMessage("user", "b"), ChatMessage("assistant", "c")])


def test_an_answer_that_the_template_leaves_out_is_refused(tmp_path):
    made = encoder(tmp_path, "{{ messages[0].content }}")

    with pytest.raises(TaskError, match="message 2"):
        made.encode([ChatMessage("user", "a"), ChatMessage("assistant", json.dumps({}))])


DATA = DataConfig()
LOG_SIGMOID = torch.nn.functional.logsigmoid


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), characters="abcdefgh ", hidden_size=32, num_heads=2)


@pytest.fixture
def pairs() -> list[dict]:
    return [
        {"prompt": "ab", "chosen": "cdefg", "rejected": "hh", "margin": 0.5},
        {"prompt": "a b c", "chosen": "g", "rejected": "gfed"},
        {"chosen": [{"role": "user", "content": "h"}, {"role": "assistant", "content": "abc"}],
         "rejected": [{"role": "user", "content": "h"}, {"role": "assistant", "content": "abd"}]},
    ]


def token_logprobs(model, ids: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    """Log-probs of the trained tokens by a whole forward pass of one sequence."""
    ids = torch.tensor(ids, dtype=torch.int64)
    logits = model(input_ids=ids[None, :-1]).logits[0]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][torch.tensor(mask[1:])]


def gradients(module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    """The difference of whole gradients relative to their norm."""
    assert found.keys() == expected.keys()
    off = sum(((found[name].double() - expected[name].double()) ** 2).sum() for name in found) ** 0.5
    norm = sum((one.double() ** 2).sum() for one in expected.values()) ** 0.5
    assert norm > 1e-3 and off / norm < tolerance


def double(model_dir) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)


def exact(policy: Policy) -> Policy:
    """The policy in float64: in float32 the rounding of some processors is as large as the tolerance."""
    policy.model.double()
    return policy


def backward(method, rows) -> float:
    """The sum over several micro-batches, with its gradients."""
    micro_batches = pack(rows, 40)
    assert len(micro_batches) > 1
    total = 0.0
    for micro in micro_batches:
        loss, _ = method.loss(micro)
        loss.backward()
        total += float(loss.detach())
    return total


def test_sft_is_the_cross_entropy_of_the_assistants_tokens(model_dir):
    policy, encoder = exact(load_policy(model_dir)), Encoder(model_dir, DATA)
    method, truth = Sft(policy, encoder, DATA, max_tokens=24), double(model_dir)
    records = [
        {"prompt": "abc", "completion": "cba"}, {"question": "a" * 20, "answer": "b" * 20},  # cut after 24 tokens
        {"messages": [{"role": "system", "content": "h"}, {"role": "user", "content": "ab"},
                      {"role": "assistant", "content": "ba"}, {"role": "user", "content": "d"},
                      {"role": "assistant", "content": "e"}]},
    ]
    rows = [method.row(place, record) for place, record in enumerate(records)]
    assert [method.units(row) for row in rows] == [4, 3, 5]

    loss = backward(method, rows)
    expected = torch.zeros((), dtype=torch.float64)
    for record in records:
        ids, mask = encoder.encode(method.shape.messages(record))
        expected = expected - token_logprobs(truth, ids[:24], mask[:24]).sum()
    expected.backward()

    assert loss == pytest.approx(expected.item(), rel=1e-6)
    same(gradients(policy.model), gradients(truth))


@pytest.mark.parametrize("settings", [DpoConfig(), DpoConfig(beta=0.7, label_smoothing=0.2, sft_weight=0.3)])
@pytest.mark.shows("dpo.beta")
@pytest.mark.shows("dpo.label_smoothing")
@pytest.mark.shows("dpo.sft_weight")
def test_dpo_is_the_loss_of_its_paper(model_dir, pairs, settings):
    policy, frozen, encoder = exact(load_policy(model_dir)), exact(load_policy(model_dir)), Encoder(model_dir, DATA)
    with torch.no_grad():
        for parameter in frozen.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    truth, truth_frozen = double(model_dir), copy.deepcopy(frozen.model).double()
    truth_frozen.set_attn_implementation("eager")
    method = Dpo(policy, FrozenPolicy(frozen, name="reference"), encoder, DATA, settings, max_tokens=20)
    shape = method.shape
    rows = [method.row(place, record) for place, record in enumerate(pairs)]
    loss = backward(method, rows)

    expected = torch.zeros((), dtype=torch.float64)
    for record in pairs:
        (better, c), (_, b) = (
            scored(truth, truth_frozen, settings.beta, *encoder.encode(messages)) for messages in shape.pair(record)
        )
        smoothing = settings.label_smoothing
        expected = expected - (1 - smoothing) * LOG_SIGMOID(c - b) - smoothing * LOG_SIGMOID(b - c)
        expected = expected + settings.sft_weight * -better.mean()
    expected.backward()

    assert loss == pytest.approx(expected.item(), rel=1e-6)
    same(gradients(policy.model), gradients(truth))


def by_hand(settings: DpoConfig, means: list[torch.Tensor], ratios: list[torch.Tensor]) -> torch.Tensor:
    """IPO (2310.12036, with mean log-ratios), SimPO (2405.14734), ORPO (2403.07691) of the better and worse answer."""
    if settings.loss == "ipo":
        loss = (ratios[0] - ratios[1] - 1 / (2 * settings.beta)) ** 2
        return loss - settings.sft_weight * means[0]
    if settings.loss == "simpo":
        d = settings.beta * means[0] - settings.beta * means[1] - settings.margin
        s = settings.label_smoothing
        return (1 - s) * torch.log(1 + torch.exp(-d)) + s * torch.log(1 + torch.exp(d)) - settings.sft_weight * means[0]
    odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in means]
    ratio = odds[0] / odds[1]
    return -means[0] - settings.beta * torch.log(ratio / (1 + ratio))


@pytest.mark.shows("dpo.loss", "dpo.margin")
@pytest.mark.parametrize("settings", [
    DpoConfig(loss=DpoLoss.ipo, sft_weight=0.2),
    DpoConfig(loss=DpoLoss.simpo, beta=2.0, margin=0.5, label_smoothing=0.1, sft_weight=0.3),
    DpoConfig(loss=DpoLoss.orpo, beta=0.3),
], ids=lambda settings: settings.loss.name)
def test_the_other_losses_of_pairs_are_those_of_their_papers(model_dir, pairs, settings):
    policy, frozen, encoder = exact(load_policy(model_dir)), exact(load_policy(model_dir)), Encoder(model_dir, DATA)
    with torch.no_grad():
        for parameter in frozen.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    truth, truth_frozen = double(model_dir), copy.deepcopy(frozen.model).double()
    truth_frozen.set_attn_implementation("eager")
    reference = FrozenPolicy(frozen, name="reference") if settings.loss == "ipo" else None
    method = Dpo(policy, reference, encoder, DATA, settings, max_tokens=40)
    loss = backward(method, [method.row(place, record) for place, record in enumerate(pairs)])

    expected = torch.zeros((), dtype=torch.float64)
    for record in pairs:
        means, ratios = [], []
        for messages in method.shape.pair(record):
            mine, ratio = scored(truth, truth_frozen, 1.0, *encoder.encode(messages))
            means.append(mine.mean())
            ratios.append(ratio / len(mine))
        expected = expected + by_hand(settings, means, ratios)
    expected.backward()

    assert loss == pytest.approx(expected.item(), rel=1e-6)
    same(gradients(policy.model), gradients(truth))


def test_a_certain_answer_has_a_finite_loss_of_odds_and_settings_of_another_loss_are_refused():
    certain = torch.zeros(1, requires_grad=True)
    preference_loss(DpoConfig(loss=DpoLoss.orpo), certain, torch.tensor([-0.1])).sum().backward()
    assert certain.grad.isfinite().all()

    for dpo, reference, name in (
        (DpoConfig(margin=0.5), ReferenceConfig(), "dpo.margin"),
        (DpoConfig(loss=DpoLoss.ipo, label_smoothing=0.1), ReferenceConfig(), "dpo.label_smoothing"),
        (DpoConfig(loss=DpoLoss.orpo, sft_weight=0.1), ReferenceConfig(), "dpo.sft_weight"),
        (DpoConfig(loss=DpoLoss.simpo), ReferenceConfig(model_path="there"), "reference.model_path"),
    ):
        with pytest.raises(ConfigError, match=f"{name} does nothing with dpo.loss={dpo.loss}"):
            check_losses(dpo, reference)
    check_losses(DpoConfig(label_smoothing=0.1, sft_weight=0.1), ReferenceConfig(model_path="there"))


@pytest.mark.parametrize(("loss", "compares"), [("sigmoid", True), ("ipo", True), ("simpo", False), ("orpo", False)])
def test_only_a_loss_that_compares_loads_a_reference(model_dir, loss, compares):
    config = load_config([f"policy.model_path={model_dir}", f"dpo.loss={loss}", "publish.transports=[zmq]"])
    given = Opened(model_dir, None, Encoder(model_dir, DATA))
    method, _ = make_method(config, "dpo", given, ResumeState("alone"), Ranks())
    assert isinstance(method, Dpo) and (method._reference is not None) == compares


def scored(model, reference, beta: float, ids: np.ndarray, mask: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of an answer's tokens, and its reward."""
    mine = token_logprobs(model, ids, mask)
    with torch.no_grad():
        before = token_logprobs(reference, ids, mask)
    return mine, beta * (mine.sum() - before.sum())


def test_a_reward_model_is_bradley_terry_at_the_last_token_that_is_no_padding(model_dir, pairs):
    encoder = Encoder(model_dir, DATA)
    network = load_reward_network(
        model_dir, LearnerConfig(), Ranks(), dtype=torch.float32, gradient_checkpointing=False
    ).double()  # see `exact`
    torch.nn.init.normal_(network.score.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    truth = double(model_dir)
    head = network.score.weight.detach().double().clone().requires_grad_()
    method = RewardModel(network, encoder, DATA, max_tokens=29)
    rows = [method.row(place, record) for place, record in enumerate(pairs)]
    loss = backward(method, rows)

    expected = torch.zeros((), dtype=torch.float64)
    for record in pairs:
        scores = []
        for messages in method.shape.pair(record):
            ids = torch.tensor(encoder.encode(messages)[0], dtype=torch.int64)
            scores.append(truth.model(input_ids=ids[None]).last_hidden_state[0, -1] @ head[0])
        expected = expected - LOG_SIGMOID(scores[0] - scores[1] - record.get("margin", 0.0))
    expected.backward()

    assert loss == pytest.approx(expected.item(), rel=1e-6)
    found = gradients(network)
    assert torch.allclose(found.pop("score.weight").double(), head.grad, rtol=1e-4, atol=1e-6)
    same({name.removeprefix("decoder."): one for name, one in found.items()}, gradients(truth.model))


@pytest.mark.shows("data.max_tokens")
@pytest.mark.parametrize("kind", ["sft", "dpo", "train-reward-model"])
def test_records_have_a_length_of_their_own_of_which_several_fit_the_budget(model_dir, kind):
    def rows(**data):
        config = load_config([
            f"policy.model_path={model_dir}", "learner.max_tokens_per_device=64", "rollout.max_prompt_tokens=32",
            "rollout.train.sampling.max_new_tokens=32",
            *(f"data.{name}={value}" for name, value in data.items()),
        ])
        opened = Opened(model_dir, None, Encoder(model_dir, config.data))
        method, _ = make_method(config, kind, opened, ResumeState("run"), Ranks())
        return [method.row(place, record) for place, record in enumerate(4 * [record])]

    def lengths(row):  # of each side with its prompt; a reward model's ends with one token that means nothing
        starts, ends = [(0, row.prompt_ids), *row.later], [*(at for at, _ in row.later), len(row.token_ids)]
        ended = kind == "train-reward-model"
        return [len(prompt) + end - at - ended for (at, prompt), end in zip(starts, ends, strict=True)]

    record = {"prompt": "a" * 4, "completion": "b" * 70, "chosen": "b" * 70, "rejected": "c" * 70}
    sides = 1 if kind == "sft" else 2
    assert lengths(rows()[0]) == ([64] if sides == 1 else sides * [32 - (kind == "train-reward-model")])
    short = rows(max_tokens=8)
    assert lengths(short[0]) == sides * [8]
    assert len(pack(rows(), 64)) == 4 and len(pack(short, 64)) < 4, "several records are computed together"
    with pytest.raises(ConfigError, match="data.max_tokens=65 is more than"):
        rows(max_tokens=65)


@pytest.mark.parametrize("kind", ["sft", "dpo", "train-reward-model"])
@pytest.mark.parametrize("model_type", ["gpt2", "qwen3"])
def test_a_record_is_no_longer_than_the_positions_of_the_model(model_dir, tmp_path, kind, model_type):
    """GPT-2 has no embedding beyond them, and rotary ones were never trained there."""
    tokenizer = load_tokenizer(model_dir)
    kwargs = dict(vocab_size=len(tokenizer), max_position_embeddings=24, hidden_size=16, num_attention_heads=2,
                  num_hidden_layers=1, num_key_value_heads=2, head_dim=8, intermediate_size=16,
                  eos_token_id=tokenizer.eos_token_id, pad_token_id=0)  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **kwargs)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    record = {"prompt": "a" * 4, "completion": "b" * 70, "chosen": "b" * 70, "rejected": "c" * 70}
    words = [f"policy.model_path={tmp_path}", "learner.max_tokens_per_device=256", "rollout.max_prompt_tokens=32",
             "rollout.train.sampling.max_new_tokens=32"]  # fmt: skip

    def method_of(*more):
        config = load_config([*words, *more])
        return make_method(config, kind, Opened(tmp_path, None, Encoder(tmp_path, config.data)), ResumeState("run"),
                           Ranks())[0]  # fmt: skip

    method = method_of()
    (micro,) = pack([method.row(0, record)], 256)
    assert int(micro.positions.max()) == 22  # nothing is predicted from the last token
    method.loss(micro)[0].backward()
    with pytest.raises(ConfigError, match=f"data.max_tokens=25 is more than the {24 - (kind[0] == 't')} tokens"):
        method_of("data.max_tokens=25")


def test_a_pair_of_which_one_side_has_nothing_to_train_on_is_left_out():
    ids, mask = np.arange(3, dtype=np.int32), np.array([False, True, True])
    assert row_of(0, [(ids, mask), (ids, np.zeros(3, bool))]) is None
    assert row_of(0, [(ids, mask)]).num_action_tokens == 2


def test_a_pass_takes_each_record_once_in_an_order_of_its_own():
    steps = [places_of(step, 3, 10, seed=1, shuffle=True) for step in range(6)]
    first, second = sum(steps[:3], []), sum(steps[3:], [])

    assert len(set(first)) == len(set(second)) == 9 and first != second
    assert steps == [places_of(step, 3, 10, seed=1, shuffle=True) for step in range(6)]
    assert steps != [places_of(step, 3, 10, seed=2, shuffle=True) for step in range(6)]
    assert places_of(1, 3, 10, seed=1, shuffle=False) == [3, 4, 5]
    with pytest.raises(ConfigError, match="num_prompts_per_step=11.*10 training records"):
        places_of(0, 11, 10, seed=1, shuffle=False)


USER, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(("record", "pairs", "message"), [
    ({"prompt": "q"}, False, "no answer.*data.answer_key"),
    ({"messages": [USER]}, False, "no answer"),
    ({"prompt": "q", "completion": ""}, False, "'completion' is empty"),
    ({"prompt": "q", "completion": [USER]}, False, "'completion' ends with a message of user"),
    ({"messages": [USER, {"role": "bot", "content": "a"}]}, False, "'messages', message 2 has the role 'bot'"),
    ({"prompt": "q", "chosen": "a"}, True, "no field 'rejected' .data.rejected_key"),
    ({"prompt": "q", "rejected": "a"}, True, "no field 'chosen' .data.chosen_key"),
    ({"prompt": "q", "chosen": "a", "rejected": 3}, True, "'rejected' is 3"),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "much"}, True, "'margin' is 'much'"),
    ({"chosen": "a", "rejected": "b"}, True, "no prompt"),
])
def test_a_bad_record_is_refused_by_the_name_of_its_field(record, pairs, message):
    with pytest.raises(TaskError, match=message):
        shape_of(DATA, pairs=pairs).check(record)


@pytest.mark.parametrize(("answer", "text"), [(1042, "1042"), (-3, "-3"), (0.5, "0.5"), (0, "0")])
@pytest.mark.parametrize("key", ["answer", "completion", "label"])
def test_a_number_is_an_answer_as_csv_would_give_it(key, answer, text):
    assert shape_of(DATA, pairs=False).messages({"question": "q", key: answer})[-1].content == text


def test_a_worked_solution_is_learned_and_not_the_final_answer_beside_it():
    both = {"question": "q", "solution": "worked out", "final_answer": "5"}
    assert shape_of(DATA, pairs=False).messages(both)[-1].content == "worked out"


@pytest.mark.parametrize("answer", [True, ["a"], {"a": 1}])
def test_an_answer_that_is_neither_text_nor_number_is_refused(answer):
    with pytest.raises(TaskError, match="field 'answer'"):
        shape_of(DATA, pairs=False).check({"question": "q", "answer": answer})


@pytest.mark.shows("data.chosen_key")
@pytest.mark.shows("data.rejected_key")
def test_fields_of_pairs_have_the_names_that_the_settings_say():
    shape = shape_of(DataConfig(chosen_key="good", rejected_key="bad"), pairs=True)
    assert isinstance(shape, PairShape)
    good, bad = shape.pair({"messages": [USER], "good": "a", "bad": [SAID]})
    assert [one.content for one in good] == [one.content for one in bad] == ["q", "a"]


@pytest.mark.parametrize("family", ["llama", "opt", "gemma3", "ctrl"])
def test_an_exported_reward_model_gives_the_scores_that_were_trained_also_where_the_end_is_the_padding(
    tmp_path, pairs, family
):
    """The decoder of OPT lies deeper, and Gemma 3 has a configuration for it alone; CTRL's classifier is another."""
    model_dir = make_tiny_model(tmp_path / "model", characters="abcdefgh ", hidden_size=32, num_heads=2)
    if family != "llama":
        build_miniature(AutoConfig.for_model(family), seed=1).save_pretrained(model_dir)
    if family == "ctrl":
        with pytest.raises(ConfigError, match="cannot become a reward model: .* no sequence classifier"):
            load_reward_network(
                model_dir, LearnerConfig(), Ranks(), dtype=torch.float32, gradient_checkpointing=False
            )
        return
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    (model_dir / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": settings["eos_token"]}))
    network = load_reward_network(
        model_dir, LearnerConfig(), Ranks(), dtype=torch.float32, gradient_checkpointing=False
    )
    torch.nn.init.normal_(network.score.weight, generator=torch.Generator().manual_seed(0))
    method = RewardModel(network, Encoder(model_dir, DATA), DATA, max_tokens=29)
    out = export_reward_model(network, model_dir, tmp_path / "scores", Ranks(), padding=method.padding)
    scorer = RewardScorer(str(out), "cpu")

    for record in pairs:
        (micro,) = pack([method.row(0, record)], 60)
        with torch.no_grad():
            trained = network(micro.tokens, micro.positions, micro.packing, micro.score_index)
        served = scorer.score([
            [{"role": one.role, "content": one.content} for one in messages] for messages in method.shape.pair(record)
        ])
        assert served == pytest.approx(trained.tolist(), abs=1e-5)


def test_a_reward_model_without_a_template_is_asked_as_it_was_trained(tmp_path, pairs):
    model_dir = make_tiny_model(tmp_path / "model", characters="abcdefgh ", hidden_size=32, num_heads=2)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    config = load_config([
        f"policy.model_path={model_dir}", f"data.path={tmp_path}/pairs.jsonl", "data.apply_chat_template=false",
        "data.test_ratio=0", "rollout.num_prompts_per_step=1",
    ])
    opened = open_records(config, "train-reward-model")
    network = load_reward_network(
        model_dir, LearnerConfig(), Ranks(), dtype=torch.float32, gradient_checkpointing=False
    )
    torch.nn.init.normal_(network.score.weight, generator=torch.Generator().manual_seed(0))
    method = RewardModel(network, opened.encoder, config.data, max_tokens=29)
    out = export_reward_model(
        network, model_dir, tmp_path / "scores", Ranks(), padding=method.padding,
        chat_template=used_template(config.data),
    )
    plain, scorer = Encoder(model_dir, DataConfig(apply_chat_template=False)), RewardScorer(str(out), "cpu")

    for record in pairs:
        both = method.shape.pair(record)
        assert all(opened.encoder.encode(one)[0].tolist() == plain.encode(one)[0].tolist() for one in both)
        (micro,) = pack([method.row(0, record)], 60)
        with torch.no_grad():
            scores = network(micro.tokens, micro.positions, micro.packing, micro.score_index)
        assert scorer.score([[one.as_dict() for one in side] for side in both]) == pytest.approx(
            scores.tolist(), abs=1e-5
        )


def test_the_best_answers_of_a_log_are_trained_on_as_they_were_sampled(model_dir, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    encoder = Encoder(model_dir, DataConfig(apply_chat_template=False))
    prompt = encoder.tokenizer("abc")["input_ids"]
    end = encoder.tokenizer.eos_token_id
    answers = {0.0: "hh", 0.5: "ab", 1.0: "cba"}  # the middle one was cut
    tokens = [encoder.tokenizer(text)["input_ids"] + [end] * (reward != 0.5) for reward, text in answers.items()]
    members = tuple(
        Member(
            at, MemberStatus.FINISHED, pack_ids(prompt), pack_ids(ids), pack_logprobs([-1.0] * len(ids)),
            ((0, len(ids)),), (Span(1, 0, 0, len(ids)),), (Turn(0, len(ids), reward),), reward, {}, "stop",
        )
        for at, (ids, reward) in enumerate(zip(tokens, answers, strict=True))
    )
    group = Group(1, 1, 1, 0, Outcome.COMPLETE, ReturnReason.NONE, "", Sampling(), members, {})
    (run_dir := tmp_path / "run").mkdir()
    (run_dir / "run.json").write_text("{}")
    (run_dir / "metrics.jsonl").write_text("")
    shutil.copytree(model_dir, run_dir / "model")
    writer = LogWriter(run_dir)
    writer.append(RunStarted("a-run", 1, 1, 0, "{}", {}))
    writer.append(GroupArrived("actor-1", 1, 1, 1, 0, bytes(encode(group)), ""))
    writer.close()

    out = tmp_path / "best.parquet"
    assert stream([str(run_dir), "--export", str(out), "--answer-reward", "0.5.."]) == 0
    assert "2 answers in" in capsys.readouterr().out
    data = load_config([
        "policy.model_path=x", f"data.path={out}", "data.prompt_key=prompt", "data.answer_key=answer",
        "data.apply_chat_template=false", "data.test_ratio=0",
    ]).data
    dataset, shape = open_dataset(data, shape_of(data, pairs=False)), shape_of(data, pairs=False)
    trained_on = [encoder.encode(shape.messages(dataset.train[place])) for place in range(len(dataset.train))]
    assert [ids.tolist() for ids, _ in trained_on] == [[*prompt, *tokens[1], end], [*prompt, *tokens[2]]]
    assert [mask.tolist() for _, mask in trained_on] == [[False] * 3 + [True] * 3, [False] * 3 + [True] * 4]
    with pytest.raises(ControlError, match="give --export"):
        stream([str(run_dir), "--answer-reward", "0.5.."])


def test_the_help_shows_settings_with_the_defaults_that_they_have():
    shown = dict(re.findall(r"^    ([a-z_.]+)=(\S+)", learner.supervised.__main__.__doc__, re.M))
    defaults = {name: str(default) for name, _, default, _ in settings()}
    assert len(shown) >= 7 and shown == {name: defaults[name] for name in shown}
