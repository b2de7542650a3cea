"""Run a model's code: `SandboxPool().run(program, cases)`. docs/sandbox.md says what each level protects."""

from envs.sandbox.detect import LEVELS as LEVELS
from envs.sandbox.limits import Call as Call
from envs.sandbox.limits import Case as Case
from envs.sandbox.limits import Execution as Execution
from envs.sandbox.limits import Limits as Limits
from envs.sandbox.pool import SandboxPool as SandboxPool
