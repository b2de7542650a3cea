from typing import Dict

import torch
from rl4llm.core.base_env import BaseRewardFunction


class AccuracyReward(BaseRewardFunction):
    def __init__(self, name="accuracy_reward"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        return 1.0 if ground_truth in messages[-1].content else 0.0


class LengthReward(BaseRewardFunction):
    def __init__(self, name="length_reward"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        return -len(messages[-1].content) / 10


def reward_transform_fn(reward_dict: Dict[str, torch.Tensor]) -> torch.Tensor:
    assert reward_dict["accuracy_reward"].shape == (1,)
    return 0.7 * reward_dict["accuracy_reward"] + 0.3 * reward_dict["length_reward"]
