"""Off-policy algorithms as pure tensor functions: no configuration, no logging, no I/O, no process groups.

Every name in a module's `__all__` is public and importable from here. Read `ratios` first (how far the actor's policy
is from the learner's), then `returns` and `groups` (advantages without their own ratio) and `surrogates` (losses that
carry it); `registry` checks that a pair applies the ratio exactly once. Beside them stand `kl`, `controllers`, `scores`
and `staleness` (lag, drift, and what they control). `checks` holds the rules that every function obeys: arguments are
read once, where a caller hands them over. In formulas, ell is the log-ratio of a token, mu the policy that sampled it,
pi the current one, and sg stops the gradient.
"""

from streamrl.algorithms.aggregation import *
from streamrl.algorithms.controllers import *
from streamrl.algorithms.corrections import *
from streamrl.algorithms.groups import *
from streamrl.algorithms.kl import *
from streamrl.algorithms.ratios import *
from streamrl.algorithms.registry import *
from streamrl.algorithms.returns import *
from streamrl.algorithms.scores import *
from streamrl.algorithms.staleness import *
from streamrl.algorithms.surrogates import *
from streamrl.algorithms.tokens import *
from streamrl.algorithms.types import *
