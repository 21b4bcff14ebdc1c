"""Kernels: one folder each, with a reference in plain JAX and what a platform needs.

A kernel sees arrays, never a cache. `api.py` checks the arguments and chooses when the
program is lowered, so that one traced program serves every platform. The reference
defines every element of the result.
"""

from .copy_slots import copy_slots as copy_slots
from .track_scatter import track_scatter as track_scatter
