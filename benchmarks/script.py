"""What a benchmark that is run by its path does first; nothing else imports this module.

Python puts the script's folder at the head of `sys.path`, so a script finds this module as `script`, but neither
`jmoe` nor `benchmarks`. Importing it puts the repository's root in that place.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)


def reexec_with_env() -> None:
    """Go on in the environment that `train.py` gives itself; call this before JAX is imported."""
    from jmoe.runtime import reexec_with_env

    reexec_with_env()
