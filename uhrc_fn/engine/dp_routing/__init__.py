"""Data-parallel routing: which rank, and so which tree, serves a request.

Policies are pure functions of the ranks' loads and, for `cache_aware`, of what each
rank's cache would hit; they run on the host and inside a jitted program alike. Once a
tick of the scheduler::

    router = Router(policy="cache_aware", num_ranks=4, max_running_requests=64)
    loads = count_loads(ranks, input_tokens, output_tokens, num_ranks=4)
    peek = lambda probe: peek_ranks(caches, radix_key(probe.token_ids, config))
    tick = assign_dp_ranks(deferred, arrivals, router=router, loads=loads, peek=peek)
"""

from .intake import Intake as Intake
from .intake import Router as Router
from .intake import assign_dp_ranks as assign_dp_ranks
from .loads import RankLoads as RankLoads
from .loads import add_load as add_load
from .loads import count_loads as count_loads
from .loads import eligible_ranks as eligible_ranks
from .policies import DEFAULT_POLICY as DEFAULT_POLICY
from .policies import NO_RANK as NO_RANK
from .policies import Affinity as Affinity
from .policies import DpSchedulePolicy as DpSchedulePolicy
from .policies import cache_aware as cache_aware
from .policies import min_running_queue as min_running_queue
from .policies import resolve_policy as resolve_policy
from .policies import round_robin as round_robin
from .policies import shape_aware as shape_aware
from .probe import Probe as Probe
from .probe import RouteRequest as RouteRequest
from .probe import estimate_tokens as estimate_tokens
from .probe import peek_ranks as peek_ranks
from .probe import probe_key as probe_key
from .tick import RouteBatch as RouteBatch
from .tick import route_batch as route_batch
