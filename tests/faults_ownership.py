"""Faults in who owns what."""

from faults import Fault

FAULTS: list[Fault] = []
