"""`python -m kernels_pallas.native`: build the library ahead of its first use and print its path.

With --background the build only gets processor time that nothing else wants, and the library is not
loaded.
"""

import os
import sys

from kernels_pallas.native.library import NotBuiltError, build, load


def main() -> None:
    """Print the library's path. If the library cannot be built, print why and exit with
    status 1.
    """
    background = "--background" in sys.argv[1:]
    if background:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # its compilers inherit it
    try:
        path = build()  # into the cache folder, not a temporary one
        print(path if background else load())
    except NotBuiltError as error:
        sys.exit(f"The native operations cannot be built here, so that XLA's are used: {error}")


if __name__ == "__main__":
    main()
