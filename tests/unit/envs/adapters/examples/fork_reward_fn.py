def parse_answer(text):
    return text.rpartition("####")[2].strip()


def reward_fn(messages, answer):
    pred = parse_answer(messages[-1]["content"])
    return float(pred == answer)
