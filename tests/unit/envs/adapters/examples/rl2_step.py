import re
from typing import Dict

PASSAGES = {"capital of China": "Beijing is the capital of China."}


async def search_result(query: str) -> str:
    return f"\n<information>{PASSAGES.get(query, 'nothing')}</information>\n"


async def step(state: str, action: str, extra_info: Dict) -> Dict:
    env_response = {
        "next_state": None,
        "reward": 0.0,
        "score": 0.0,
        "done": False,
        "extra_info": {**extra_info, "turns": extra_info.get("turns", 0) + 1},
    }
    query = re.search(r"<search>(.*?)</search>", action)
    answer = re.search(r"<answer>(.*?)</answer>", action)
    if query:
        env_response["next_state"] = state + action + await search_result(query[1])
    elif answer:
        right = answer[1] == extra_info["answer"]
        env_response["reward"] = 1.0 - 0.1 * extra_info.get("turns", 0) if right else 0.1
        env_response["score"] = float(right)
        env_response["done"] = True
    else:
        env_response["next_state"] = "Please begin again: " + state
    return env_response
