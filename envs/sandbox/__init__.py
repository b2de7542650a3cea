"""Run a model's code: `SandboxPool().run(program, cases)`. docs/sandbox.md says what each level protects."""

from envs.sandbox.isolation import Call as Call
from envs.sandbox.isolation import Case as Case
from envs.sandbox.isolation import Execution as Execution
from envs.sandbox.isolation import Limits as Limits
from envs.sandbox.pool import LEVELS as LEVELS
from envs.sandbox.pool import SandboxPool as SandboxPool
