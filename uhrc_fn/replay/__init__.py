"""Replay of recorded workloads: traces in, tables and plots out.

On the command line: `python -m uhrc_fn.replay --trace PATH|builtin`. In Python::

    from uhrc_fn.replay import load_trace
    from uhrc_fn.replay.engine import replay

    workload = load_trace("mooncake_conversation.jsonl.gz")
    result = replay(workload, capacity_pages=18_279)
    hit_tokens = workload.hit_tokens(result.hit_pages).sum()
    print(hit_tokens / workload.input_tokens.sum())

Only `engine` needs JAX.
"""

from .ideal import BeladyBound as BeladyBound
from .ideal import ideal_hit_pages as ideal_hit_pages
from .ideal import prefix_nodes as prefix_nodes
from .records import ReplayProgress as ReplayProgress
from .records import ReplayResult as ReplayResult
from .traces import TraceError as TraceError
from .traces import load_trace as load_trace
from .workload import Workload as Workload
