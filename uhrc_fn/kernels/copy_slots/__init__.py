"""Copy slots of the recurrent state, for copy-on-write."""

from .api import copy_slots as copy_slots
