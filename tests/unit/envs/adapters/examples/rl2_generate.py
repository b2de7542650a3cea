import re

from omegaconf import OmegaConf
from RL2.datasets import Sample, add_env_response, add_llm_response, initialize_state_dict
from RL2.utils.communication import async_request


async def env_step(tokenizer, sample: Sample):
    guess = re.search(r"\d+", sample.action_text)
    if guess and guess[0] == sample.sample["number"]:
        return {"next_state": None, "done": True, "reward": 1.0}
    hint = "higher" if guess else "a number"
    if sample.sample.get("fresh"):  # each observation is a new prompt
        return {"next_state": "say " + hint, "done": False, "reward": 0.125}
    return {"next_state": sample.state_text + sample.action_text + " " + hint + " ", "done": False, "reward": 0.25}


async def generate(config, tokenizer, router_url: str, sample: Sample):
    sampling_params = OmegaConf.to_container(config.sampling_params)
    match sample.status:
        case Sample.Status.RUNNING:
            sample.state_text = sample.sample["prompt"]
            sample.state_dict = initialize_state_dict(tokenizer, sample.state_text)
        case Sample.Status.DONE:
            return
    while True:
        response = await async_request(
            router_url, "generate",
            json={
                "input_ids": sample.state_dict["states"],
                "sampling_params": {**sampling_params, "no_stop_trim": True},
                "return_logprob": True,
            },
        )
        add_llm_response(sample, response)
        response = await env_step(tokenizer, sample)
        add_env_response(tokenizer, sample, response)
        if sample.status == Sample.Status.DONE:
            return
