"""Off-policy algorithms as pure tensor functions: no configuration, no logging, no I/O, no process groups.

Every name in a module's `__all__` is public and importable from here. Read `estimators.ratios` first (how far the
actor's policy is from the learner's), then the estimators (advantages without their own ratio) and the surrogates
(losses that carry it); `surrogates.registry` checks that a pair applies the ratio exactly once. Beside them stand
`controls` (KL, constraints, several objectives) and `staleness` (lag, drift, and what they control). `checks` holds the
rules that every function obeys. In formulas, ell is the log-ratio of a token, mu the policy that sampled it, pi the
current one, and sg stops the gradient.
"""

from streamrl.algorithms.controls.constraints import *
from streamrl.algorithms.controls.kl import *
from streamrl.algorithms.controls.kl_controllers import *
from streamrl.algorithms.controls.multi_objective import *
from streamrl.algorithms.controls.overlong import *
from streamrl.algorithms.estimators.groups import *
from streamrl.algorithms.estimators.ratios import *
from streamrl.algorithms.estimators.retrace import *
from streamrl.algorithms.estimators.returns import *
from streamrl.algorithms.estimators.vtrace import *
from streamrl.algorithms.staleness.control import *
from streamrl.algorithms.staleness.drift import *
from streamrl.algorithms.staleness.lag import *
from streamrl.algorithms.surrogates.aggregation import *
from streamrl.algorithms.surrogates.clipped import *
from streamrl.algorithms.surrogates.corrections import *
from streamrl.algorithms.surrogates.registry import *
from streamrl.algorithms.surrogates.weighted import *
from streamrl.algorithms.tokens import *
from streamrl.algorithms.types import *
