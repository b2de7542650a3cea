"""Prove that vLLM works on this GPU, one step after the other, each in a process of its own with a time limit.

    import      the extensions of the carried wheel load beside this torch
    names       every name that the engine uses is there
    tests       tests/gpu/test_vllm.py: log-probs and an install in flight, with a tiny model
    native      tokens a second of the project's own engine with 64, 128 and 256 sequences of a 0.6B model
    eager       the same with vLLM, kernel by kernel
    captured    the same with vLLM's compiled passes and CUDA graphs
    install     pause and whole install with 64 sequences running
    quickstart  `streamrl launch experiment=quickstart actors.engine=vllm`, learner and actor on the one GPU
    realsize    five steps of the 0.6B model

A form of vLLM that fails with an older torch falls back by name: `actors.vllm.enforce_eager=true`, then the older model
runner (VLLM_USE_V2_MODEL_RUNNER=0). Later steps begin with the form that worked. Every step is one line of JSON.

Run: bench/gpu_vllm.sh prove [--dry-run] [--limit-s SECONDS]. A dry run goes through every step with vLLM's CPU build
and a tiny model; its numbers mean nothing and are not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:  # before the shapes are imported, here and in the processes that this one starts
    os.environ.setdefault("STREAMRL_BENCH_DRY_RUN", tempfile.mkdtemp(prefix="gpu-dry-run-"))

from bench import record as recording
from bench.gpu_shapes import DEVICE, DRY, large_folder
from bench.record import record

ROOT = Path(__file__).parent.parent
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
FORMS: dict[str, tuple[bool, dict[str, str]]] = {
    "captured": (False, {}),
    "captured, VLLM_USE_V2_MODEL_RUNNER=0": (False, V1),
    "enforce_eager": (True, {}),
    "enforce_eager, VLLM_USE_V2_MODEL_RUNNER=0": (True, V1),
}
"""By name: whether it is eager, and its environment."""
CAPTURED, EAGER = [*FORMS][:2], [*FORMS][2:]
LIMIT_S = {
    "import": 120, "names": 90, "tests": 200, "native": 120, "eager": 150, "captured": 240, "install": 180,
    "quickstart": 240, "realsize": 240,
}
SEQUENCES = (2, 4, 8) if DRY else (64, 128, 256)
NEW_TOKENS = 16 if DRY else 256


# --- steps, each in its own process -----------------------------------------------------------------------------------


def step_import(_: argparse.Namespace) -> dict[str, Any]:
    import torch

    names = ("vllm._C",) if DRY else ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch")
    for name in names:
        importlib.import_module(name)
    found = {"torch": torch.__version__, "extensions": names}
    if not DRY:
        attention = importlib.import_module("vllm.vllm_flash_attn")
        found |= {"gpu": torch.cuda.get_device_name(), "fa3": bool(getattr(attention, "FA3_AVAILABLE", True))}
    return found


def step_names(_: argparse.Namespace) -> dict[str, Any]:
    from actors.engines.vllm.imports import NAMES, check_names, vllm

    check_names()
    return {"vllm": vllm().version, "names": len(NAMES)}


def step_tests(_: argparse.Namespace) -> dict[str, Any]:
    device = "cpu" if DRY else "cuda"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_vllm.py", "-k", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode != 0 or "passed" not in last:
        raise RuntimeError(f"status {done.returncode}: {done.stdout[-3000:]}{done.stderr[-1000:]}")
    return {"pytest": last.strip("= ")}


def step_rates(args: argparse.Namespace) -> dict[str, Any]:
    """Median tokens a second of three repeats, by the number of sequences; the first, for warming up, is left out."""
    from bench.engine import Job, run_engine

    async def measure(engine: Any) -> dict[str, Any]:
        found = {}
        for count in SEQUENCES:
            jobs = [Job([5 + n % 7] * 64, NEW_TOKENS) for n in range(count)]
            seconds = []
            for _ in range(4):
                began = time.perf_counter()
                done = await run_engine(engine, jobs)
                seconds.append(time.perf_counter() - began)
                assert all(len(ids) == NEW_TOKENS for ids in done)
            found[str(count)] = count * NEW_TOKENS / statistics.median(seconds[1:])
        return {"tokens_per_s": found, "new_tokens": NEW_TOKENS}

    return asyncio.run(_with_engine(args, max(SEQUENCES), measure))


def step_install(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of pause and of the whole install of versions from the host."""
    from actors.engines.base import GenerateRequest
    from streamrl.messages import Sampling, VersionRef

    running = SEQUENCES[0]

    async def measure(engine: Any) -> dict[str, Any]:
        longest = 200 if DRY else 4000
        tasks = [
            asyncio.create_task(engine.generate(
                GenerateRequest([5 + n % 7] * 16, Sampling(), longest, seed=n, ignore_eos=True)
            )) for n in range(running)
        ]
        while engine.stats().running < running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.0 if DRY else 2.0)
        times = [await engine.install(args.tensors, VersionRef(1, version)) for version in range(1, 5)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return {
            "running": running, "pause_ms": [1000 * one.pause_s for one in times[1:]],
            "install_ms": [1000 * one.install_s for one in times[1:]],
        }

    return asyncio.run(_with_engine(args, running, measure, longest=4096 if not DRY else 256))


def step_quickstart(args: argparse.Namespace) -> dict[str, Any]:
    from bench.gpu_runs import quickstart_words

    words = quickstart_words(3 if DRY else 20, "shm,zmq")
    return _launched(args, [*words, "policy.tiny.num_heads=2"])  # vLLM has no attention for heads of 16 on a CPU


def step_realsize(args: argparse.Namespace) -> dict[str, Any]:
    from bench.gpu_runs import real_size_words

    words = real_size_words(args.model, 2 if DRY else 5)
    return _launched(args, [*words, *["rollout.train.sampling.max_new_tokens=16"] * bool(DRY)])


STEPS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "import": step_import, "names": step_names, "tests": step_tests, "native": step_rates, "eager": step_rates,
    "captured": step_rates, "install": step_install, "quickstart": step_quickstart, "realsize": step_realsize,
}


async def _with_engine(args: argparse.Namespace, most: int, measure: Callable, longest: int = 1024) -> dict[str, Any]:
    """Run `measure` with an engine that holds the model's weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from actors.engines.base import EngineSpec, build_engine
    from actors.engines.native.weights import checkpoint_tensors
    from actors.render import load_tokenizer
    from streamrl.messages import VersionRef

    dtype = torch.float32 if DRY else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, local_files_only=True)
    args.tensors = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}
    began = time.perf_counter()
    engine = build_engine("native" if args.step == "native" else "vllm", EngineSpec(
        model_dir=args.model, tokenizer=load_tokenizer(str(args.model)), max_num_seqs=most, max_tokens=longest,
        max_new_tokens=longest - 64, device=DEVICE, dtype=dtype, num_threads=2 if DRY else None,
        options={} if args.step == "native" else {"enforce_eager": FORMS[args.form][0]},
    ))
    try:
        await engine.install(args.tensors, VersionRef(1, 0))
        ready_s = time.perf_counter() - began
        return {"ready_s": ready_s, **await measure(engine)}
    finally:
        await engine.close()


def _launched(args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    from bench import gpu_runs

    eager = str(FORMS[args.form][0]).lower()
    out = Path(os.environ.get("OUT") or tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=large_folder()) as folder:
        found = gpu_runs.launch(
            [*words, "actors.engine=vllm", f"actors.vllm.enforce_eager={eager}", "launch.num_actors=1"],
            Path(folder) / "run", out / f"prove_{args.step}.log", check_only=False,
        )
    assert found is not None
    last = found.rows[-1]
    return {
        "steps": found.steps, "step_s": statistics.median(found.seconds_per_step), "phases_ms": found.phases_ms,
        "generated_tokens_per_s": last.get("throughput/generate_tokens_per_s"),
        "trained_tokens_per_s": last.get("throughput/train_tokens_per_s"),
    }


# --- the order, the limits and the fallbacks --------------------------------------------------------------------------


def run_step(name: str, form: str, model: Path, limit_s: float) -> tuple[dict[str, Any] | None, str]:
    """Found values of a step, or None with the end of what it said."""
    environment = {**os.environ, **FORMS.get(form, (False, {}))[1]}
    command = [sys.executable, "-m", "bench.gpu_prove", "--step", name, "--form", form, "--model", str(model)]
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            out, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return None, f"stopped after its limit of {limit_s:.0f} s"
        said.seek(0)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if child.returncode == 0 and lines:
            return json.loads(lines[-1]), ""
        return None, f"status {child.returncode}: {said.read()[-2000:]}"


def prove(steps: list[str], limit_s: float | None) -> list[dict[str, Any]]:
    """A recorded line for each step; None is no limit for all of them together."""
    from bench.gpu_runs import make_model

    began, lines, forms = time.monotonic(), [], [*FORMS]
    with tempfile.TemporaryDirectory(dir=large_folder()) as folder:
        model = Path(folder) / "model"
        if {"native", "eager", "captured", "install", "realsize"} & {*steps}:
            model = make_model(model, "tiny" if DRY else "0.6b")
        for name in steps:
            started = time.monotonic()
            found, form, errors = None, "", {}
            for form in _forms_of(name, forms):
                left = (limit_s or 1e9) - (time.monotonic() - began)
                if left < 10:
                    errors[form] = f"not begun: the {limit_s:.0f} s of all steps are over"
                    break
                found, errors[form] = run_step(name, form, model, min(LIMIT_S[name], left))
                if found is not None:
                    break
            if found is not None and form:
                forms = _after(forms, form)
            elif name == "captured":
                forms = [one for one in forms if one in EAGER]
            seconds = time.monotonic() - started
            params = {
                "ok": found is not None, "form": form, "limit_s": LIMIT_S[name], "dry_run": bool(DRY),
                "failed": {one: said for one, said in errors.items() if said}, **(found or {}),
            }
            lines.append(record(f"gpu.prove.{name}", seconds, "s", "lower", [seconds], params))
    return lines


def _forms_of(name: str, forms: list[str]) -> Iterator[str]:
    """The forms of vLLM that a step tries, in order; an empty name where none is started."""
    if name in ("import", "names", "native"):
        yield ""
    elif name in ("tests", "eager"):
        yield from (one for one in forms if one in EAGER)
    elif name == "captured":
        yield from (one for one in forms if one in CAPTURED)
    else:
        yield from forms


def _after(forms: list[str], worked: str) -> list[str]:
    """The forms that are still worth a try: none of the newer runner where only the older one worked."""
    older = FORMS[worked][1] == V1
    return [one for one in forms if FORMS[one][1] == V1] if older else forms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="with vLLM's CPU build and a tiny model")
    parser.add_argument("--limit-s", type=float, help="for all steps together")
    parser.add_argument("--only", choices=STEPS, action="append", help="this step; may be repeated")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--form", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(STEPS[args.step](args)), flush=True)
        return 0
    if DRY:
        recording.RESULTS = Path(DRY)
    lines = prove(args.only or [*STEPS], args.limit_s)
    failed = [line["name"] for line in lines if not line["params"]["ok"]]
    print(f"{len(lines) - len(failed)} of {len(lines)} steps passed{': not ' if failed else ''}{', '.join(failed)}",
          file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
