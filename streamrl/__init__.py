"""streamrl: asynchronous off-policy reinforcement learning for language models.

The public face for users' own tasks. Everything else is imported from its own module.
"""

from streamrl.environment import ChatMessage, Env, Record, RewardFunction, SingleTurnTask, Step, Task
from streamrl.messages import Group, Member
from streamrl.version import __version__

__all__ = [
    "ChatMessage",
    "Env",
    "Group",
    "Member",
    "Record",
    "RewardFunction",
    "SingleTurnTask",
    "Step",
    "Task",
    "__version__",
]
