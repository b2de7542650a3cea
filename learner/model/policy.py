"""The policy: any causal language model of transformers, scored packed, sharded with FSDP2 over several ranks.

Only the model's attention function and output layer are replaced: hidden states go to `score_tokens`, which holds a
chunk of logits at a time. `load_policy` checks that this gives the log-probs of eager transformers (`self_check`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from learner.checkpoint.model_files import (
    ModelFiles,
    empty_model,
    is_empty,
    materialize,
    read_first_layers,
    read_model,
    spread,
)
from learner.data.layout import PackedLayout, make_layout
from learner.data.packing import TokenSets
from learner.model.attention.kernels import choose_attention
from learner.model.attention.packed import ATTENTION, AXIS, decoder_of, packed_states, registered
from learner.model.scoring.logprobs import PLAIN, LogitRule, inspect_tokens, mass_below, score_tokens
from learner.model.scoring.self_check import NotExact, prepare, why_not_shared
from learner.model.tensor_parallel import split_model
from learner.ranks.mesh import Ranks
from streamrl.architectures.rope import fix_rope
from streamrl.architectures.saved_buffers import saved_tensors
from streamrl.config.schema import LearnerConfig
from streamrl.errors import ConfigError
from streamrl.weights.model_folder import check_folder

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Parts of a name that checkpointing, compiling and FSDP2 put into it."""


def policy_parameters(model: Module) -> list[tuple[str, Parameter]]:
    """(checkpoint name, parameter) in module order; of tied copies only the first, wrappers' prefixes removed."""
    return [(_checkpoint_name(name), parameter) for name, parameter in model.named_parameters()]


def policy_tensors(model: Module) -> list[tuple[str, Tensor]]:
    """All that a checkpoint of it holds: `policy_parameters`, then the saved buffers."""
    return [(_checkpoint_name(name), tensor) for name, tensor in saved_tensors(model)]


def travels_as(tensor: Any, dtype: torch.dtype) -> torch.dtype:
    """The type in which a tensor leaves the learner: a weight in `dtype`, a buffer in its own.

    A buffer is no master that is rounded in every pass: rounded, it would send tokens to other experts than here.
    """
    return tensor.dtype if isinstance(tensor, Tensor) and not isinstance(tensor, Parameter) else dtype


def _checkpoint_name(name: str) -> str:
    return reduce(lambda left, wrapper: left.replace(wrapper, ""), _WRAPPERS, name)


log = logging.getLogger("streamrl.learner")


@dataclass(frozen=True, slots=True)
class Inspect:
    """Requests for results of a scoring pass in addition to log-probs and entropies."""

    state_index: Tensor  # int64 [K] packed positions whose hidden states are wanted
    square_sums: bool = False  # the sum of squared probabilities of every scored token's distribution
    all_logprobs: bool = False  # the whole distribution of every scored token; for small vocabularies
    mass_below: bool = False  # the probability of all ids smaller than the scored token


@dataclass(frozen=True, slots=True, eq=False)
class Inspected:
    """Everything that a pass with `Inspect` returns."""

    logprobs: Tensor  # [M]
    entropy: Tensor  # [M]
    states: Tensor  # [K, H]
    square_sums: Tensor | None  # [M]
    all_logprobs: Tensor | None  # [M, V]
    mass_below: Tensor | None = None  # [M]


class Policy(nn.Module):
    """A causal language model that scores packed sequences; `policy.model` is the transformers model, names and all."""

    def __init__(self, model: Any, *, rule: LogitRule = PLAIN, chunk_tokens: int = 1024) -> None:
        """`rule`: the model's change of the logits of its output layer."""
        super().__init__()
        self.model = model
        self.rule = rule
        self.chunk_tokens = chunk_tokens
        self.shares_prompts = False
        """Sequences may be packed with their common beginning once (`learner.data.packing.pack(share=True)`)."""
        self.attention = "sdpa"
        """The kind of `learner.model.attention.kernels.ATTENTIONS` that it computes with."""

    def forward(
        self,
        tokens: Tensor,  # int64 [N] sequences end to end
        positions: Tensor,  # int64 [N] from 0 in each sequence
        packing: PackedLayout,
        score_index: Tensor,  # int64 [M] packed position whose hidden state predicts the scored token
        targets: Tensor,  # int64 [M] the scored tokens
        temperatures: Tensor,  # [M]
        inspect: Inspect | None = None,
        sets: TokenSets | None = None,  # the ids that targets were drawn from, where they were not drawn from all
    ) -> tuple[Tensor, Tensor] | Inspected:
        """Log-prob of each target and entropy of the distribution it was drawn from; [M] each, nats, float32.

        With `inspect` the answer is an `Inspected`: it is one pass, as FSDP2 gathers weights for `forward` only.
        """
        hidden = packed_states(decoder_of(self.model), tokens, positions, packing)
        head = self.output_layer
        read, bias = hidden.index_select(0, score_index), getattr(head, "bias", None)
        options = {"bias": bias, "rule": self.rule, "chunk_tokens": self.chunk_tokens, "sets": sets}
        logprobs, entropy = score_tokens(read, head.weight, targets, temperatures, **options)
        if inspect is None:
            return logprobs, entropy
        squares = everything = below = None
        if inspect.mass_below:
            below = mass_below(read, head.weight, targets, temperatures, **options)
        if inspect.square_sums or inspect.all_logprobs:
            squares, everything = inspect_tokens(
                read, head.weight, temperatures, keep_all=inspect.all_logprobs, **options
            )
        return Inspected(logprobs, entropy, hidden.index_select(0, inspect.state_index), squares, everything, below)

    @property
    def output_layer(self) -> nn.Module:
        return self.model.get_output_embeddings()

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)


def pass_options(learner: LearnerConfig, *, max_tokens: int) -> dict[str, Any]:
    """Keywords of `load_policy` that say how the networks of a run make their passes.

    Args:
        max_tokens: of the longest sequence.
    """
    return {
        "chunk_tokens": learner.logprob_chunk_tokens, "attention": learner.attention.name,
        "share_prompts": learner.share_prompts, "compile_with": "inductor" if learner.compile else None,
        "max_tokens": max_tokens,
    }


def load_policy(
    model_dir: Path | str, *, dtype: torch.dtype = torch.float32, gradient_checkpointing: bool = False,
    chunk_tokens: int = 1024, ranks: Ranks | None = None, max_tokens: int | None = None, attention: str = "sdpa",
    share_prompts: bool = False, compile_with: str | None = None,
    adapt: Callable[[Policy], None] | None = None, adapts_whole: bool = False, masters: torch.dtype = torch.float32,
    offload: bool = False, around: Callable[[Policy], nn.Module] | None = None,
) -> Policy:
    """A policy from a local checkpoint, ready to train; a collective call.

    With a mesh each rank reads the rows of its shards, and rank 0 checks the scoring on the first layers. Without one,
    and where `adapt` needs weights or files name them otherwise, the model is read into host memory in float32.

    Args:
        model_dir: a Hugging Face checkpoint directory; nothing is fetched and no code of it is run.
        dtype: of the computation; bfloat16 goes through FSDP2's mixed precision, so `ranks` must have a mesh.
        gradient_checkpointing: recompute each layer's activations in the backward pass.
        chunk_tokens: tokens whose logits exist at once.
        max_tokens: of the run's longest sequence; it decides between the frequencies of a longrope model.
        attention: "auto" or a kind of `learner.model.attention.kernels.ATTENTIONS`.
        share_prompts: find out whether a common beginning of sequences may be packed once (`Policy.shares_prompts`).
        compile_with: a backend of torch.compile for every decoder layer; None compiles nothing.
        adapt: changes its layers, before they are sharded; those of the files may still be without weights.
        adapts_whole: it needs the weights.
        masters: type of the weights between the passes, with a mesh; a policy that is trained needs float32.
        offload: keep this rank's shards in host memory, with a mesh; for a policy that is not trained.
        around: makes the network of its layers that is sharded in its place, with a mesh; what that leaves out is not
            read.
    Raises:
        ConfigError: no such directory, weights that another reader would take for others, a model whose packed
            log-probs would not be its own, or an attention that cannot be computed here; on every rank.
    """
    ranks, path = ranks or Ranks(), Path(model_dir)
    check_folder(path)
    attention = choose_attention(attention, device=ranks.device, dtype=dtype)
    options = {"max_tokens": max_tokens, "share_prompts": share_prompts}
    files = whole = None
    if ranks.fsdp_mesh is None or (adapt is not None and (adapts_whole or not _reads_rows(path, ranks))):
        model = read_model(path, attention=ATTENTION, needs_head=around is None)
        rule, shares = _checked(model, path, **options)
    else:
        model, files, whole, rule, shares = _skeleton(
            path, ranks, masters, needs_head=around is None, **options
        )
    empty = is_empty(model)
    policy = assemble(
        model, ranks, dtype=dtype, rule=rule, shares_prompts=shares, attention=attention, compile_with=compile_with,
        gradient_checkpointing=gradient_checkpointing, chunk_tokens=chunk_tokens, adapt=adapt, offload=offload,
        around=around,
    )
    if files is not None:
        files.fill(policy.model)
    elif empty:
        spread(whole, policy.model, ranks)
    return policy


def assemble(
    model: Any, ranks: Ranks, *, dtype: torch.dtype, rule: LogitRule = PLAIN, shares_prompts: bool = False,
    attention: str = "sdpa", compile_with: str | None = None, gradient_checkpointing: bool = False,
    chunk_tokens: int = 1024, adapt: Callable[[Policy], None] | None = None, offload: bool = False,
    around: Callable[[Policy], nn.Module] | None = None,
) -> Policy:
    """The policy around a model, whose weights may be yet to be loaded; sharded where there is a mesh."""
    # Dropout, skipped layers and noise in routers would change the ratio that is being trained on: actors have none.
    policy = Policy(model.eval(), rule=rule, chunk_tokens=chunk_tokens)
    policy.shares_prompts = shares_prompts
    _set_passes(policy, attention, compile_with)
    if adapt is not None:
        adapt(policy)
    if ranks.mesh.tensor > 1 and ranks.device_mesh is not None and around is None:
        if compile_with is not None:
            raise ConfigError("learner.compile=true does not know learner.mesh.tensor: leave one of them out.")
        split_model(model, ranks.device_mesh["tensor"])
    if gradient_checkpointing:
        _recompute_layers(model)
    if ranks.fsdp_mesh is None:
        if dtype != torch.float32:
            raise ConfigError(f"policy.dtype={dtype} goes through FSDP2: start the ranks with sharded=True.")
        return policy if ranks.device.type == "cpu" else policy.to(ranks.device)  # it was read on the CPU
    shard(policy if around is None else around(policy), decoder_layers(policy.model), ranks, dtype, offload=offload)
    return policy


def _checked(model: Any, path: Path, *, max_tokens: int | None, share_prompts: bool) -> tuple[LogitRule, bool]:
    """The rule of its logits, and whether a common beginning may be packed once. Raises ConfigError."""
    model.eval()
    try:
        rule = prepare(model, score_rows, max_tokens=max_tokens)
    except NotExact as error:
        raise ConfigError(f"{path}: the model cannot be trained packed: {error}.") from error
    reason = why_not_shared(model, score_shared, max_tokens=max_tokens) if share_prompts else "not asked for"
    if share_prompts and reason:
        log.warning("%s: a prompt is packed again for every answer to it: %s", path, reason)
    return rule, not reason


def _skeleton(
    path: Path, ranks: Ranks, masters: torch.dtype, *, needs_head: bool, max_tokens: int | None, share_prompts: bool
) -> tuple[Any, ModelFiles | None, Any, LogitRule, bool]:
    """A model without weights; the files to fill it from, or on rank 0 the whole model; the findings of the check."""
    model = empty_model(path, dtype=masters, attention=ATTENTION)
    files, whole, failure = ModelFiles(path), None, None
    by_rows = _reads_rows(path, ranks)
    rule, shares = PLAIN, False
    if ranks.rank == 0:  # the others wait: one copy of the layers, and one core that computes them
        try:
            whole = None if by_rows else read_model(path, attention=ATTENTION, needs_head=needs_head)
            files.check_tied(model)
            checked = whole or read_first_layers(path, files, model.config, attention=ATTENTION)
            rule, shares = _checked(checked, path, max_tokens=max_tokens, share_prompts=share_prompts)
        except ConfigError as error:
            failure = error
    if ranks.maximum(float(failure is not None)):
        raise failure or ConfigError(f"{path}: the model cannot be trained packed: see the error of rank 0.")
    rule = LogitRule(ranks.from_rank_zero(rule.scale), ranks.from_rank_zero(rule.cap or 0.0) or None)
    fix_rope(model, max_tokens)  # as `prepare` did with the one that it checked
    return model, files if by_rows else None, whole, rule, bool(ranks.from_rank_zero(float(shares)))


def _reads_rows(path: Path, ranks: Ranks) -> bool:
    """Tell whether the files hold every weight under its own name, on all ranks; a collective call."""
    model = empty_model(path, dtype=torch.float32, attention=ATTENTION)
    return ranks.maximum(float(not ModelFiles(path).hold(model))) == 0.0


def _set_passes(policy: Policy, attention: str, compile_with: str | None) -> None:
    """Change kernels after the checks, which are made with sdpa: kernels are compared with it where they run."""
    policy.attention = attention
    policy.model.set_attn_implementation(registered(attention, compiled=compile_with is not None))
    if compile_with is not None:  # before sharding, so that FSDP2's hooks run around compiled layers
        for layer in decoder_layers(policy.model):
            layer.compile(backend=compile_with, dynamic=True)


def score_rows(model: Any, rule: LogitRule, rows: Sequence[Tensor]) -> Tensor:
    """Log-prob of every token but each row's first, in one packed pass; `learner.model.scoring.self_check.Score`."""
    return _score(model, rule, rows, num_shared=0)


def score_shared(model: Any, rule: LogitRule, rows: Sequence[Tensor]) -> Tensor:
    """The same with the common beginning of all rows packed once, in two sequences of which one continues the other."""
    shortest = min(len(row) for row in rows)
    same = torch.stack([row[:shortest] for row in rows]).eq(rows[0][:shortest]).all(0)
    return _score(model, rule, rows, num_shared=int(same.long().cumprod(0).sum()))


def _score(model: Any, rule: LogitRule, rows: Sequence[Tensor], *, num_shared: int) -> Tensor:
    heads = [part for part in rows[0][:num_shared].tensor_split(2) if len(part)]
    parts = [*heads, *(row[num_shared:] for row in rows)]
    parents = [*range(-1, len(heads) - 1), *[len(heads) - 1] * len(rows)]
    positions = [torch.arange(num_shared), *(torch.arange(num_shared, len(row)) for row in rows)]
    start, index = num_shared, []
    for row in rows:
        own = torch.arange(start, start + len(row) - num_shared)
        index.append(torch.cat([torch.arange(num_shared), own])[:-1])
        start += len(own)
    targets = torch.cat([row[1:] for row in rows])
    scored, _ = Policy(model, rule=rule)(
        torch.cat(parts), torch.cat(positions), make_layout([len(part) for part in parts], parents),
        torch.cat(index), targets, torch.ones(len(targets)),
    )
    return scored


def _recompute_layers(model: Any) -> None:
    """Recompute each layer's activations in the backward pass."""
    # transformers renamed it in 5.23; both names take the keyword arguments of torch's checkpoint
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": False})  # nothing is drawn: there is no dropout
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # transformers recomputes in training mode only; its children stay without dropout
            for name, value in vars(module).items():
                if isinstance(value, float) and ("drop" in name or "jitter" in name):
                    setattr(module, name, 0.0)


def decoder_layers(model: Any) -> list[nn.Module]:
    """The units of sharding: the modules that the architecture declares indivisible (its decoder layers)."""
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def shard(
    module: nn.Module, layers: Sequence[nn.Module], ranks: Ranks, dtype: torch.dtype, *, offload: bool = False
) -> Any:
    """FSDP2: a unit per layer; the root holds embeddings, final norm and head, so its hook gathers them.

    Without a mesh the module merely moves to the ranks' device. Rows are cut over the ranks' context axis, if they have
    one: the ranks along it shard the module, too, so that gradients are added up over both. With `offload` shards
    lie in host memory, and each unit's are copied to the device as it is gathered.
    """
    for part in module.modules() if ranks.context is not None else ():
        if isinstance(part, PreTrainedModel):
            setattr(part, AXIS, ranks.context)
    on_gpu, offload = ranks.device.type == "cuda", offload and ranks.fsdp_mesh is not None
    if ranks.fsdp_mesh is not None:
        precision = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # Quantized weights are blocks that no rank could use in part: each has them whole.
        whole = {parameter for parameter in module.parameters() if not parameter.is_floating_point()}
        for part in (*layers, module):
            fully_shard(
                part, mesh=ranks.fsdp_mesh, mp_policy=precision, ignored_params=whole or None,
                offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy(),
            )
    if not offload:
        return materialize(module, ranks.device)
    materialize(module, torch.device("cpu"))
    for part in module.modules():
        part._buffers.update({
            name: buffer if buffer is None else buffer.to(ranks.device) for name, buffer in part._buffers.items()
        })
    return module


def keep_gathered(module: nn.Module) -> None:
    """Leave layers gathered from their forward to their backward pass, as ZeRO-2 does: one all-gather in place of two.

    A pass without a backward one leaves them gathered, too, until `learner.checkpoint.shards.reshard`.
    """
    if isinstance(module, FSDPModule):
        module.set_reshard_after_forward(False)
