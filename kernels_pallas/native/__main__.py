"""`python -m kernels_pallas.native` builds the library ahead of its first use, and says where it is
or why not.

With --background other programs come first, and the library is not loaded.
"""

import os
import sys

from kernels_pallas.native.library import NotBuiltError, build, load


def main() -> None:
    """Print the library's path; where it cannot be built, say why and end with 1."""
    background = "--background" in sys.argv[1:]
    if background:
        os.nice(10)
    try:
        path = build()  # to be kept
        print(path if background else load())
    except NotBuiltError as error:
        sys.exit(f"The native operations cannot be built here, so that XLA's are used: {error}")


if __name__ == "__main__":
    main()
