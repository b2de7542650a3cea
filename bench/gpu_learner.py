"""The learner on a GPU: attention, the output layer, a step with its publish, and log-probs against an actor's."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from actors.engines.base import GenerateRequest
from actors.engines.native.engine import NativeEngine
from actors.engines.native.weights import checkpoint_tensors
from bench.gpu_shapes import DEVICE, DRY, SHAPES, Packed, free_device_memory, large_folder, mixed_lengths, random_model
from bench.shared_prompts import ARMS, CASES, packed, trajectories
from learner.data.layout import make_layout
from learner.data.packing import MicroBatch
from learner.model.attention.kernels import ATTENTIONS, choose_attention, why_not
from learner.model.attention.packed import registered
from learner.model.gradients import optimizer_step
from learner.model.optimizer import Schedule, make_optimizer
from learner.model.policy import Policy, load_policy, policy_parameters
from learner.model.scoring.logprobs import score_tokens
from learner.publish.publisher import Publisher
from learner.ranks.mesh import Ranks
from streamrl.architectures.attention import CAUSAL
from streamrl.config.schema import OptimizerConfig
from streamrl.messages import Sampling, VersionRef
from streamrl.weights.gpu.cuda_memory import wait_for_device
from streamrl.weights.shm.transport import ShmPublisher


def seconds(work: Callable[[], object]) -> float:
    """Seconds of one call; waits for the device at both ends."""
    wait_for_device(torch.device(DEVICE))
    started = time.perf_counter()
    work()
    wait_for_device(torch.device(DEVICE))
    return time.perf_counter() - started


# --- attention ----------------------------------------------------------------------------------------------------


def measure_new_shapes(count: int) -> dict[str, list[float]]:
    """Milliseconds of a forward and a backward pass of blocks that were never seen, with and without cuDNN's plans."""
    attend, before = torch.nn.functional.scaled_dot_product_attention, torch.backends.cuda.cudnn_sdp_enabled()
    heads, found = 2 if DRY else 16, {}
    for name, cudnn in (("default", True), ("without_cudnn", False)):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        found[name] = []
        for number in range(count):
            length = (8 if DRY else 500) + 37 * number + 17 * cudnn  # new to each of the two
            q, k, v = (
                torch.randn(2, heads, length, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            found[name].append(1000 * seconds(
                lambda q=q, k=k, v=v: attend(q, k, v, is_causal=True).sum().backward()
            ))
    torch.backends.cuda.enable_cudnn_sdp(before)
    return found


def measure_attention(num_tokens: int, repeats: int, seed: int) -> tuple[dict[str, list[float]], str]:
    """Milliseconds of one layer over a packed row, in blocks and without padding; and why the latter is missing."""
    heads, size, device = (4, 16, torch.device(DEVICE)) if DRY else (16, 128, torch.device(DEVICE))
    packing = make_layout(mixed_lengths(num_tokens, seed)).to(device)
    missing = why_not("varlen", device=device, dtype=torch.bfloat16)
    found: dict[str, list[float]] = {}
    for kind in ["sdpa"] if missing else ["sdpa", "varlen"]:
        def work(kind: str = kind) -> None:
            q, k, v = (
                torch.randn(num_tokens, n, size, device=device, dtype=torch.bfloat16, requires_grad=True)
                for n in (heads, heads // 2, heads // 2)
            )
            ATTENTIONS[kind](q, k, v, packing, CAUSAL).sum().backward()

        found[kind] = [1000 * seconds(work) for _ in range(repeats + 2)][2:]
    return found, missing


# --- the output layer ---------------------------------------------------------------------------------------------


def measure_head(num_tokens: int, hidden_size: int, vocab_size: int, repeats: int) -> list[float]:
    """Milliseconds of log-probs and entropies of hidden states, forward and backward."""
    hidden = torch.randn(num_tokens, hidden_size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, device=DEVICE, dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    targets, ones = torch.randint(0, vocab_size, (num_tokens,), device=DEVICE), torch.ones(num_tokens, device=DEVICE)

    def work() -> None:
        logprobs, entropy = score_tokens(hidden, weight, targets, ones)
        (logprobs.sum() + 0.01 * entropy.sum()).backward()

    return [1000 * seconds(work) for _ in range(repeats + 2)][2:]


# --- the same numbers in actor and learner --------------------------------------------------------------------------


@dataclass(frozen=True)
class LagZero:
    """Absolute differences of log-probs of the same tokens under the same weights, in nats, token by token.

    `plain` is one unpadded pass of transformers in bfloat16 against one in float32: what rounding alone does.
    """

    actor_to_learner: list[float]
    actor: list[float]
    learner: list[float]
    plain: list[float]


def measure_lag_zero(shape: str, num_sequences: int, num_tokens: int, seed: int) -> LagZero:
    """Log-probs of the native engine against those of the learner, and each against float32.

    Random weights are scaled until the policy is as sure of itself as a trained one: logits of 10 to 30.
    """
    torch.manual_seed(seed)
    model = random_model(shape, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)
    weights = {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(model).items()}

    async def generate() -> list[tuple[list[int], list[int], list[float]]]:
        engine = NativeEngine(model, None, max_num_seqs=num_sequences, max_tokens=64 + num_tokens, device=DEVICE)
        await engine.install(weights, VersionRef(1, 1))
        prompts = [[5 + (7 * n + k) % 300 for k in range(16)] for n in range(num_sequences)]
        done = await asyncio.gather(*(
            engine.generate(GenerateRequest(prompt, Sampling(), num_tokens, seed=n, ignore_eos=True))
            for n, prompt in enumerate(prompts)
        ))
        await engine.close()
        return [(prompt, one.token_ids, one.logprobs) for prompt, one in zip(prompts, done, strict=True)]

    sampled = asyncio.run(generate())
    actor = torch.tensor([logprobs for _, _, logprobs in sampled])
    attention = choose_attention("auto", device=torch.device(DEVICE), dtype=torch.bfloat16)
    scorer = random_model(shape, tie_word_embeddings=False)
    scorer.load_state_dict(weights)
    scorer.eval().set_attn_implementation(registered(attention))
    rows = [torch.tensor(prompt + tokens) for prompt, tokens, _ in sampled]
    with torch.no_grad():
        packed = Packed.of(rows).score(Policy(scorer)).cpu()
    learner = packed.view(len(rows), -1)[:, -num_tokens:]
    scorer.set_attn_implementation("sdpa")
    plain = _plain_logprobs(scorer, torch.stack(rows), num_tokens)
    exact = _plain_logprobs(scorer.float(), torch.stack(rows), num_tokens)
    return LagZero(*((one - other).abs().flatten().tolist() for one, other in (
        (actor, learner), (actor, exact), (learner, exact), (plain, exact),
    )))


def _plain_logprobs(model: torch.nn.Module, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """float32 [sequences, count]: of the last tokens, by transformers' own pass and an output layer in float32."""
    tokens = tokens.to(DEVICE)
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state[:, -count - 1 : -1].float()
        logprobs = torch.log_softmax(hidden @ model.get_output_embeddings().weight.float().T, dim=-1)
    return logprobs.gather(-1, tokens[:, -count:, None])[..., 0].cpu()


# --- prompts that answers share ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedPrompts:
    """Milliseconds of both passes, packed tokens and most bytes in use, of each arm of bench.shared_prompts."""

    num_tokens: int  # of the trajectories, prompts counted for every answer
    pass_ms: dict[str, list[float]]
    packed: dict[str, int]
    peak_bytes: dict[str, int]


@contextlib.contextmanager
def policy_of_shared_prompts(shape: str) -> Iterator[tuple[Policy, str]]:
    """The policy of one sharded rank, with layers recomputed in the backward pass, and its kind of attention."""
    ranks, device = Ranks.start(DEVICE, sharded=True), torch.device(DEVICE)
    attention = choose_attention("auto", device=device, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=large_folder()) as folder:
        random_model(shape).save_pretrained(folder)
        free_device_memory()
        policy = load_policy(
            folder, dtype=torch.bfloat16, gradient_checkpointing=True, ranks=ranks, attention=attention,
            share_prompts=True,
        )
    try:
        yield policy, attention
    finally:
        ranks.close()


def measure_shared_prompts(policy: Policy, case: str, answer_tokens: tuple[int, int], repeats: int) -> SharedPrompts:
    """The arms of a case alternate. Prompts have 512 tokens, 64 answers are in a batch."""
    size, num_alike = CASES[case]
    num_answers, prompt_tokens, max_tokens = (16, 288, 4096) if DRY else (64, 512, 16_384)
    rows = trajectories(num_answers // size, 0, size=size, num_alike=num_alike, prompt_tokens=prompt_tokens,
                        answer_tokens=answer_tokens)
    if DRY:
        rows = [replace(row, prompt_ids=row.prompt_ids % 512, token_ids=row.token_ids % 512) for row in rows]
    arms = {arm: [one.to(torch.device(DEVICE)) for one in packed(rows, arm, max_tokens)] for arm in ARMS}
    pass_ms: dict[str, list[float]] = {arm: [] for arm in arms}
    peaks = {}
    for turn in range(repeats + 2):
        for arm, batches in arms.items():
            policy.zero_grad()
            if not DRY:
                torch.cuda.reset_peak_memory_stats()
            taken = seconds(lambda batches=batches: [_pass(policy, one) for one in batches])
            peaks[arm] = 0 if DRY else torch.cuda.max_memory_allocated()
            if turn > 1:
                pass_ms[arm].append(1000 * taken)
    return SharedPrompts(sum(row.num_tokens for row in rows), pass_ms,
                         {arm: sum(one.num_tokens for one in batches) for arm, batches in arms.items()}, peaks)


def _pass(policy: Policy, one: MicroBatch) -> None:
    logprobs, _ = policy(one.tokens, one.positions, one.packing, one.score_index, one.targets, one.temperatures)
    logprobs.sum().backward()


# --- FSDP2 --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    num_parameters: int
    num_tokens: int
    nbytes: int
    attention: str
    step_ms: list[float]
    publish_ms: dict[str, list[float]]  # by whether buckets are digested on the device too
    peak_bytes: int


def measure_fsdp2(shape: str, num_tokens: int, repeats: int, seed: int) -> Steps:
    """One rank, sharded, bf16 compute over float32 masters: forward, backward, clip, AdamW; then publishes."""
    torch.manual_seed(seed)
    ranks = Ranks.start(DEVICE, sharded=True)
    with tempfile.TemporaryDirectory(dir=large_folder()) as folder:
        random_model(shape).save_pretrained(folder)
        free_device_memory()
        attention = choose_attention("auto", device=torch.device(DEVICE), dtype=torch.bfloat16)
        policy = load_policy(
            folder, dtype=torch.bfloat16, gradient_checkpointing=True, ranks=ranks, attention=attention
        )
        optimizer, schedule = make_optimizer(policy, OptimizerConfig()), Schedule("constant", 1e-6, 1000)
        vocab_size = SHAPES[shape]().vocab_size

        def step(number: int) -> float:
            rows = [torch.randint(0, vocab_size, (length,)) for length in mixed_lengths(num_tokens, number)]
            batch = Packed.of(rows)
            wait_for_device(torch.device(DEVICE))
            started = time.perf_counter()
            (-batch.score(policy).mean()).backward()
            optimizer_step(policy, optimizer, schedule, step=number, max_grad_norm=1.0, ranks=ranks)
            wait_for_device(torch.device(DEVICE))
            return 1000 * (time.perf_counter() - started)

        step_ms = [step(number) for number in range(repeats + 3)][3:]
        publish_ms: dict[str, list[float]] = {}
        for fold in (False, True):
            with ShmPublisher(Path(folder) / f"docs-{fold}", "bench") as shm:
                publisher = Publisher(
                    policy_parameters(policy.model), wire_dtype=torch.bfloat16, bucket_bytes=64 << 20, shm=shm,
                    fold=fold,
                )
                found = []
                for version in range(repeats + 2):
                    published = publisher.publish(VersionRef(1, version))
                    assert published is not None
                    found.append(1000 * published.seconds)
                    shm.settle()
            publish_ms["fold" if fold else "plain"] = found[2:]
        num_parameters = sum(parameter.numel() for parameter in policy.parameters())
    ranks.close()
    peak = 0 if DRY else torch.cuda.max_memory_allocated()
    return Steps(num_parameters, num_tokens, published.nbytes, attention, step_ms, publish_ms, peak)
