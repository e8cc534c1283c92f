"""The first import of a benchmark that is run by its path; nothing else imports this module.

Python puts the script's folder at the head of `sys.path`, so a script finds this module as `script`, but neither
`jmoe` nor `benchmarks`. Importing it puts the repository's root in that place. SIGUSR1 prints where the program is.
"""

import faulthandler
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
faulthandler.register(signal.SIGUSR1, all_threads=False)


def reexec_with_env() -> None:
    """Go on in the environment that `train.py` gives itself; call this before JAX is imported."""
    from jmoe.runtime import reexec_with_env

    reexec_with_env()
