"""Interfaces of other projects: files in the form that their origin documents, played by the parts of an actor."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.render import Renderer
from actors.rollout import run_group
from envs.check import check_task
from envs.data.shapes import RecordShape
from envs.data_task import player, task_from_data
from envs.registry import load_task, task_of
from envs.reward_file import EnvFactory, reward_from_file
from envs.tools.environment import ToolRules, tool_env
from streamrl.config.load import load_config
from streamrl.errors import TaskError
from streamrl.messages import MemberStatus, Outcome, Turn
from streamrl.messages.codec import unpack_ids
from tests.kit.loops import run
from tests.unit.actors.fakes import ids_of, installed_engine, lease, make_runner
from tests.unit.actors.fakes import tokenizer as letters

EXAMPLES = Path(__file__).parent / "examples"
TOKENIZER = letters()
TOKENIZER.add_tokens(list("\n<>/_#+VWXYZU{}\\"))
CAPITAL = {"prompt": "Capital?", "extra_info": {"answer": "Beijing"}}


def task_for(file, record, **options):
    """The task that plays a record of `data.path` with this file."""
    found = reward_from_file(str(EXAMPLES / file), options, RecordShape())
    make = found if isinstance(found, EnvFactory) else player(found, found.name, RecordShape())
    return SimpleNamespace(
        name=file, num_records=lambda split: 1, record=lambda split, index: record, env=make
    )


def play(task, *said, record=None, max_turns=4, **rules):
    """The member of an episode in which the model says these texts, one a turn; and the ids of each prompt it read."""
    played, turns = [], iter(said)

    def reply(prompt, seed, version):
        read.append(list(prompt))
        return TOKENIZER(next(turns), add_special_tokens=False)["input_ids"]

    read = []

    async def work():
        rules_ = {"max_prompt_tokens": 200, "max_new_tokens": 200, "max_turns": max_turns, **rules}
        runner = make_runner(
            task, await installed_engine(reply), renderer=Renderer(TOKENIZER, apply_chat_template=False), **rules_
        )
        one = lease(prompt=json.dumps(record or task.record("train", 0)).encode())
        played.append(await run_group(one, runner))

    run(work)
    (group,) = played
    if group.outcome is Outcome.RETURNED:
        raise TaskError(group.detail)
    return group.members[0], [TOKENIZER.decode(ids) for ids in read]


def text_of(ids):
    return TOKENIZER.decode(unpack_ids(ids))


# --- step(state, action, extra_info) ---------------------------------------------------------------------------------


def test_step_continues_one_sequence_whose_added_text_is_off_the_mask():
    task = task_for("rl2_step.py", CAPITAL)
    search, answer = "<search>capital of China</search>", "<answer>Beijing</answer>"
    member, read = play(task, search, answer)

    added = "\n<information>Beijing is the capital of China.</information>\n"
    assert read == ["Capital?", "Capital?" + search + added]
    assert text_of(member.token_ids) == search + added + answer
    begin = len(search) + len(added)
    assert member.mask == ((0, len(search)), (begin, begin + len(answer)))
    # extra_info is handed on: the second turn knows of the first. Reward and score differ.
    assert member.turns == (
        Turn(0, len(search), 0.0, finish="stop"), Turn(begin, begin + len(answer), 0.9, 1.0, "stop")
    )
    assert (member.reward, member.scores["score"], member.status) == (0.9, 1.0, MemberStatus.FINISHED)


def test_step_that_rewrites_the_state_begins_another_sequence_but_not_in_the_last_turn():
    task = task_for("rl2_step.py", CAPITAL)

    member, read = play(task, "what?", "<answer>Beijing</answer>")
    assert [one.start for one in member.sequences] == [5] and text_of(member.sequences[0].prompt_ids) == read[1]
    assert not read[1].startswith("Capital?what?") and (len(member.turns), member.reward) == (2, 0.9)
    member, _ = play(task, "what?", max_turns=1)
    assert (member.status, member.reward) == (MemberStatus.TRUNCATED, 0.0)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return {'reward': 1.0}", "step returned reward and lacks done"),
        ("return 1.0", r"step returned 1.0 \(float\)"),
        ("return {'reward': 'high', 'done': True}", "step, reward, returned the text 'high'"),
        ("return {'reward': 0, 'done': False}", "next_state=None although it is not done"),
    ],
)
def test_what_a_step_returns_wrongly_is_named(tmp_path, body, complaint):
    path = tmp_path / "env.py"
    path.write_text(f"def step(state, action, extra_info):\n    {body}\n")

    with pytest.raises(TaskError, match=complaint):
        play(task_for(path, CAPITAL), "hm", "hm")


def test_reset_gives_the_first_state_where_records_have_no_prompt():
    task = load_task("", path=str(EXAMPLES / "rl2_reset.py"))
    check_task(task)

    member, read = play(task, "1", "7", record={"seed": 7})

    assert read == ["Guess my number, odd: ", "Guess my number, odd: 1 no. "]
    assert (member.reward, text_of(member.prompt_ids)) == (1.0, "Guess my number, odd: ")
    assert task.record("train", 3) != task.record("test", 3)


def test_step_reads_the_prompt_as_the_chat_template_wrote_it():
    task = task_for("rl2_step.py", CAPITAL)
    tokenizer = letters()
    tokenizer.add_tokens(list("\n<>/_#VWXYZU"))
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}A: "
    states = []

    async def work():
        env_of = task.env
        task.env = lambda: states.append(env_of()) or states[-1]
        engine = await installed_engine(lambda prompt, seed, version: ids_of("x"))
        runner = make_runner(task, engine, renderer=Renderer(tokenizer), max_prompt_tokens=100)
        await run_group(lease(prompt=json.dumps(CAPITAL).encode()), runner)

    run(work)
    assert states[0]._state == "[user] Capital? A: "


# --- env_step(sample) ------------------------------------------------------------------------------------------------


def test_env_step_runs_with_its_imports_and_its_own_copy_of_the_record():
    record = {"prompt": "Make 7 of 3 4.", "numbers": [3, 4], "target": 7}
    task = task_for("rl2_env_step.py", record)
    check_task(task)

    member, read = play(task, "hm", "<answer>3 + 4</answer>")

    assert read[1] == "Make 7 of 3 4.hm\nDo it again.\n"
    assert member.reward == 0.5  # the miss was remembered on sample.sample
    assert play(task, "<answer>3 + 4</answer>")[0].reward == 1.0  # and not by the next episode
    assert "RL2" not in sys.modules


# --- reward_fn and interact ------------------------------------------------------------------------------------------

MOUNTAIN = {"messages": [{"role": "user", "content": "Highest?"}], "answer": "mount everest"}
SEARCH, ANSWER = "<search>highest mountain</search>", "<answer>Mount Everest</answer>"


def test_reward_fn_alone_scores_the_conversation():
    member, _ = play(task_for("fork_reward_fn.py", {"prompt": "2 + 2?", "answer": "4"}), "so #### 4")
    assert member.reward == 1.0


def test_interact_answers_until_it_returns_nothing_and_the_reward_is_paid_once_at_the_end():
    task = task_for("fork_interact.py", MOUNTAIN)
    check_task(task)
    assert task.env().tools[0]["function"]["name"] == "search"

    member, read = play(task, SEARCH, ANSWER)

    assert read[1] == f"Highest?{SEARCH}Mount Everest"
    assert [turn.reward for turn in member.turns] == [0.0, 1.0]
    assert member.status is MemberStatus.FINISHED


def test_no_tool_is_called_in_the_last_turn_and_a_cut_conversation_is_scored_too():
    task = task_for("fork_interact.py", MOUNTAIN)

    member, read = play(task, SEARCH, SEARCH + ANSWER, max_turns=2)
    assert (len(read), [turn.reward for turn in member.turns]) == (2, [0.0, 1.0])

    member, read = play(task, SEARCH + ANSWER, max_tokens=len("Highest?" + SEARCH + ANSWER) + 3)
    assert (len(read), member.reward, member.status) == (1, 1.0, MemberStatus.TRUNCATED)


@pytest.mark.parametrize("kinds", [("async def", "def"), ("def", "async def"), ("async def", "async def")])
def test_interact_and_reward_fn_may_be_async(tmp_path, kinds):
    path = tmp_path / "talk.py"
    path.write_text(
        f"{kinds[0]} interact(messages):\n    return [{{'role': 'user', 'content': 'on'}}] * (len(messages) < 3)\n"
        f"{kinds[1]} reward_fn(messages, answer):\n    return len(messages) / 10\n"
    )

    member, read = play(task_for(path, MOUNTAIN), "a", "b")
    assert ([turn.reward for turn in member.turns], read[1]) == ([0.0, 0.4], "Highest?aon")


def test_what_interact_returns_wrongly_is_named(tmp_path):
    path = tmp_path / "talk.py"
    path.write_text(
        "def interact(messages):\n    return [{'role': 'robot', 'content': 'on'}]\n"
        "def reward_fn(messages, answer):\n    return 1\n"
    )
    with pytest.raises(TaskError, match="a role of system, user, assistant, tool"):
        play(task_for(path, MOUNTAIN), "a", "b")


def test_interact_needs_more_than_one_turn(tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({**MOUNTAIN, "messages": [{"role": "user", "content": str(n)}]}) + "\n"
                            for n in range(4)))
    words = ["experiment=quickstart", f"data.path={data}", f"env.path={EXAMPLES / 'fork_interact.py'}"]

    assert task_from_data(load_config([*words, "env.max_turns=2"])).num_records("train")
    with pytest.raises(TaskError, match="never called with env.max_turns=1: set env.max_turns=2"):
        task_from_data(load_config(words))


def test_tools_of_ours_are_not_put_around_an_environment_that_answers_calls_itself():
    for file, record in (("fork_interact.py", MOUNTAIN), ("rl2_step.py", CAPITAL)):
        with pytest.raises(TaskError, match="leave env.tools out"):
            tool_env(task_for(file, record).env(), [], ToolRules(parse=lambda *_: [], max_turns=2))


# --- BaseRewardFunction ----------------------------------------------------------------------------------------------

SUM = {"messages": [{"role": "user", "content": "2 + 2?"}], "ground_truth": "4"}


def test_a_reward_class_scores_messages_and_takes_its_options():
    member, _ = play(task_for("rl4llm_reward.py", SUM, max_score=2.0), "4")
    assert (member.reward, member.scores) == (2.0, {"score": 2.0, "accuracy_reward": 2.0})


def test_several_reward_classes_are_made_one_by_the_files_transform_and_logged_apart():
    member, _ = play(task_for("rl4llm_two_rewards.py", SUM), "is 4")
    assert member.reward == pytest.approx(0.7 - 0.3 * 0.4)
    assert (member.scores["accuracy_reward"], member.scores["length_reward"]) == (1.0, -0.4)


REWARD = """
class {name}:
    name = {label!r}
    def __call__(self, messages, ground_truth, **kwargs):
        return {value}
"""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (REWARD.format(name="A", label="a", value=1) + REWARD.format(name="B", label="b", value=1),
         r"defines 2 rewards \(a, b\) and lacks reward_transform_fn"),
        (REWARD.format(name="A", label="a", value=1) * 1 + REWARD.format(name="B", label="a", value=1),
         "the same name"),
        (REWARD.format(name="A", label="a b", value=1), "has the name 'a b'"),
        (REWARD.format(name="A", label="a", value="'1'"), "returned '1': it must be an int or a float"),
        (REWARD.format(name="A", label="a", value=1) + "\ndef reward_transform_fn(rewards):\n    return [1.0, 2.0]\n",
         r"the shape \(2,\): it must return one reward for each that it got, here \(1,\)"),
    ],
)
def test_a_wrong_reward_class_is_named(tmp_path, text, complaint):
    path = tmp_path / "rewards.py"
    path.write_text(text)
    with pytest.raises(TaskError, match=complaint):
        play(task_for(path, SUM), "4")


# --- Gymnasium and GEM -----------------------------------------------------------------------------------------------


def test_a_gymnasium_environment_plays_seeds_and_tells_truncated_from_terminated():
    task = load_task("", path=str(EXAMPLES / "gymnasium_guess.py"), options={"highest": 4})
    check_task(task)
    assert (task.num_records("train"), task.num_records("test")) == (100, 10)
    env = task.env()
    env.reset({"seed": 5})
    number = env._env.number

    member, read = play(task, "0", str(number), record={"seed": 5})
    assert read[1] == "Guess a number from 1 to 4.0higher"
    assert ([turn.reward for turn in member.turns], member.status) == ([0.0, 1.0], MemberStatus.FINISHED)

    member, read = play(task, "0", "0", "0", record={"seed": 5})
    assert (member.reward, member.status) == (0.0, MemberStatus.TRUNCATED)


@pytest.mark.parametrize("takes", [
    "seed=None", "*, seed=None, options=None", "**kwargs", "seed=None, **kwargs", "options=None, **kwargs",
])
def test_a_gymnasium_environment_gets_its_seed_however_reset_takes_it(tmp_path, takes):
    path = tmp_path / "env.py"
    path.write_text(
        f"class Echo:\n    def reset(self, {takes}):\n        return str((locals() | locals().get('kwargs', {{}}))"
        "['seed']), {}\n    def step(self, action):\n        return '', 0.0, True, False, {}\n"
    )
    (message,) = load_task("", path=str(path)).env().reset({"seed": 5})
    assert message.content == "5"


def test_a_gymnasium_environment_gets_a_data_files_record_as_options(tmp_path):
    path = tmp_path / "env.py"
    path.write_text(
        "class Echo:\n    def reset(self, seed=None, options=None):\n        return options['prompt'], {}\n"
        "    def step(self, action):\n        return [1, 2], 0.0, action == 'end', False, {}\n"
    )
    task = task_for(path, {"prompt": "hello"})
    assert play(task, "end")[1] == ["hello"]
    with pytest.raises(TaskError, match=r"Echo.step returned the observation \[1, 2\] \(list\)"):
        play(task, "on", "end")


def test_gem_environments_are_made_by_id_with_options_and_template(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    options = {"id": "game:GuessTheNumber-v0-easy", "max_number": 1, "template": "Question: {observation}"}
    task = load_task("gem", options=options)
    check_task(task)

    member, read = play(task, "hm", "\\boxed{1}", record={"seed": 3})

    assert read == ["Question: Guess the number, 1 to 1.", "Question: Guess the number, 1 to 1.hmQuestion: No."]
    assert (member.reward, member.status) == (1.0, MemberStatus.FINISHED)
    with pytest.raises(TaskError, match="game:Chess is not registered"):
        load_task("gem", options={"id": "game:Chess"})
    with pytest.raises(TaskError, match="must have {observation}"):
        load_task("gem", options={**options, "template": "no place"})
    monkeypatch.delitem(sys.modules, "gem")


def test_gem_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(TaskError, match="pip install gem-llm"):
        task_of(load_config(["experiment=quickstart", "env.name=gem", "env.options={id: game:Hangman-v0}"]))


# --- which interface a file follows ----------------------------------------------------------------------------------


STEP = "def step(state, action, extra_info): ...\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (STEP + "def reward_fn(messages, answer): ...", r"more than one .*: reward_fn, step\(state, action,"),
        ("def interact(messages): ...", r"defines interact\(messages\) and lacks reward_fn\(messages, answer\): add"),
        ("def score(x): ...", r"defines no reward. Found: score. Define one of: reward_fn"),
        ("class A:\n    def reset(self): ...\n    def step(self, a): ...\n"
         "class B:\n    def reset(self, record): ...\n    def step(self, a): ...",
         "more than one .*: class A, class B"),
    ],
)
def test_a_file_of_two_interfaces_or_none_is_an_error_that_lists_them(tmp_path, text, complaint):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(TaskError, match=complaint):
        task_for(path, CAPITAL)


def test_an_interface_that_needs_records_says_so_without_them(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(STEP)
    with pytest.raises(TaskError, match=r"only step\(state, action, extra_info\): give it records with data.path"):
        load_task("", path=str(path))
