"""Every struct that crosses a process, and the words they use.

Glossary
    prompt        one record of the task, found by its index
    episode       one run of an environment from reset to end
    trajectory    one episode as tokens; on the wire a `Member` of a `Group`
    group         the trajectories of one prompt that share a baseline: the unit of leases, capacity and batches
    lease         the right and duty of one actor to produce one group; also the credit
    attempt       how often this group had been leased before, from 0
    version       number of optimizer steps done; a `VersionRef` adds the learner's epoch
    lag           version at training minus version that sampled the token, in optimizer steps
    document      one version's weights as ordered bytes, described by a `Manifest`

Wire form: `messages.codec` puts a 16-byte preamble before one MessagePack value. Structs are `array_like`, so a field's
position is its name: fields and enum members are only appended, fields with defaults; nothing is removed, reordered or
retyped inside a protocol number. Token ids travel as raw `<i4`, log-probs as raw `<f4`; ranges are half open
`(start, end)`. A new message is one class under `@message`, in the module of the two processes that it is between.
"""

from streamrl.messages.actors import *
from streamrl.messages.base import *
from streamrl.messages.ranks import *
from streamrl.messages.weights import *
