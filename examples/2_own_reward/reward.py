"""Quality of the complement of a DNA strand. Copy this file, and change what a good answer is."""


def reward_fn(messages, answer):
    """`messages` is the conversation with the model's completion last, `answer` the field of the record."""
    said = messages[-1]["content"].strip()
    right = sum(one == other for one, other in zip(said, answer, strict=False))
    return {
        "reward": right / max(len(said), len(answer)),  # to learn from: a base too many costs as much as a wrong one
        "score": said == answer,  # to judge by
    }
