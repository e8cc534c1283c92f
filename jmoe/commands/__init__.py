"""Console scripts `jmoe-train` and `jmoe-serve`.

train.py and serve.py in this folder are symbolic links to the files in the repository's root.
"""

import runpy


def train_command() -> None:
    runpy.run_module("jmoe.commands.train", run_name="__main__")


def serve_command() -> None:
    runpy.run_module("jmoe.commands.serve", run_name="__main__")
