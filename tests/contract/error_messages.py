"""Every error text of the code, from its source: `python -m tests.contract.error_messages` prints the site's page.

A text names what is wrong, what was got, and what to do. Where it cannot say what to do, `REMEDIES` does, for the page.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import streamrl.errors as errors

ROOT = Path(__file__).parents[2]
ROOMS = ("streamrl", "actors", "learner", "envs")
CLASSES = (
    "ConfigError", "TaskError", "RequestError", "EngineError", "CheckpointError", "RunLockedError", "RunFailedError",
    "ControlError", "StreamrlError", "ApiError",
)
"""Errors that end a command or a process, and those that an agent's client gets over HTTP.

Refused frames and retried downloads are logged and counted instead.
"""
HOLE = "…"

SECTIONS: dict[str, tuple[str, ...]] = {
    "Settings": (
        "streamrl/config/", "streamrl/extension.py", "streamrl/named_code.py", "streamrl/algorithms/",
        "learner/objective/", "learner/setup/dry_run.py",
        "learner/hub/ledger/tables/settings.py", "streamrl/metrics/trackers/", "streamrl/metrics/ranking.py",
        "streamrl/sweep/", "streamrl/cli.py",
    ),
    "Agents over HTTP": ("actors/endpoint/",),
    "Your task": ("envs/", "streamrl/environment.py", "actors/episode.py", "actors/render.py", "actors/trajectory/"),
    "Model and optimizer": ("learner/model/", "learner/data/"),
    "Devices and packages": ("learner/setup/preflight.py", "learner/ranks/mesh.py", "streamrl/weights/gpu/",
                             "streamrl/gpus.py", "actors/settings.py"),
    "Engines": ("actors/engines/", "actors/weights/"),
    "Run directories and checkpoints": (
        "streamrl/run_dirs.py", "learner/checkpoint/", "learner/hub/ledger/snapshots.py", "streamrl/metrics/",
        "streamrl/weights/shm/", "streamrl/weights/saved.py",
    ),
    "Processes and connections": ("",),
}
"""Heading of the page -> beginnings of the paths whose errors stand under it; the first that fits."""

WHAT_TO_DO = re.compile(
    r"\b(add|bind|check|choose|define|derive|did you mean|give|install|is unknown|leave|lists them|look at|lower|fix"
    r"|make it|must|name it|name one|name another|name the|name them|needs? at least|needs a|pip install|put|quote"
    r"|raise|reinstall|remove|restart|restore|return|run `|save|say|scale it|see|set|start|stop|streamrl launch|take"
    r"|copy|find|train with|try again|turn|use|valid options|widen|write|expected|allowed are|it has)\b",
    re.IGNORECASE,
)
"""A text with one of these says what to do, or what it would have accepted."""


@dataclass(frozen=True, slots=True)
class ErrorText:
    """One error of the code; in `text` a hole stands for what is filled in."""

    path: str
    error: str
    text: str

    @property
    def section(self) -> str:
        return next(title for title, begins in SECTIONS.items() if self.path.startswith(begins))

    @property
    def remedy(self) -> str:
        """Advice, where the text itself gives none."""
        return next((remedy for piece, remedy in REMEDIES.items() if piece in self.text), "")


@cache
def error_texts() -> tuple[ErrorText, ...]:
    """All texts, by path and line; those that only pass another error's text on are left out."""
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            tree = ast.parse(path.read_text())
            constants = _constants(tree)
            for error, node in _raised(tree):
                text = " ".join(_template(node, constants).split())
                if re.search(r"[A-Za-z]{3}", text.replace(HOLE, "")):
                    found[ErrorText(str(path.relative_to(ROOT)), error, text)] = None
    return tuple(found)


def _raised(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """(class, message) of every `raise Class(message)` and of every `_need(condition, message)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = getattr(node.exc.func, "id", "")
            if name in CLASSES and node.exc.args:
                yield name, node.exc.args[2 if name == "ApiError" else 0]  # status, code, message
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_need":
            yield "ConfigError", node.args[1]


def _constants(tree: ast.Module) -> dict[str, str]:
    """Texts that the module gives a name: sentences that several errors end with."""
    return {
        target.id: _template(node.value, {}) for node in tree.body if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Name)
    }


def _template(node: ast.expr, constants: dict[str, str]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_template(part, constants) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _template(left, constants) + _template(right, constants)
        case ast.Name(id=name) | ast.FormattedValue(value=ast.Name(id=name)):
            return constants.get(name, HOLE)
    return HOLE


@cache
def page() -> str:
    """The page `errors.md` of the site."""
    parts = [
        "# Error messages\n",
        "Every error that ends a command or a process, with `…` for what is filled in. Where a message itself says",
        "what to do, the right column is empty. This page is made from the code",
        "(`python -m tests.contract.error_messages`).",
        "Symptoms without a message: [Troubleshooting](troubleshooting.md).",
    ]
    for title in SECTIONS:
        parts += [f"\n## {title}\n", "| message | what to do |", "|---|---|"]
        texts = sorted({(one.text, one.remedy) for one in error_texts() if one.section == title})
        parts += [f"| {_code(text)} | {remedy} |" for text, remedy in texts]
    parts += ["\n## Classes\n", "All of them stand in `streamrl.errors`.\n", "| class | meaning |", "|---|---|"]
    parts += [f"| `{one.__name__}` | {_meaning(one)} |" for one in error_classes()]
    return "\n".join(parts) + "\n"


def error_classes() -> list[type[errors.StreamrlError]]:
    """Every exception that streamrl raises on purpose, in the order of their module."""
    found = [one for one in vars(errors).values() if isinstance(one, type)]
    return [one for one in found if issubclass(one, errors.StreamrlError)]


def _meaning(cls: type[errors.StreamrlError]) -> str:
    if issubclass(cls, errors.WireError):
        return f"Bytes from a peer were refused; counted as `{cls.counter}`, and no process ends."
    return " ".join((cls.__doc__ or "").split())


def _code(text: str) -> str:
    text = text.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


REMEDIES: dict[str, str] = {
    "env.tasks.…: …": "it goes on with the error of that task's own settings",
    # commands for a run
    "it is from another release": "use the release that the run was started with",
    ", not …": "a smaller number",
    "scale the run once its hub listens": "try again in a moment",
    "it is of an older release": "use the release that the run was started with",
    "cannot be reached at": "it names the reason; give the command as the user who started the run",
    ") did not answer within": "it is stopped, or overloaded: look at its log, and try again",
    "a control request is an object with a verb": "`docs/running.md` lists the commands",
    " is over: ": "it says how it ended, and how to go on",
    "its hub does not listen yet": "try again in a moment",
    " is connected…": "take a name that `streamrl status RUN` lists",
    # settings
    "cannot be read as settings": "fix the YAML; the place follows",
    "a settings file holds settings only": "write out what is meant, in fewer values",
    "is not an option here": "leave the dashes out",
    "Unknown key": "take the name that it suggests; `streamrl settings WORD` searches for others",
    "no such settings file": "check the path; it is relative to the directory you are in",
    "ranks train whole groups, some would have none": "fewer ranks, or more prompts in a step",
    "rollout.num_min_members=": "lower the first or raise the second",
    "names a transport twice": "name it once",
    ": module": "check the spelling of the attribute, and that the module that is imported is yours",
    "is no knob of": "take one of those that it lists",
    "advantage.estimator and loss.surrogate:":
        "[one importance weight for each term](formulas.md#one-importance-weight-per-term)",
    "do nothing with objectives.combine=reward": "leave them out, or choose another `objectives.combine`",
    "which are no components": "name only what `objectives.components` names",
    "overlong.scale=": "set `overlong.cache_ratio` too, or leave both out",
    # the task
    "record[": "a prompt is a string or a list of role and content: [your environment](environments.md)",
    "parts of … names": "report fewer parts",
    "got a …": "`task(**options)` must return a task",
    "ran for more than env.step_timeout_s": "make the environment faster, or raise `env.step_timeout_s`",
    "where ChatMessage(role, content) belongs": "wrap the text: `ChatMessage(\"user\", text)`",
    "target and reward disagree": "the reward must be highest for the text that `target` returns",
    "Unknown task": "take a name that it lists, or give your file as `env.path`",
    "name a class or a function that returns a task": "check what stands behind the colon",
    "A file of your own can also be given": "correct the name, or give a file as `env.path`",
    "is a class without": "add the methods that it names",
    "defines no task": "the forms of a task file: [your environment](environments.md)",
    "…=…: no such file (looked": "check the path; it is relative to the directory you are in",
    "It lacks": "add the methods that it names",
    "it is built into Python": "name a class or function of yours",
    "could not be made with options": "correct `env.options`, or the constructor that raised",
    "failed while it was loaded": "fix the line that it names; the file is plain Python",
    "is not a pure function of its seed": "another version of reasoning_gym made this run: install the same one",
    "refused the options": "correct `env.options`; the dataset's own message follows",
    "field … is empty": "fill it in, or leave the record out",
    ", not an object: …": "every record is an object: `{\"prompt\": ..., \"answer\": ...}`",
    "not JSON (…)": "fix the line that it names",
    "images and audio are not supported": "use records with text only",
    "a message has a role of": "send messages of that form",
    "the call got": "leave the option out; make several calls for several answers",
    "a client serves the rollout that it was given to": "make all calls before the rollout returns",
    "an actor has generate, list_workers": "ask other services at their own addresses",
    "which JSON cannot carry": "convert it to text or numbers",
    "holds text that is not JSON": "fix the field, or name another with `data.prompt_key`",
    "holds no records": "check that the file is the right one",
    "…: no such file (looked at …).": "check the path; it is relative to the directory you are in",
    "is not a readable": "write the file again; its library's own message follows",
    "…: cannot be read: …: …": "write the file again; its library's own message follows",
    "gave no answer: …": "check that the service runs and that the address is right",
    "the judge gave no number": "ask for a number in `reward.judge.prompt`",
    "is not that of a chat completion": "name the address of an OpenAI-compatible chat completion",
    "the reward model's reply holds no score": "check that the service is a reward model; its reply follows",
    "which this record does not have": "take a field that it lists, or add the field to every record",
    "1 to … printable characters": "shorten the name",
    "a sandbox pool has 1 to 128 workers": "a number in this range",
    "Level 2 needs": "install bubblewrap, allow user namespaces, or take level 1: [the sandbox](sandbox.md)",
    "this sandbox pool is closed": "make a new pool; this one is past its `with` block",
    "no sandbox could be started": "the reason follows: [the sandbox](sandbox.md)",
    # model and optimizer
    "refuses these settings": "correct `policy.optimizer`; the optimizer's own message follows",
    "does nothing with ….name": "leave it out, or choose an optimizer that has it",
    "the model cannot be trained packed": "the sentence says why; docs/models.md lists the families that are exact",
    "cannot be loaded for packed scoring": "choose another model; please report this one",
    "so both need one tokenizer": "name a model with the policy's tokenizer",
    "reference.model_path=…:": "name a checkpoint that loads",
    "a tiny model reads one user message": "use a real model with `policy.model_path`, or drop what stands in the way",
    # engines
    "a request needs a prompt and room": "raise `rollout.train.sampling.max_new_tokens` or shorten the prompt",
    "exceed the engine's max_tokens": "shorten prompts, or lower the sampling limits",
    "a prompt token lies outside the vocabulary": "install the same release on both sides: the tokenizers differ",
    "this model belongs to a NativeEngine": "build a model of your own to call it",
    "run.device=cuda: local rank": "fewer ranks, or check CUDA_VISIBLE_DEVICES",
    "the native engine cannot run": "`actors.engine=vllm`, or a family that docs/models.md lists as exact",
    "an engine needs max_num_seqs": "raise `actors.num_concurrent`",
    "exceeds the model's max_position_embeddings": "lower `rollout.max_prompt_tokens` or the sampling limits",
    "the engine is closed": "the actor is ending; look further up in its log",
    "vLLM ended a sequence without an output": "a bug: please report it with the actor's log",
    "vLLM refuses the request": "change what it names",
    "vLLM goes down to": "raise the temperature, or use 0",
    "log-probs for … tokens": "a bug: please report it with the actor's log",
    "vLLM's version labels cover": "a bug: please report it with the actor's log",
    "vLLM labeled tokens with": "a bug: please report it with the actor's log",
    "vLLM failed": "the reason follows; the core starts again by itself",
    "vLLM's core is dead": "it starts again by itself; the reason stands further up in the actor's log",
    "vLLM's core died before it answered": "it starts again by itself; the reason stands further up in the actor's log",
    "times without finishing a sequence": "look for the first death in the actor's log; often memory: lower "
    "`actors.vllm.gpu_memory_utilization` or `actors.num_concurrent`",
    "names no `architectures`": "use a checkpoint that was saved with transformers",
    "has no such engine argument": "take the name that it suggests",
    # run directories and checkpoints
    "it is not a summary of this release": "read it with the release that wrote it",
    "was it edited or cut short": "`streamrl report` works without it",
    "a newer learner owns": "only one learner may own a run: stop the other one, or resume with it",
    "belongs to run": "resume in the directory of the run that wrote it",
    "is below …, which wrote this": "a newer learner has written there: resume from its directory",
    # the log of a run
    "there is nothing to verify": "a run that trained a batch",
    "it cannot be verified (stream.keep": "a run whose log or checkpoints reach back further",
    "recorded answers have no weights": "`docs/log.md`: only rewards are computed of them",
    "no batch of … is for a version from": "versions that the log names: `streamrl stream RUN --kind batch`",
    "record … of the log: …": "put back the run directory as it was, with its folder `stream`",
    "has no version …: its log leads": "a version that the log has",
    "leads to version … only, not to": "a version that the log has",
    "nothing to search": "a run that trained a batch",
    "gave no score: …": "the text says why; fix that first",
    "trained no batch between versions": "versions between those that it names",
    "exists to begin from: ask for a version": "a version from there on, or keep more of the log",
    "lists the groups of a run with the version": "a group that is listed there",
    "the log of the run is damaged, so what was trained": "what the text says",
    "while the log was trained again": "`streamrl resume`",
    "inside the checkpoint cannot be read": "resume with the release that wrote the checkpoint",
    "was not saved": "the reason follows: usually a full disk; the run goes on from the checkpoint before",
    "does not match its own digest": "the checkpoint is damaged: the newest good one is taken by itself",
    "… is missing": "the checkpoint is incomplete: the newest good one is taken by itself",
    "the manifest says": "the checkpoint is damaged: the newest good one is taken by itself",
    "only blocks are written": "a bug: please report it",
    "it can be saved by one learner rank only": "`launch.num_learner_ranks=1`, or another optimizer",
    "it belongs to another model": "resume with the `policy.model_path` of the run",
    "in the checkpoint and … here: another model": "resume with the `policy.model_path` of the run",
    "its config.json cannot be read": "download or save the checkpoint again",
    "numbers needed here": "files of the checkpoint are missing: copy the whole directory",
    "the ledger has format": "resume with the release that wrote the checkpoint",
    "… cannot be read: …": "the checkpoint is damaged: the newest good one is taken by itself",
    # processes
    "The run ended with status": "the last lines of the log that it names have the reason",
    "could be scored, so the run stops": "[the environment fails](troubleshooting.md#the-environment-fails)",
    "cannot bind": "name an address of this machine: `tcp://127.0.0.1:0` always works",
    "the check of the settings ended with status": "a bug: please report it with the lines that follow",
    "(learner.stall_fail_s=…)": "[nothing arrives](troubleshooting.md#the-run-stands-still)",
    "it is presumed dead": "look for the first error in `logs/learner.log`",
    "the hub process ended with status": "look for the first error in `logs/learner.log`",
}
"""Part of a text -> what to do; shown for every text that holds the part."""

if __name__ == "__main__":
    print(page(), end="")
