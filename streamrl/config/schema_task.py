"""Settings of the task: its records, its environment, its reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from streamrl.config import NonNegative, Number, Positive, PositiveInt, Seconds

History = StrEnum("History", ["auto", "append"])
OnBadRecord = StrEnum("OnBadRecord", ["error", "skip"])
OnEnvError = StrEnum("OnEnvError", ["drop", "floor"])
PromptOverflow = StrEnum("PromptOverflow", ["skip", "truncate_left", "error"])
Sandbox = StrEnum("Sandbox", ["auto", "limited", "isolated"])
ToolRole = StrEnum("ToolRole", ["tool", "user"])


@dataclass
class DataConfig:
    path: Any = None
    """Your records: a .jsonl .json .csv .parquet .arrow file, a folder or a hub name, `split@` first; or a list."""
    weights: list[Number] | None = None
    """Shares of several paths in a pass, one number each; null takes every record once."""
    num_samples: PositiveInt | None = None
    """Most records of each path, the first ones; null takes all."""
    test_path: Any = None
    """Held-out records, as `data.path`; null holds a part of `data.path` out."""
    test_ratio: Annotated[float, Meta(ge=0, lt=1)] | None = None
    """Share that is held out; null is 3 %, at least 20 records or a fifth; 0 evaluates on training prompts."""
    prompt_key: str | None = None
    """Field of the prompt, a text or a list of messages; null takes messages, prompt, question or problem."""
    answer_key: str | None = None
    """Field of the right answer, `a.b` inside a mapping; null takes answer, ground_truth, solution or label."""
    chosen_key: str = "chosen"
    """Field of the better answer of a pair, for `streamrl dpo` and `streamrl train-reward-model`."""
    rejected_key: str = "rejected"
    """Field of the worse answer of a pair."""
    max_tokens: PositiveInt | None = None
    """Most tokens of a record of `streamrl sft`, and of each answer of a pair with its prompt; longer ones are cut.
    Null is all that `learner.max_tokens_per_device` and the positions hold, for a pair half of it a side."""
    train_roles: list[str] = field(default_factory=lambda: ["assistant"])
    """Whose messages `streamrl sft` trains on: assistant, tool, user, system; [tool] learns what tools return."""
    on_bad_record: OnBadRecord = OnBadRecord.error
    """A damaged record, or one without a prompt: `error` refuses the file, `skip` passes it over, named and counted."""
    shuffle: bool = True
    """Draw prompts in a seeded random order instead of 0, 1, 2, ..."""
    apply_chat_template: bool = True
    """Render messages with the tokenizer's chat template, if it has one."""
    system_prompt: str | None = None
    """A system message put before the task's own messages; `auto` is the reward's, which asks for what it reads."""
    chat_template: str | None = None
    """A chat template in place of the tokenizer's: Jinja text, or a file with it. It is exported with the model."""
    prompt_overflow: PromptOverflow = PromptOverflow.skip
    """A prompt over `rollout.max_prompt_tokens`: `skip` and count it, `truncate_left`, or stop with an `error`."""


@dataclass
class ToolUseConfig:
    parser: str = "auto"
    """The form of calls: auto, tags (Hermes, Qwen), marks, json (Llama 3), python, fence, angle, or a function."""
    max_calls: PositiveInt = 8
    """Most calls of an episode; then the model is asked for its final answer."""
    max_output_chars: PositiveInt = 2000
    """Longer answers of a tool are cut."""
    call_reward: Number = 0.0
    """Reward of a turn for each call in it that works; the score remains the task's."""
    error_penalty: NonNegative = 0.0
    """Loss of a turn for each call in it that fails."""
    role: ToolRole = ToolRole.tool
    """Role of a tool's answer in the conversation; `user` for a chat template that knows no tools."""
    describe: bool = True
    """Tell the model of its tools, by its chat template or in the system message."""
    timeout_s: Seconds = 10.0
    """Longest time of one program of the python tool."""
    sandbox: Sandbox = Sandbox.auto
    """Of the python tool: `isolated` programs have no network and no files, `limited` ones only limits."""
    documents: str | None = None
    """Documents of the search tool: a file of records with a `text`, read as `data.path` is, or the URL of a search
    service in Search-R1's form, such as examples/search_service.py."""


@dataclass
class EnvConfig:
    name: str = "string.reverse"
    """Registered task name, or `package.module:Class`."""
    path: str | None = None
    """A Python file with your own task; wins over `env.name`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task itself, e.g. `env.options.max_length=6`; another task or `{}` drops an experiment's."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Several tasks over the records of `data.path`: settings of env and reward by name, as `{math: {reward: {type:
    math}}}`; `env.task_field` of a record names its own."""
    task_field: str = "task"
    """Field of a record with the name of its task in `env.tasks`."""
    agent: str | None = None
    """An agent that plays the task's records: `agent.py:run` or `package.module:run`, an `async` function that calls
    the model by a client of the package openai; what it returns is the reward, or the task scores the last answer.
    `outside`: programs open the episodes by HTTP, `POST /sessions` at `actors.endpoint.bind`."""
    agent_command: str | None = None
    """An agent that is a program, started for each episode with OPENAI_BASE_URL, OPENAI_API_KEY and STREAMRL_RECORD (a
    JSON file); its last line is the reward, or the task scores the last answer."""
    tools: list[str] = field(default_factory=list)
    """Tools around any task: calculator, python, search, or your own class; needs env.max_turns over 1."""
    tool_use: ToolUseConfig = field(default_factory=ToolUseConfig)
    max_turns: PositiveInt = 1
    """Most turns of an episode; the last one ends it even if the environment is not done."""
    history: History = History.auto
    """Earlier turns that a chat template rewrites, as without their thinking: `auto` follows it, with several sequences
    in a trajectory; `append` keeps the turns as they were sampled."""
    step_timeout_s: Seconds = 30.0
    """Longest time that one reset or step of an environment may take."""
    num_threads: PositiveInt | None = None
    """Threads in which plain (not async) environments run; null is 4, and up to 64 while their calls mostly wait."""
    num_max_instances: PositiveInt | None = None
    """Most environments that one actor may have open, as containers or browsers; other episodes wait until one's
    `close()` has returned. Null is no limit."""
    on_error: OnEnvError = OnEnvError.drop
    """An environment that raises or hangs: `drop` aborts the trajectory, `floor` gives it `env.reward_floor`."""
    reward_floor: Number = 0.0
    """The reward of the whole trajectory of a failed environment under `env.on_error=floor`."""


@dataclass
class CodeRewardConfig:
    case_timeout_s: Seconds = 10.0
    """Longest time of one test case."""
    total_timeout_s: Seconds = 600.0
    """Longest time of all test cases of a program together."""
    memory_mb: PositiveInt = 1024
    """Memory of a program and all that it starts, together."""
    partial: bool = False
    """Reward the share of test cases that pass; false pays only for all of them and stops at the first that fails."""
    any_order: bool = False
    """Accept the words of an output line in any order."""
    sandbox: Sandbox = Sandbox.auto
    """`isolated` programs have no network and no files, `limited` ones only limits; auto isolates where it can."""
    url: str | None = None
    """A code verifier that runs the test cases instead, e.g. `python -m envs.rewards.verifier_server`."""


@dataclass
class ServiceConfig:
    url: str | None = None
    """Where to send requests."""
    model: str = ""
    """The model's name, as the service knows it."""
    timeout_s: Seconds = 30.0
    """Longest time of one request; a request that fails is sent three times at most."""
    max_concurrent: PositiveInt = 64
    """Requests of one actor at once; the others wait."""
    api_key_env: str | None = None
    """The environment variable that holds the key; the key itself is never part of a config."""


@dataclass
class JudgeConfig(ServiceConfig):
    prompt: str = (
        "Question:\n{question}\n\nReference answer:\n{answer}\n\nAnswer to be judged:\n{completion}\n\n"
        "Judge only whether the answer is right. End with one line: Score: N, where N is from 0 to 10."
    )
    """What the judge reads; {question}, {answer} and {completion} are filled in."""
    max_score: Positive = 10.0
    """The judge's best number; scores are divided by it."""
    max_tokens: PositiveInt = 512
    """Longest reply of the judge."""


@dataclass
class ModelRewardConfig(ServiceConfig):
    path: str | None = None
    """A reward model that each actor starts for itself: the folder of a sequence classifier with one label."""
    device: str = "auto"
    """Where the model of `reward.model.path` runs: auto, cpu, cuda, cuda:1."""


@dataclass
class RewardConfig:
    type: str | None = None
    """How answers to records of `data.path` are scored: exact, math, boxed, code, judge, ..., or your own as
    package.module:function (docs/rewards.md)."""
    weights: dict[str, Number] = field(default_factory=dict)
    """Several rewards with weights instead of one type, e.g. `reward.weights={math: 1.0, repetition: 0.2}`."""
    correct: Positive = 1.0
    """Reward of a right answer in the right form."""
    format_tags: list[str] = field(default_factory=list)
    """Tags that a completion must hold once each, in this order, the last one at its end; empty is the reward's own."""
    timeout_s: Seconds = 5.0
    """Longest time of one comparison of mathematical answers; a longer one counts as wrong."""
    num_workers: PositiveInt | None = None
    """Processes of each actor that compare answers or run programs; null is one for each core, at most 8."""
    length_chars: PositiveInt = 4000
    """The reward `length` falls from 0 to -1 over so many characters."""
    code: CodeRewardConfig = field(default_factory=CodeRewardConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    model: ModelRewardConfig = field(default_factory=ModelRewardConfig)
