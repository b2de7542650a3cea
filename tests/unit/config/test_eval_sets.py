"""Evaluation sets are the run's settings with their own on top; what no set can have is refused by its name."""

from __future__ import annotations

import pytest

from streamrl.config.eval_sets import EvalSet, eval_sets, sampling_note, splits
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.config.rules import eval_sampling
from streamrl.errors import ConfigError
from streamrl.launch import eval_notes

QUICK = "experiment=quickstart"
DATA = ("data.path=train.jsonl", "data.test_path=held.jsonl", "reward.type=math", "data.prompt_key=q")


def named(*words: str) -> EvalSet:
    """The one set of `eval.datasets`."""
    (one,) = [one for one in eval_sets(load_config([QUICK, *words])) if one.name]
    return one


def test_a_file_is_a_set_of_all_its_records_read_and_scored_as_the_runs():
    one = named(*DATA, "eval.datasets.hard=hard.jsonl")

    assert (one.name, one.config.data.path, one.config.data.test_path) == ("hard", "hard.jsonl", None)
    assert (one.config.data.test_ratio, one.config.data.prompt_key, one.config.reward.type) == (0.0, "q", "math")
    assert one.config.eval.datasets == {} and one.config.eval.num_samples == 200


def test_another_task_drops_what_belongs_to_the_runs_own():
    one = named(*DATA, "env.options.max_length=5", "eval.datasets.sums.env.name=reasoning_gym.chain_sum")

    assert (one.config.data.path, one.config.reward.type, one.config.env.options) == (None, None, {})


def test_a_set_has_its_own_size_sampling_and_reward():
    words = "{path: a.jsonl, num_samples: 7, num_responses: 3, sampling: {temperature: 0.5}, reward: {type: exact}}"
    one = named(f"eval.datasets.a={words}")

    assert (one.config.eval.num_samples, one.config.eval.num_responses) == (7, 3)
    assert (one.sampling.temperature, one.sampling.max_new_tokens, one.config.reward.type) == (0.5, 12, "exact")


@pytest.mark.shows("eval.datasets")
def test_the_runs_own_records_come_first_unless_they_are_turned_off():
    sets = [QUICK, "eval.datasets={b: {num_samples: 3}, a: {num_samples: 4}}"]

    assert [one.name for one in eval_sets(load_config([QUICK]))] == [""]
    assert [one.name for one in eval_sets(load_config(sets))] == ["", "b", "a"]
    assert [one.name for one in eval_sets(load_config([*sets, "eval.num_samples=0"]))] == ["b", "a"]


def test_sets_survive_the_way_to_an_actor():
    config = load_config([QUICK, "eval.datasets={a: {sampling: {max_new_tokens: 40}, env: {max_turns: 2}}}"])
    there = from_plain(to_plain(config))

    assert eval_sets(there)[1].config == eval_sets(config)[1].config
    assert [(one.env.max_turns, sampling.max_new_tokens) for one, sampling in splits(there)] == [
        (1, 12), (1, 12), (2, 40)
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval.datasets.a.pth=x"], "Unknown key `eval.datasets.a.pth`: Did you mean path?"),
        (["eval.datasets.a.num_prompts=5"], "Did you mean num_samples"),
        (["eval.datasets.a.env.nam=x"], "eval.datasets.a: Unknown key `env.nam`: did you mean `env.name`?"),
        (["eval.datasets.a.sampling.temperature=hot"], "eval.datasets.a: rollout.test.sampling.temperature="),
        (["eval.datasets.a.sampling.temperature=-1"], "eval.datasets.a: rollout.test.sampling.temperature=-1"),
        (["eval.datasets.a.sampling=greedy"], "eval.datasets.a.sampling=greedy must be a mapping"),
        (["eval.datasets.a=5"], "eval.datasets.a=5 must be a file such as test.jsonl, or a mapping of path"),
        (["eval.datasets.a={path: x, data: {path: y}}"], "a path and a data.path: leave one of them out"),
        (["eval.datasets.a=x", "eval.datasets.A=y"], "names the sets a and A: their names must differ"),
        (["eval.datasets.a_b-c.num_samples=0"], "eval.datasets.a_b-c asks for no prompt"),
        (["eval.num_samples=0", "eval.datasets.a=x.jsonl"], "give eval.datasets.a.num_samples"),
        (["eval.datasets.a.num_responses=2"], "eval.datasets.a: eval.num_responses=2 with rollout.test.sampling"),
        (["eval.datasets={_a: x}"], "names a set '_a': use 1 to 32 of"),
    ],
)
def test_what_no_set_can_have_is_refused_with_its_name(words, said):
    with pytest.raises(ConfigError) as caught:
        eval_sets(load_config([QUICK, *words]))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{a: x, b: y, a: z}", "{a: {path: x, path: y}}", "{b: 'q, {a: ', c: [x, y], a: x, a: y}"]
)
def test_a_name_that_is_given_twice_is_refused(text):
    with pytest.raises(ConfigError, match=r"names (a|path) twice: give each its own name"):
        load_config([QUICK, f"eval.datasets={text}"])


def test_the_same_key_in_different_mappings_and_in_texts_is_no_repetition():
    config = load_config([QUICK, "eval.datasets={a: {path: 'a, path: b'}, b: {path: x.jsonl}}"])
    assert list(config.eval.datasets) == ["a", "b"]


def test_a_name_that_no_key_can_have_is_refused_before_anything_reads_it():
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config([QUICK, "eval.datasets.2x=1"])


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_evaluation_samples_as_training_does_unless_it_is_told_otherwise():
    train = ("rollout.train.sampling.temperature=0.9", "rollout.train.sampling.max_new_tokens=99",
             "rollout.train.sampling.stop=[END]")
    model = "policy.model_path=somewhere"
    inherited = load_config([model, *train])
    told = load_config([model, *train, "rollout.test.sampling.temperature=0", "rollout.test.sampling.top_p=0.9",
                        "rollout.test.sampling.stop=[]"])

    assert eval_sampling(inherited) == inherited.rollout.train.sampling
    sampling = eval_sampling(told)
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens, sampling.stop) == (0.0, 0.9, 99, [])
    assert sampling_note(inherited) == ""
    assert sampling_note(told) == (
        "is greedy (temperature 0); training samples at temperature 0.9; samples with top_p 0.9 (training 1), stop [] "
        "(training ['END'])"
    )


@pytest.mark.parametrize("experiment", ["quickstart", "smollm2", "tool_arithmetic"])
def test_the_experiments_evaluate_greedily_as_their_records_did(experiment):
    assert eval_sampling(load_config([f"experiment={experiment}"])).temperature == 0.0


def test_launch_says_which_sets_sample_otherwise_than_training():
    plain = ["rollout.test.sampling.temperature=1", "eval.datasets.cold.sampling.temperature=0.2"]
    assert eval_notes(load_config([QUICK, *plain])) == [
        "evaluation on cold samples with temperature 0.2 (training 1)"
    ]
    assert eval_notes(load_config([QUICK])) == [
        "evaluation is greedy (temperature 0); training samples at temperature 1"
    ]
