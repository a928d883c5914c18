"""The parameter server: workers compute, servers keep the state, the program schedules.

Start at `step.PsStep`, what `jdist.distribute` gives under it. Three folders are a kind of process each: `coordinator`
(in the user's program), `worker`, `server`. They share the other three: `protocol` is what they say, `program` what they
compute, `transport` how it travels. `serve` is `jdist serve`.

May import: step and what is below it.
"""

from jdist.ps.coordinator.api import ClusterCoordinator as ClusterCoordinator
from jdist.ps.coordinator.api import worker_index as worker_index
from jdist.ps.coordinator.remote_state import RemoteState as RemoteState
from jdist.ps.coordinator.remote_value import RemoteValue as RemoteValue
from jdist.ps.program.partition import fixed_shards as fixed_shards
from jdist.ps.program.partition import max_size as max_size
from jdist.ps.program.partition import min_size as min_size
from jdist.ps.protocol.times import Times as Times
