from typing import Any, Dict, List, Union

from rl4llm.core.base_env import BaseRewardFunction, ChatMessage


class AccuracyReward(BaseRewardFunction):
    def __init__(self, name: str = "accuracy_reward", max_score: float = 1.0):
        super().__init__(name)
        self.max_score = max_score

    def __call__(
        self, messages: List[ChatMessage], ground_truth: Union[str, float, int], **kwargs: Dict[str, Any]
    ) -> float:
        completion = messages[-1].content
        return self.max_score if str(ground_truth) in completion else -1.0
