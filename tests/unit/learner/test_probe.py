"""The learner's half of the probe: fixed tokens, when they are scored, and that the numbers are the model's own."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from learner.model.policy import load_policy
from learner.publish.probe import NUM_TOKENS, TEXT, Prober, probe_tokens
from streamrl.messages.codec import unpack_ids, unpack_logprobs
from tests.kit.learning import VOCAB

IDS = list(range(1, 21))


def prober(model_dir, *, every: int = 4) -> Prober:
    return Prober(load_policy(model_dir), IDS, every=every, tolerance=0.1, device="cpu")


@pytest.mark.shows("publish.probe_every")
@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [3, 4, 5, 6, 7, 8, 9]), (4, [3, 7])])
def test_versions_are_probed_as_often_as_set_and_first_of_all(checkpoints, every, due):
    one = prober(checkpoints["qwen3"], every=every)

    assert [version for version in range(3, 10) if one.probe_if_due(version) is not None] == due


def test_versions_that_are_not_published_do_not_put_a_probe_off(checkpoints):
    one = prober(checkpoints["qwen3"], every=4)

    assert [version for version in (0, 3, 7, 8, 11, 13) if one.probe_if_due(version) is not None] == [0, 7, 11]


def test_the_numbers_are_the_models_own_log_probs(checkpoints):
    probe = prober(checkpoints["qwen3"]).probe_if_due(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3"], dtype=torch.float32)
    ids = torch.tensor(unpack_ids(probe.token_ids).tolist())
    with torch.no_grad():
        expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[probe.start - 1 :, 0]

    assert ids.tolist() == IDS and probe.start == 5 and probe.temperature == 1.0
    torch.testing.assert_close(torch.tensor(unpack_logprobs(probe.logprobs).tolist()), expected, atol=1e-5, rtol=0)


def write_tokenizer(directory, words: list[str]) -> None:
    vocab = {"?": 0, **{word: place for place, word in enumerate(words, 1)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


def test_the_tokens_are_text_where_the_tokenizer_knows_it(tmp_path):
    words = sorted(set(TEXT.split()))
    write_tokenizer(tmp_path, words)

    ids = probe_tokens(tmp_path, len(words) + 1, 1000)

    assert [words[i - 1] for i in ids] == TEXT.split()[:NUM_TOKENS]
    assert probe_tokens(tmp_path, len(words) + 1, 16) == ids[:16]


def test_a_tokenizer_that_knows_little_gets_tokens_from_all_over_its_vocabulary(tmp_path):
    write_tokenizer(tmp_path, ["At", "the"])
    for directory in (tmp_path, tmp_path / "without"):
        ids = probe_tokens(directory, VOCAB, 1000)
        assert len(ids) == NUM_TOKENS and len(set(ids)) > VOCAB // 3 and max(ids) < VOCAB
        assert ids == probe_tokens(directory, VOCAB, 1000)
