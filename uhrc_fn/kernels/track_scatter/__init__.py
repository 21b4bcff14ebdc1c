"""Scatter final states of requests into their track slots."""

from .api import track_scatter as track_scatter
