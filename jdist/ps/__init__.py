"""The parameter server: a pure state machine, its wire, its servers, and the coordinator that drives them."""

from jdist.ps.cluster_coordinator import ClusterCoordinator as ClusterCoordinator
from jdist.ps.cluster_coordinator import worker_index as worker_index
from jdist.ps.partition import fixed_shards as fixed_shards
from jdist.ps.partition import max_size as max_size
from jdist.ps.partition import min_size as min_size
from jdist.ps.remote_state import RemoteState as RemoteState
from jdist.ps.remote_value import RemoteValue as RemoteValue
from jdist.ps.times import Times as Times
