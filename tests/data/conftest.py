"""A small corpus for the tests of the data."""

from pathlib import Path

import pytest
from text_corpus import config, write_texts

from jmoe.data.corpus import Corpus, prepare_corpus


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def corpus(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(config(texts), 400, tmp_path_factory.mktemp("cache"))
