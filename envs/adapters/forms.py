"""The interfaces that a user's file may follow, told by the names and parameters of what it defines.

    reward        a function reward_fn, reward or compute_score; a class with reward(record, completion)
    environment   a class with reset(record) and step(action)
    dialogue      reward_fn(messages, answer) with interact(messages)
    step          step(state, action, extra_info), perhaps with reset(extra_info)
    env_step      env_step(sample)
    rewards       classes with a name and __call__(messages, ground_truth, **kwargs), perhaps reward_transform_fn
    gymnasium     a class with reset(seed, options) -> (observation, info) and step(action) -> five values
    rollout       rollout(record, client), or a class with it: drives the generation itself
    generate      generate(config, tokenizer, router_url, sample), likewise
    loop          a class with _run_interaction_loop and rewards for what it leaves, likewise
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from streamrl.errors import TaskError

REWARD_NAMES = ("reward_fn", "reward", "compute_score")
"""Functions that score an answer to a record of `data.path`: see `envs.reward_file`."""
REWARDS = ("reward", "reward class", "rewards")
"""Kinds of forms that score an answer and play nothing."""
INTERFACES = (
    "reward_fn(messages, answer), perhaps with interact(messages); reward(prompt, completion, **record); "
    "step(state, action, extra_info); env_step(sample); rollout(record, client); a class with reset(record) and "
    "step(action); a class with Gymnasium's reset(seed, options) and step(action); classes with "
    "__call__(messages, ground_truth)"
)

@dataclass(frozen=True, slots=True)
class Form:
    """One interface that the file follows: its kind, what was found, and the objects that follow it."""

    kind: str
    what: str
    found: tuple[Any, ...]


def forms_of(module: ModuleType) -> list[Form]:
    """Every interface that the file follows. Raises TaskError for one that cannot be served."""
    own = own_names(module)
    functions = {key: value for key, value in own.items() if inspect.isfunction(value)}
    classes = [value for value in own.values() if inspect.isclass(value) and not inspect.isabstract(value)]
    forms = [*_function_forms(module, functions), *_class_forms(classes)]
    written_for = module.__dict__.get("reward_functions")  # a list of rewards that are made already
    if isinstance(written_for, list | tuple) and written_for and all(map(_scores_dialogues, map(type, written_for))):
        forms = [form for form in forms if form.kind != "rewards"]
        forms.append(Form("rewards", "reward_functions", tuple(written_for)))
    loops = [form for form in forms if form.kind == "loop"]
    rewards = [form for form in forms if form.kind == "rewards"]
    if loops and rewards:  # they belong together
        loop = loops[0]
        forms = [form for form in forms if form not in (loop, rewards[0])]
        forms.append(Form("loop", loop.what, (*loop.found, rewards[0])))
    return forms


def own_names(module: ModuleType) -> dict[str, Any]:
    """Functions, classes and other objects that the file itself defines, by name."""
    return {key: value for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """The names of what a function takes, without `self`."""
    return [
        p.name for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"
    ]


def _function_forms(module: ModuleType, functions: Mapping[str, Callable[..., Any]]) -> list[Form]:
    forms = []
    rewards = {name: getattr(module, name) for name in REWARD_NAMES if callable(getattr(module, name, None))}
    interact = functions.get("interact")
    if interact is not None and len(parameters_of(interact)) == 1:
        if "reward_fn" not in rewards:
            raise TaskError(
                f"{_file(module)} defines interact({', '.join(parameters_of(interact))}) and lacks "
                "reward_fn(messages, answer): add it, it scores the conversation when it is over."
            )
        forms.append(Form("dialogue", "reward_fn with interact", (rewards.pop("reward_fn"), interact)))
    forms += [Form("reward", name, (function,)) for name, function in rewards.items()]
    step = functions.get("step")
    if step is not None and len(parameters_of(step)) == 3:
        forms.append(Form("step", "step(state, action, extra_info)", (step, functions.get("reset"))))
    rollout = functions.get("rollout")
    if rollout is not None and "client" in parameters_of(rollout):
        forms.append(Form("rollout", f"rollout({', '.join(parameters_of(rollout))})", (rollout,)))
    generate = functions.get("generate")
    if generate is not None and "router_url" in parameters_of(generate):
        forms.append(Form("generate", f"generate({', '.join(parameters_of(generate))})", (generate,)))
        return forms  # an env_step beside it is its own
    env_step = functions.get("env_step")
    if env_step is not None and len(parameters_of(env_step)) == 1:
        forms.append(Form("env_step", "env_step(sample)", (env_step,)))
    return forms


def _class_forms(classes: list[type]) -> list[Form]:
    forms = []
    for kind in classes:
        if _has(kind, "_run_interaction_loop"):
            forms.append(Form("loop", f"class {kind.__name__} with _run_interaction_loop", (kind,)))
        elif _has(kind, "rollout") and "client" in parameters_of(kind.rollout):  # type: ignore[attr-defined]
            forms.append(Form("rollout", f"class {kind.__name__} with rollout", (kind,)))
        elif _has(kind, "reset", "step"):
            form = "gymnasium" if _is_gymnasium(kind) else "environment"
            forms.append(Form(form, f"class {kind.__name__}", (kind,)))
        elif _has(kind, "reward"):
            forms.append(Form("reward class", f"class {kind.__name__}", (kind,)))
    rewards = [kind for kind in classes if _scores_dialogues(kind)]
    if rewards:
        names = " and ".join(kind.__name__ for kind in rewards)
        forms.append(Form("rewards", f"the rewards {names}", tuple(rewards)))
    return forms


def _is_gymnasium(kind: type) -> bool:
    """Whether `reset` starts without a record: it takes nothing, or a seed and options."""
    return not set(parameters_of(kind.reset)) - {"seed", "options"}  # type: ignore[attr-defined]


def _scores_dialogues(kind: type) -> bool:
    call = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
    return inspect.isfunction(call) and parameters_of(call)[:2] == ["messages", "ground_truth"]


def _has(kind: type, *methods: str) -> bool:
    return all(callable(getattr(kind, method, None)) for method in methods)


def _file(module: ModuleType) -> str:
    return (module.__file__ or module.__name__).rpartition("/")[2]


def only_form(module: ModuleType, file_name: str) -> Form:
    """The one interface of the file. Raises TaskError listing what was found: two interfaces, or none."""
    forms = forms_of(module)
    if len(forms) == 1:
        return forms[0]
    if forms:
        names = ", ".join(form.what for form in forms)
        kinds = "reward" if all(form.kind in REWARDS for form in forms) else "reward or environment"
        raise TaskError(
            f"{file_name} defines more than one {kinds}: {names}. Leave one of them, or name the others differently."
        )
    own = sorted(key for key in own_names(module) if not key.startswith("_"))
    raise TaskError(
        f"{file_name} defines no reward. Found: {', '.join(own) or 'nothing'}. "
        f"Define one of: {INTERFACES}."
    )
