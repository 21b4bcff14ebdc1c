"""Faults in what hits, and in what a hit gives."""

from faults import Fault

FAULTS: list[Fault] = []
