"""Settings: composed from YAML over the schema, unknown ones refused with the nearest name, rules between them."""

from __future__ import annotations

import copy
import math
import re
import subprocess
from pathlib import Path

import pytest

from streamrl.config.aliases import ALIASES, COMMON, FULL_NAMES, NOT_HERE
from streamrl.config.catalog import open_mappings, setting_names, settings
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.config.rules import max_lag
from streamrl.config.schema import Config, SamplingConfig
from streamrl.errors import ConfigError
from streamrl.run_dirs import choose_run_dir

CONFIGS = Path(__file__).parents[3] / "configs"
QUICK = "experiment=quickstart"


def test_every_setting_has_a_sentence():
    assert [name for name, _, _, sentence in settings() if not sentence] == []


def test_no_number_is_nan_and_no_time_is_infinite():
    """NaN passes every comparison that asks whether it is too small, and a run would be of NaN, not refused."""
    plain, taken = to_plain(load_config([QUICK])), []
    for name, kind, *_ in (one for one in settings() if "float" in one[1]):
        for number in (math.nan, math.inf) if name.endswith("_s") else (math.nan,):
            values = copy.deepcopy(plain)
            *sections, last = name.split(".")
            section = values
            for part in sections:
                section = section[part]
            section[last] = [number] * 2 if kind.startswith("list") else {"a": number} if "dict" in kind else number
            try:
                from_plain(values)
                taken.append((name, kind, number))
            except ConfigError as error:
                assert name in str(error), f"{name}={number} is refused without its name: {error}"
    assert taken == []


@pytest.mark.parametrize(("word", "bound"), [
    ("env.reward_floor=nan", "must be finite"), ("env.reward_floor=-inf", "must be finite"),
    ("env.step_timeout_s=1e9", "must be at most 2000000"), ("run.seed=-1", "must be at least 0"),
    ("policy.tiny.num_heads=0", "must be at least 1"), ("policy.optimizer.eps=0", "must be at least 1e-38"),
    ("policy.optimizer.beta2=1", "must be less than 1"), ("advantage.rho_bar=nan", "must be greater than 0"),
])
def test_a_number_that_no_run_can_use_is_refused_with_its_bound(word, bound):
    with pytest.raises(ConfigError, match=rf"^{re.escape(word.partition('=')[0])}=\S+ {bound}\b"):
        load_config([QUICK, word])


@pytest.mark.parametrize("word", [
    "rollout.train.sampling.temperature=2.5", "rollout.train.sampling.temperature=0.001",
    "rollout.train.member_temperatures=[0.5,3]", "rollout.train.final_temperature=0.005",
    "rollout.test.sampling.temperature=2.01",
])
def test_a_temperature_that_vllm_refuses_is_refused_at_the_start_and_no_other_engine_minds_it(word):
    words = [QUICK, word, "actors.engine=native"]
    words += ["rollout.train.num_annealing_steps=9"] if "final" in word else []
    load_config(words)
    load_config([*words, "actors.engine=vllm", word.partition("=")[0] + ("=[0.01,2]" if "[" in word else "=2")])
    with pytest.raises(ConfigError, match=rf"^{word.partition('=')[0]}=[\d.]+: vLLM goes from 0.01 to 2"):
        load_config([*words, "actors.engine=vllm"])


@pytest.mark.parametrize("word", ["tensor_parallel_size=two", "pipeline_parallel_size=null", "tensor_parallel_size=0"])
def test_ranks_of_vllm_that_are_no_number_are_refused_by_name(word):
    with pytest.raises(ConfigError, match=rf"^actors.vllm.{word.partition('=')[0]}=\S+: give a positive integer"):
        load_config([QUICK, "actors.engine=vllm", f"actors.vllm.{word}"])


def test_infinity_turns_a_cap_off():
    config = load_config([QUICK, "policy.optimizer.max_grad_norm=inf", "advantage.rho_bar=inf", "loss.clip_high=inf"])
    assert (config.policy.optimizer.max_grad_norm, config.advantage.rho_bar, config.loss.clip_high) == (math.inf,) * 3


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("experiment/*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_composes(path):
    load_config([f"experiment={path.stem}"])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("algorithm/*.yaml")), ids=lambda path: path.stem)
def test_every_algorithm_composes(path):
    load_config([QUICK, f"algorithm={path.stem}"])


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("staleness.etta=3", "did you mean `staleness.eta`?"),
        ("loss.clip_hi=3", "did you mean `loss.clip_high`?"),
        ("clip_high=3", "did you mean `loss.clip_high`?"),
        ("actors.num_concurent=3", "did you mean `actors.num_concurrent`?"),
        ("lr=1e-5", "did you mean `policy.optimizer.lr`?"),
        ("learning-rate=1e-5", "did you mean `policy.optimizer.lr`?"),
        ("trainer.learning_rate=1e-5", "did you mean `policy.optimizer.lr`?"),
        ("model=x", "did you mean `policy.model_path`?"),
        ("beta=0", "did you mean `kl.coef`?"),
        ("num_generations=8", "did you mean `rollout.num_responses_per_prompt`?"),
        ("trainer.max_steps=9", "did you mean `trainer.num_steps`?"),
        ("output_dir=x", "did you mean `run.dir`?"),
        ("critic.optimizer.lrr=1", "did you mean `critic.optimizer.lr`?"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(word, nearest):
    with pytest.raises(ConfigError, match="Unknown key") as caught:
        load_config([QUICK, word])
    assert nearest in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["staleness.eta=abc"], "staleness.eta=abc must be a whole number, e.g. staleness.eta=1."),
        (["staleness.eta=4", "staleness.max_lag=2"], "staleness.max_lag=2 is below staleness.eta=4"),
        (["rollout.train.sampling.max_new_tokens=9000"], "learner.max_tokens_per_device"),
        (["rollout.num_responses_per_prompt=1"], "nothing to compare with"),
        (
            ["rollout.num_responses_per_prompt=1", "advantage.baseline=batch", "filter.zero_std=true"],
            "filter.zero_std=true nothing",
        ),
        (["hub.bind=tcp://0.0.0.0:5000"], "open to the network"),
        (["policy.tiny.enabled=false"], "policy.model_path is not set"),
        (["rollout.train.sampling.temperature=0"], "is greedy"),
        ([r'rollout.test.sampling.stop=["\n"]'], "is a backslash and a letter, which would end no answer"),
        (["trainer.num_steps=0"], "must be at least 1. Steps to do"),
        (["publish.delta_max_ratio=2"], "publish.delta_max_ratio=2 must be at most 1."),
        (["rollout.train.sampling.top_p=0"], "rollout.train.sampling.top_p=0 must be greater than 0."),
        (["eval.num_samples=-1"], "eval.num_samples=-1 must be at least 0"),
        (["eval.pin=false", "eval.pin_s=60"], "eval.pin_s=60 does nothing with eval.pin=false"),
        (["filter.min_std=0.2"], "filter.min_std=0.2 does nothing with filter.zero_std=false"),
        (["experiment=nope"], "experiment=nope is unknown. Choose from colossal_grpo, colossal_ppo"),
        (["filter.accuracy_range=[0.9,0.1]"], "two numbers, the lower one first"),
        (["bare"], "is not a setting"),
    ],
)
def test_impossible_settings_say_what_is_wrong(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config([QUICK, *words])


def test_the_advice_for_a_stop_string_of_a_new_line_is_right():
    with pytest.raises(ConfigError) as caught:
        load_config([QUICK, r'rollout.train.sampling.stop=["\n"]'])
    advice = re.search(r"\$'.*?'", str(caught.value))[0]
    word = subprocess.run(["bash", "-c", f"printf %s {advice}"], capture_output=True, text=True, check=True).stdout
    assert load_config([QUICK, word]).rollout.train.sampling.stop == ["\n"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trainer.num_steps=ten", "must be a whole number, e.g. trainer.num_steps=100. Steps to do"),
        ("trainer.num_steps=1.5", "must be a whole number"),
        ("trainer.num_steps=", "trainer.num_steps= must be a whole number"),
        ("trainer.num_steps=[1", "`trainer.num_steps=[1` cannot be read: a list is trainer.num_steps=[a,b]"),
        ("trainer=3", "trainer=3 must be a mapping"),
        ("reward.weights={math: high}", "must be a mapping from names to numbers"),
        ("policy.optimizer.lr=1e-5x", "policy.optimizer.lr=1e-5x must be a number"),
        ("loss.cap=x", "loss.cap=x must be a number or null, e.g. loss.cap=0.5."),
        ("policy.tiny.enabled=maybe", "must be true or false, e.g. policy.tiny.enabled=false."),
        ("staleness.mode=dropp", "Did you mean drop? Choose one of drop, mask_old_tokens, reweight, wait."),
        ("rollout.train.sampling.stop=a", "must be a list, e.g. rollout.train.sampling.stop=[a,b]."),
        ("env.options=null", "env.options=null must be a mapping, e.g. env.options.key=value."),
        ("~env.options", "~env.options removes nothing: every setting has a value"),
        ("run.name=a,b", "run.name=a,b names several values. One run for each: streamrl launch -m run.name=a,b"),
        ("env.options.text=a, b", "names several values"),
        ("experiment=quickstar", "experiment=quickstar is unknown. Did you mean quickstart?"),
        ("algorithm=gpro", "algorithm=gpro is unknown. Did you mean grpo?"),
        ("quickstart", "Did you mean experiment=quickstart?"),
        ("task.py", "Did you mean env.path=task.py?"),
    ],
)
def test_a_word_that_cannot_be_taken_is_explained_in_our_words(word, message):
    with pytest.raises(ConfigError) as caught:
        load_config([QUICK, word])

    assert message in str(caught.value)
    assert not any(noise in str(caught.value) for noise in ("Exception", "viable", "merging", "Integer", "hydra"))


@pytest.mark.parametrize("mark", ["", "+", "++", "~"])
@pytest.mark.parametrize(("word", "says"), [
    ("hydra.run.dir=x", "take run.dir"), ("hydra.job.name=x", "take run.name"),
    ("hydra.verbose=true", "take STREAMRL_LOG"),
    ("hydra.sweep.dir=x", "of a sweep: streamrl launch -m ..., or there as sweep.dir=VALUE"),
    ("hydra/help=x", "streamrl settings run"),
])
def test_a_word_of_hydras_own_is_refused_with_what_does_it_here(mark, word, says):
    for load in (load_config, lambda words: from_plain({}, words)):
        with pytest.raises(ConfigError, match=f"`{re.escape(word.partition('=')[0])}` is .*{re.escape(says)}"):
            load([mark + word])


@pytest.mark.parametrize("word", ["experiment=quickstart", "my.yaml", "hydra.searchpath=[.]"])
def test_settings_of_another_process_are_not_composed_again(word):
    with pytest.raises(ConfigError, match=f"`{re.escape(word)}` stands for a whole run"):
        from_plain({}, [word])


def test_a_text_that_hydra_cannot_read_is_taken_as_it_is():
    config = load_config([QUICK, "env.path=~/my tasks (2)/é=1.py", "run.root=/data/o'neil", "env.options.ask=How (1)?"])

    assert (config.env.path, config.run.root) == ("~/my tasks (2)/é=1.py", "/data/o'neil")
    assert config.env.options == {"ask": "How (1)?"}


def test_the_lag_bound_is_derived_from_eta_and_window():
    assert max_lag(load_config([QUICK, "staleness.eta=3"])) == 4
    assert max_lag(load_config([QUICK, "staleness.eta=0", "staleness.num_lookahead_groups=0"])) == 0
    assert max_lag(load_config([QUICK, "staleness.eta=3", "staleness.max_lag=3"])) == 3


def test_an_experiment_wins_over_the_algorithm_and_overrides_win_over_both():
    config = load_config([QUICK, "algorithm=dr_grpo", "loss.clip_high=0.5"])
    assert config.loss.avg_level == "seq-mean-token-sum-norm" and config.loss.clip_high == 0.5


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        (["algorithm=extreme_lag"], "filter.zero_std=true staleness.eta=64"),
        (["algorithm=extreme_lag", "staleness.eta=3"], "filter.zero_std=true"),
        (["algorithm=extreme_lag", "staleness.eta=64", "filter.zero_std=true"], None),
        ([], None),
    ],
)
def test_what_an_experiment_sets_in_place_of_the_recipe_is_told(words, lost):
    told: list[str] = []
    config = load_config([QUICK, *words], notify=told.append)
    assert len(told) == (lost is not None)
    assert lost is None or f"add {lost} to get it back" in told[0]
    assert lost is None or config.staleness.eta == (3 if "staleness.eta=3" in words else 2)


def test_a_config_survives_its_plain_form_and_local_overrides_win():
    config = load_config([QUICK, "env.options.max_length=5"])
    again = from_plain(to_plain(config), ["actors.num_concurrent=3"])
    assert again.actors.num_concurrent == 3 and again.env == config.env
    again.actors.num_concurrent = config.actors.num_concurrent
    assert again == config and isinstance(again, Config)


def test_the_model_named_on_the_command_line_replaces_that_of_the_experiment():
    policy = load_config([QUICK, "policy.model_path=mine"]).policy
    assert (policy.model_path, policy.tiny.enabled) == ("mine", False)
    policy = load_config(["experiment=smollm2", "policy.tiny.enabled=true"]).policy
    assert (policy.model_path, policy.tiny.enabled) == (None, True)
    assert load_config([QUICK, "policy.model_path=null"]).policy.tiny.enabled


SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "instruction": ""}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], SUMS),
        (["env.name=reasoning_gym.chain_sum"], SUMS),
        (["env.options.max_terms=4"], {**SUMS, "max_terms": 4}),
        (["env.path=my_task.py"], {}),
        (["env.path=my_task.py", "env.options.max_terms=9"], {"max_terms": 9}),
        (["env.path=my_task.py", "env.options={max_terms: 9, letters: ab}"], {"max_terms": 9, "letters": "ab"}),
        (["env.name=reasoning_gym.letter_counting"], {}),
        (["env.options={}"], {}),
        (["env.options={max_terms: 3}", "env.options.min_terms=1"], {"max_terms": 3, "min_terms": 1}),
    ],
)
def test_the_options_of_an_experiment_are_those_of_its_task(words, options):
    """Named on the command line, another task starts without them, and so does `env.options=...`."""
    words = ["experiment=smollm2", *words]
    assert load_config(words).env.options == options
    assert from_plain(to_plain(load_config(words[:1])), words[1:]).env.options == options


@pytest.mark.parametrize("task", ["env.name=reasoning_gym.sorting", "env.path=my_task.py", "data.path=my.jsonl"])
def test_the_form_that_an_experiment_gives_its_task_is_dropped_with_it(task: str):
    """`stop: ["\\n"]` and 8 tokens leave a model that answers in sentences nothing but blank answers."""
    words, told = ["experiment=smollm2", task], []
    before, other = load_config(words[:1]), load_config(words, notify=told.append)

    assert before.rollout.train.sampling.stop == ["\n"] and not before.data.apply_chat_template
    assert other.data.apply_chat_template and other.rollout.train.sampling == SamplingConfig()
    assert other.rollout.test.sampling.temperature == 0  # greedy whatever the task
    assert len(told) == 1
    for setting in ("data.apply_chat_template=false", 'rollout.train.sampling.stop=["\\n"]', "max_new_tokens=8"):
        assert setting in told[0]
    kept = ["rollout.train.sampling={max_new_tokens: 5}", "data.apply_chat_template=false"]
    mine = load_config([*words, *kept], notify=told.append)
    assert (mine.rollout.train.sampling.max_new_tokens, mine.data.apply_chat_template) == (5, False)


TASKS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml") if "data: {path" not in path.read_text())


@pytest.mark.parametrize("experiment", [name for name in TASKS if name != "one_shot_rlvr"])  # its data in lines
def test_no_experiment_loses_its_form_to_its_own_task(experiment: str):
    told: list[str] = []
    own = load_config([f"experiment={experiment}"], notify=told.append)
    again = load_config([f"experiment={experiment}", f"env.name={own.env.name}"], notify=told.append)
    assert told == [] and again == own


def test_a_task_named_on_the_command_line_replaces_the_file_below_it():
    below = to_plain(load_config([QUICK, "env.path=my_task.py", "env.options.size=3"]))
    env = from_plain(below, ["env.name=string.sort"]).env
    assert (env.name, env.path, env.options) == ("string.sort", None, {})


@pytest.mark.shows("checkpoint.resume")
def test_run_directories_count_up_and_resume_takes_the_newest(tmp_path):
    config = load_config([QUICK, f"run.root={tmp_path}"])
    assert choose_run_dir(config).name == "quickstart-001"
    assert choose_run_dir(config).name == "quickstart-002", "two at once never share a directory"
    (tmp_path / "quickstart-007").mkdir()
    assert choose_run_dir(config).name == "quickstart-008"
    config.checkpoint.resume = True
    assert choose_run_dir(config).name == "quickstart-008"
    config.run.name = "other"
    with pytest.raises(ConfigError, match=r"no run other-\*"):
        choose_run_dir(config)


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path):
    (tmp_path / "EPOCH").write_text("1")
    config = load_config([QUICK, f"run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match="already holds a run"):
        choose_run_dir(config)


def test_every_alias_leads_to_a_setting_and_is_none_itself():
    names = {name for name, *_ in settings()}
    suggested = {name for name in [*ALIASES.values(), *FULL_NAMES.values()] if not name.startswith(open_mappings())}
    assert suggested <= setting_names() and set(COMMON) <= names
    assert not {*ALIASES, *FULL_NAMES} & setting_names()
    words = {f"_{name.replace('.', '_')}_" for name in names}
    assert [one for one in NOT_HERE if any(f"_{one}_" in word for word in words) or one in ALIASES] == []  # it is here


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], ("a.jsonl", "math", None)), (["env.path=r.py"], ("a.jsonl", None, "r.py")),
        (["env.name=string.sort"], (None, None, None)), (["data.path=b.jsonl"], ("b.jsonl", "math", None)),
        (["reward.type=exact"], ("a.jsonl", "exact", None)),
    ],
)
def test_records_and_reward_of_a_file_give_way_to_others_on_the_command_line(tmp_path, words, kept):
    file = tmp_path / "mine.yaml"
    file.write_text("data: {path: a.jsonl, test_path: t.jsonl}\nreward: {type: math}\n")
    from_file = load_config([QUICK, str(file), *words])
    base = to_plain(load_config([QUICK, str(file)]))
    from_run = from_plain(base, words)

    for config in (from_file, from_run):
        assert (config.data.path, config.reward.type, config.env.path) == kept
        assert config.data.test_path == ("t.jsonl" if kept[0] == "a.jsonl" else None)
