"""Set up a peer's environment in one command.

    python benchmarks/peers/setup.py transformers|deepspeed|llama.cpp FOLDER

transformers and deepspeed become a virtual environment, whose `bin/python` other programs of this
folder take as --python; llama.cpp a folder with node-llama-cpp and its prebuilt binaries, their
--node. deepspeed needs a C++ compiler and libaio's headers, llama.cpp needs npm. FOLDER must be
empty or new. A step that fails is named with its last lines.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

Step = tuple[str, ...]
# torch comes first: what needs it takes the build that is there
PACKAGES: dict[str, tuple[Step, ...]] = {
    "transformers": (
        ("torch",),
        (
            "transformers",
            "accelerate",
            "compressed-tensors",
            "safetensors",
            "sentencepiece",
            "protobuf",
            "gguf",
        ),
    ),
    "deepspeed": (("torch",), ("deepspeed", "ninja", "numpy")),
}
LLAMA_CPP = ("npm", "install", "node-llama-cpp@3", "--ignore-scripts")


def steps(peer: str, folder: Path) -> list[Step]:
    """Return the commands to run in the folder."""
    if peer == "llama.cpp":
        return [LLAMA_CPP]
    python = str(folder / "bin" / "python")
    install = [(python, "-m", "pip", "install", "--quiet", *names) for names in PACKAGES[peer]]
    return [(sys.executable, "-m", "venv", str(folder)), *install]


def set_up(peer: str, folder: Path) -> None:
    """Run the steps; `ValueError` naming the folder or the step that failed."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"FOLDER = {str(folder)!r}: must be empty or new")
    if peer == "llama.cpp" and shutil.which("npm") is None:
        raise ValueError("npm: is not on the PATH, llama.cpp's binaries come with it")
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps(peer, folder):
        print(" ".join(step), flush=True)
        done = subprocess.run(step, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
            raise ValueError(f"{' '.join(step)}: status {done.returncode}\n{lines}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=(*PACKAGES, "llama.cpp"))
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    a = parser.parse_args()
    try:
        set_up(a.peer, a.folder.resolve())
    except (ValueError, OSError) as error:
        sys.exit(f"setup: {error}")


if __name__ == "__main__":
    main()
