"""A planted fault: a line of the package made wrong, and the test that must see it."""

import pathlib
import shutil
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent


class Fault(NamedTuple):
    """One replacement in one file of the package."""

    name: str
    """What is wrong, in words; begins with the id of the scenario, if it has one."""
    file: str
    """Path below `uhrc_fn/`."""
    right: str
    """Text that stands in the file exactly once."""
    wrong: str
    """What is planted in its place."""
    test: str
    """The test that must fail: `tests/` is left out, as in `test_x.py::test_y`."""

    @property
    def path(self) -> pathlib.Path:
        return ROOT / "uhrc_fn" / self.file

    def plant(self, folder: pathlib.Path) -> None:
        """Copy the package and its tests to `folder`, this fault in them."""
        for name in ("uhrc_fn", "tests"):
            leave_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=leave_out)
        shutil.copy(ROOT / "pyproject.toml", folder)
        target = folder / "uhrc_fn" / self.file
        text = target.read_text()
        if text.count(self.right) != 1:
            raise ValueError(
                f"{self.name}: the text stands {text.count(self.right)} times in "
                f"uhrc_fn/{self.file}; wanted once. Bring `right` up to date."
            )
        target.write_text(text.replace(self.right, self.wrong))
