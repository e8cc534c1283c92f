"""The first lines of every benchmark that is run by its path.

Python puts the program's folder at the head of `sys.path`; a program replaces it by the
repository's root, imports this module, and calls `start` before it imports anything else.
"""

import faulthandler
import signal


def start(reexec: bool = False) -> None:
    """Print the Python stack on SIGUSR1; with `reexec`, run again in the environment of `train.py`.

    `reexec` is for programs that time XLA:CPU: the environment must be set before JAX is imported.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    if reexec:
        from jmoe.runtime import reexec_with_env

        reexec_with_env()
