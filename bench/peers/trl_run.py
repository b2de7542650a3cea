"""One run of TRL's GRPOTrainer, in an environment of its own: nothing of ours is imported.

Usage: python trl_run.py SETTINGS.json     prints one line of JSON: a time for each step, and tokens and samples of each
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main(path: str) -> None:
    settings = json.loads(Path(path).read_text())
    torch.set_num_threads(settings["num_threads"])
    folder = Path(settings["folder"])
    spec = importlib.util.spec_from_file_location("reward", folder / "reward.py")
    reward_file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reward_file)
    data = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    samples = settings["num_groups"] * settings["group_size"]
    num_tokens: list[int] = []

    def reward(prompts: list, completions: list[str], completion_ids: list[list[int]], **fields: list) -> list[float]:
        num_tokens.append(sum(map(len, completion_ids)))
        return reward_file.reward_fn(prompts, completions, fields["answer"], fields["kind"])

    class Clock(TrainerCallback):
        times = [time.perf_counter()]

        def on_step_end(self, args, state, control, **kwargs) -> None:  # noqa: ANN001 - transformers' own types
            self.times.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, seed=settings["seed"],
        max_steps=settings["num_steps"], learning_rate=settings["learning_rate"], lr_scheduler_type="constant",
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=samples // settings["micro_batch"],
        num_generations=settings["group_size"], max_completion_length=settings["max_new_tokens"],
        temperature=1.0, beta=0.0, loss_type="grpo", num_iterations=1, max_grad_norm=1.0,
        gradient_checkpointing=False, use_vllm=False, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    times = Clock.times
    print(json.dumps({
        "seconds": [end - start for start, end in zip(times, times[1:], strict=False)],
        "tokens": num_tokens, "samples": samples,
    }))


if __name__ == "__main__":
    main(sys.argv[1])
