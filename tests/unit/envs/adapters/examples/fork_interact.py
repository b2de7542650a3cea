import re

TOOL = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
FACTS = {"highest mountain": "Mount Everest"}


def interact(messages):
    queries = re.findall(r"<search>(.*?)</search>", messages[-1]["content"])
    return [{"role": "tool", "content": FACTS.get(query, "nothing found")} for query in queries]


def reward_fn(messages, answer):
    preds = re.findall(r"<answer>(.*?)</answer>", messages[-1]["content"])
    if len(preds) == 0:
        return False
    return preds[-1].lower() == answer.lower()
