"""The parameter server: a pure state machine, its wire, its servers, and the coordinator that drives them."""

from jdist.ps.coordinator.api import ClusterCoordinator as ClusterCoordinator
from jdist.ps.coordinator.api import worker_index as worker_index
from jdist.ps.coordinator.remote_state import RemoteState as RemoteState
from jdist.ps.coordinator.remote_value import RemoteValue as RemoteValue
from jdist.ps.program.partition import fixed_shards as fixed_shards
from jdist.ps.program.partition import max_size as max_size
from jdist.ps.program.partition import min_size as min_size
from jdist.ps.protocol.times import Times as Times
