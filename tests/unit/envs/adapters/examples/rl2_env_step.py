import re
from functools import partial
from typing import Any, Dict

from RL2.datasets import Sample, base_generate


async def env_step(sample: Sample) -> Dict[str, Any]:
    env_response = {"next_state": None, "done": True, "reward": 0.0}
    match = re.search(r"<answer>(.*?)</answer>", sample.action_text)
    if match is None:
        sample.sample["misses"] = sample.sample.get("misses", 0) + 1
        env_response["done"] = False
        env_response["next_state"] = sample.state_text + sample.action_text + "\nDo it again.\n"
        return env_response
    numbers = [int(n) for n in re.findall(r"\d+", match[1])]
    env_response["reward"] = 0.1
    if sorted(numbers) == sorted(sample.sample["numbers"]) and sum(numbers) == sample.sample["target"]:
        env_response["reward"] = 1.0 - 0.5 * sample.sample.get("misses", 0)
    return env_response


generate = partial(base_generate, env_step_fn=env_step)
