"""Saving: a cache, and what lives beside it, as one file whose every byte is checked.

`file` has the format, `header` says what a file must be, `state` puts both together.
"""

from .file import FORMAT_VERSION as FORMAT_VERSION
from .file import SavedStateError as SavedStateError
from .state import load as load
from .state import save as save
