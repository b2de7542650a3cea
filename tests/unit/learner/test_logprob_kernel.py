"""The output layer's Triton kernels against its tensor operations, in the interpreter that `make kernels` unpacks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from learner.model.scoring import logprobs
from learner.model.scoring.logprobs import LogitRule, score_tokens

PACKAGES = Path(os.environ.get("STREAMRL_KERNELS", Path(__file__).parents[3] / ".venv-kernels"))
LAYER, LOGITS, ROUNDED, CALLS, FALLBACKS = "layer", "logits", "rounded", "calls", "fallbacks"


@pytest.mark.skipif(not PACKAGES.exists(), reason="needs the package triton, which CPU builds lack: make kernels")
@pytest.mark.timeout(240)
def test_kernels_give_the_values_and_gradients_of_the_tensor_operations(python_env):
    path = f"{python_env['PYTHONPATH']}{os.pathsep}{PACKAGES}"
    done = subprocess.run(  # Triton reads the variable as it is imported
        [sys.executable, "-m", __name__], env={**python_env, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    print(found)
    assert found[LAYER] < 1e-5 and found[LOGITS] < 1e-5, found
    assert 0.0 < found[ROUNDED] < 2**-7, found  # the interpreter cuts what a GPU rounds to bfloat16
    assert found[CALLS] > 100 and found[FALLBACKS] == 0, found


def differ(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference; relative where numbers are above 1."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.isfinite().all()
    return float(((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).detach().max())


def whole_layer(generator: torch.Generator, dtype: torch.dtype) -> float:
    """Scores of random tokens, and the gradients in hidden states and weights, with and without the kernels."""
    num_rows, hidden, width = (int(torch.randint(1, most, (), generator=generator)) for most in (9, 40, 9_500))
    states = torch.randn(num_rows, hidden, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(width, hidden, generator=generator).div(hidden**0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, width, (num_rows,), generator=generator)
    temperatures = 0.5 + 1.5 * torch.rand(num_rows, generator=generator)
    up = torch.randn(2, num_rows, generator=generator)
    rule, chunk = LogitRule(0.5 + float(torch.rand((), generator=generator))), 1 + width % 6

    def score() -> list[torch.Tensor]:
        values = score_tokens(states, weight, targets, temperatures, rule=rule, chunk_tokens=chunk)
        alone = torch.autograd.grad(values[num_rows % 2].sum(), (states, weight), retain_graph=True)
        return [*values, *alone, *torch.autograd.grad((values[0] * up[0] + values[1] * up[1]).sum(), (states, weight))]

    ours = score()
    with mock.patch.object(logprobs, "_kernel_for", lambda *args: None):
        theirs = score()
    if dtype == torch.float32:
        return max(map(differ, ours, theirs))
    for one, other in zip(ours[2:], theirs[2:], strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
    return max(map(differ, ours[:2], theirs[:2]))


def logit_gradient(kernel, generator: torch.Generator) -> tuple[float, float]:
    """Gradient in the logits: against autograd; and the one in bfloat16 in parts of the one in float32."""
    num_rows, width = 3, int(torch.randint(2, 9_500, (), generator=generator))
    logits = (3.0 * torch.randn(num_rows, width, generator=generator)).requires_grad_()
    targets = torch.tensor([0, width - 1, width // 2])
    factors, up = 0.5 + torch.rand(num_rows, generator=generator), torch.randn(2, num_rows, generator=generator)
    log_p = (logits * factors[:, None]).log_softmax(-1)
    chosen, entropy = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    theirs = torch.autograd.grad((chosen * up[0] + entropy * up[1]).sum(), logits)[0]
    with torch.no_grad():
        values = {"log_sums": (logits * factors[:, None]).logsumexp(-1), "entropy": entropy.detach()}
        given = (factors, targets), {**values, "to_logprobs": up[0], "to_entropy": up[1]}
        narrow = kernel.pull_back(logits.detach().clone(), *given[0], **given[1], dtype=torch.bfloat16)
        own = logits.detach().clone()
        ours = kernel.pull_back(own, *given[0], **given[1], dtype=torch.float32)
    assert ours is own, "in place"
    return differ(ours, theirs), float(((narrow - ours).abs() / ours.abs().clamp(min=1e-30)).max())


def main() -> None:
    """Print the largest differences as JSON."""
    generator, weight = torch.Generator().manual_seed(0), torch.zeros(4, 2)
    kernel = logprobs._kernel_for(weight, weight, None, LogitRule())
    capped, double = LogitRule(cap=3.0), weight.double()
    others = [
        (weight, weight, weight[:, 0], LogitRule()), (weight, weight, None, capped),
        (double, double, None, LogitRule()),
    ]
    with mock.patch.object(kernel, "measure", wraps=kernel.measure) as calls:
        layer = max(whole_layer(generator, (torch.float32, torch.bfloat16)[seed % 2]) for seed in range(60))
    logits, rounded = zip(*(logit_gradient(kernel, generator) for _ in range(20)), strict=True)
    fallbacks = sum(logprobs._kernel_for(*one) is not None for one in others)
    print(json.dumps(
        {LAYER: layer, LOGITS: max(logits), ROUNDED: max(rounded), CALLS: calls.call_count, FALLBACKS: fallbacks}
    ))


if __name__ == "__main__":
    main()
