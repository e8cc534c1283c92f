"""Console scripts `jmoe-train`, `jmoe-serve`: they run train.py and serve.py of the checkout,
which are linked here.
"""

import runpy


def train_command() -> None:
    runpy.run_module("jmoe.commands.train", run_name="__main__")


def serve_command() -> None:
    runpy.run_module("jmoe.commands.serve", run_name="__main__")
