"""The top of a report: which run this is, its result, and what went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from html import escape
from pathlib import Path

from streamrl.metrics.diagnosis import diagnosis_of, learner_idle
from streamrl.metrics.files import in_short
from streamrl.metrics.run_record import RunRecord
from streamrl.metrics.summary import MEASURED, SUPERVISED, Summary, results_of, warnings_of
from streamrl.metrics.text import compact, duration, with_error
from streamrl.report.page import definition_list

OF_RL = ("groups", "tokens/s", "publish")
"""Bookkeeping that a run without a hub does not have."""
STATES = {
    "finished": "finished", "stopped": "stopped, can be resumed", "running": "running",
    "killed": "ended without a summary", "pruned": "pruned", "failed": "failed",
}


def title(record: RunRecord) -> str:
    """The name of the run, its state, and in one line the task, the model, the algorithm and the date."""
    state = "" if record.state == "finished" else f'<span class="badge {record.state}">{STATES[record.state]}</span>'
    about = [part for part in (task(record), model(record), algorithm(record), started(record)) if part]
    line = f'<p class="subtitle">{escape(" · ".join(about))}</p>' if about else ""
    return f"<h1>{escape(record.name)}{state}</h1>{line}"


def task(record: RunRecord) -> str:
    """The task by the name or the file that the settings give, with its options; of a data task the files first."""
    path, name = record.setting("env.path"), record.setting("env.name")
    data, options = record.setting("data.path"), record.setting("env.options", {})
    files = [Path(str(one)).name for one in (data if isinstance(data, list) else [data] if data else [])]
    if record.kind:
        return " ".join(files[:3])
    words = [*files[:3], Path(str(path)).name if path else "" if files else name or ""]
    words = [str(word) for word in words if word]
    words += [f"{key}={value}" for key, value in options.items()] if isinstance(options, Mapping) else []
    return " ".join(words)


def model(record: RunRecord) -> str:
    """The last part of the model's path, or the size of a tiny one."""
    if record.setting("policy.tiny.enabled"):
        return (f"tiny model ({record.setting('policy.tiny.num_layers')} layers of width "
                f"{record.setting('policy.tiny.hidden_size')})")
    path = record.setting("policy.model_path")
    return "/".join(Path(str(path)).parts[-2:]) if path else ""


def algorithm(record: RunRecord) -> str:
    """The trainer, if it is not RL; else the file of configs/algorithm if one was named, and loss and estimator."""
    if record.kind:
        return SUPERVISED.get(record.kind, record.kind)
    words = record.starts[0].get("command", "").split() if record.starts else []
    named = [word.partition("=")[2] for word in words if word.startswith("algorithm=")]
    parts = [record.setting("loss.surrogate"), record.setting("advantage.estimator")]
    loss = f"{parts[0]} with {parts[1]} advantages" if all(parts) else ""
    return ": ".join([*named, *([loss] if loss else [])])


def started(record: RunRecord) -> str:
    """The start of the run: `22 Nov 2026, 08:25`."""
    if not record.starts:
        return ""
    try:
        return datetime.fromisoformat(record.starts[0]["started"]).strftime("%-d %b %Y, %H:%M")
    except (KeyError, ValueError):
        return ""


def tiles(record: RunRecord) -> str:
    """The results in large type."""
    rows, summary = record.rows, record.summary
    found: list[tuple[str, str, str]] = []
    steps, scores, errors = record.evaluations()
    if scores and math.isfinite(scores[-1]):
        best = max(range(len(scores)), key=lambda i: (scores[i], -i))
        num = compact(record.last("eval/num_prompts", math.nan))
        found.append(("evaluation", with_error(scores[-1], errors[-1]),
                      f"from {compact(scores[0])}; best {compact(scores[best])} at step {steps[best]}; n = {num}"))
    results = results_of(rows) if record.kind else {}
    found += [(label, compact(results[f"{name}_last"]), f"from {compact(results[f'{name}_first'])}")
              for name, label in MEASURED.items() if f"{name}_last" in results]
    rewards = record.series("reward/mean")[1]
    if rewards:
        tail = rewards[-max(1, len(rewards) // 20) :]
        weights = (record.weights("reward/mean") or [1.0] * len(rewards))[-len(tail) :]
        mean = sum(reward * weight for reward, weight in zip(tail, weights, strict=True)) / sum(weights)
        found.append(("training reward", compact(mean),
                      f"from {compact(rewards[0])}; mean of the last {len(tail)} steps"))
    total = record.setting("trainer.num_steps")
    wall_s = summary.wall_s if summary and record.state == "finished" else record.last("run/wall_s", math.nan)
    found.append(("steps", f"{record.step}" + (f" of {total}" if total and total != record.step else ""),
                  f"in {duration(wall_s)}"))
    tokens = record.last("run/trained_tokens", math.nan)
    if math.isfinite(tokens):
        rate = compact(tokens / wall_s) if wall_s else "-"
        found.append(("tokens trained", compact(tokens), f"{rate} per second, waiting included"))
    if summary and not record.kind:
        found.append(("lag of the tokens", compact(summary.lag_mean),
                      f"on average; at most {summary.lag_max}, bound {summary.max_lag_bound}"))
    if not record.kind and (idle := learner_idle(rows)) is not None:
        found.append(("learner waited", f"{idle:.0%}", "of its time for data"))
    return '<dl class="tiles">' + "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b><span>{escape(more)}</span></dd></div>"
        for name, value, more in found) + "</dl>"


def messages(record: RunRecord) -> str:
    """Failures and warnings of the run, what limited its speed, and the notes that people wrote."""
    out = []
    if record.state == "killed":
        out.append(("warning", f"The run ended at step {record.step} without a summary: its learner was killed or "
                               "failed. The end of logs/learner.log may say why."))
    if record.failure:
        out.append(("warning", f"The run failed: {record.failure}"))
    if record.damaged:
        out.append(("warning", f"Left out, because damaged: {in_short(record.damaged)}."))
    summary = record.summary
    if summary and summary.stopped.startswith("pruned"):
        out.append(("", f"The search stopped this run because others did better: {summary.stopped}."))
    if summary and summary.num_lag_violations:
        out.append(("warning", f"{summary.num_lag_violations} trajectories were trained on beyond the lag bound."))
    failed = int(max([0, *record.series("hub/num_episodes_failed")[1]]))
    if failed:
        first = summary.first_failure if summary else ""
        out.append(("warning", f"{failed} episodes failed in their environment. " + (first or "See the logs.")))
    skipped = int(sum(record.series("policy/num_skipped_steps")[1]))
    if skipped:
        out.append(("warning", f"{skipped} steps were skipped: their loss or gradient was not finite."))
    out += [("warning", f"{text[:1].upper()}{text[1:]}.") for text in warnings_of(record.rows)]
    if diagnosis := diagnosis_of(record.rows):
        out.append(("", f"Bottleneck: {diagnosis.text}."))
    boxes = [f'<div class="message {css}">{escape(text)}</div>' for css, text in out]
    if record.notes:
        boxes.append(f'<div class="message"><pre>{escape(record.notes)}</pre></div>')
    return "".join(boxes)


def details(record: RunRecord) -> str:
    """The command line, the machine, the bookkeeping, what the hub had to say, and the configuration."""
    facts = [("command", start["command"]) for start in record.starts if start.get("command")]
    facts += [("commit", start["commit"]) for start in record.starts[-1:] if start.get("commit")]
    facts += [("streamrl", start["version"]) for start in record.starts[-1:] if start.get("version")]
    versions, told = record.config.get("versions"), record.status.get("notices")
    facts += [(str(name), str(one)) for name, one in (versions if isinstance(versions, dict) else {}).items()]
    parts = [definition_list("facts", facts)]
    if record.summary:
        facts = bookkeeping(record.summary)
        parts.append(definition_list("facts", [one for one in facts if not record.kind or one[0] not in OF_RL]))
    notices = [str(notice) for notice in (told if isinstance(told, list) else ())]
    if notices:
        parts.append(f'<h3>What the hub reported</h3><pre class="wrapped">{escape(chr(10).join(notices))}</pre>')
    out = f'<details open><summary>Command, machine, counts</summary>{"".join(parts)}</details>' if any(parts) else ""
    if record.config_text:
        out += f"<details><summary>Configuration</summary><pre>{escape(record.config_text)}</pre></details>"
    return out


def bookkeeping(summary: Summary) -> list[tuple[str, str]]:
    """Counts of the whole run; those that are zero in a healthy one only if they are not."""
    groups = [f"{summary.num_groups_trained} trained of {summary.num_groups_leased} leased"]
    groups += [f"{summary.num_groups_stale} too old"] if summary.num_groups_stale else []
    recovered = [
        f"{count} {what}" for count, what in (
            (max(0, summary.num_leases_reissued - summary.num_leases_retried), "leases reissued"),
            (summary.num_leases_retried, "leases retried after a failed episode"),
            (summary.num_duplicates_dropped, "duplicates dropped"), (summary.num_actor_restarts, "actor restarts"),
        ) if count]
    return [
        ("device", f"{summary.device}, {summary.dtype}, seed {summary.seed}"), ("groups", ", ".join(groups)),
        *([("recovered", ", ".join(recovered))] if recovered else []),
        *([("sandbox", f"level {summary.sandbox_level}")] if summary.sandbox_level else []),
        ("tokens/s", f"{compact(summary.tokens_per_s_train)} trained, "
                     f"{compact(summary.tokens_per_s_generate)} generated"),
        ("publish", f"{duration(summary.publish_s_mean)} on average"), ("id", summary.run_id),
    ]
