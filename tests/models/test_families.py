"""The files of `jmoe/models/families`: one family each, complete, and described in
docs/families.md.
"""

from pathlib import Path

import pytest

from jmoe.config import ModelConfig
from jmoe.models import families
from jmoe.models.families import FAMILIES
from jmoe.models.families.outcomes import HONOURED
from jmoe.models.families.tensors import LAYER
from jmoe.models.families.unsupported import MISSING_PARTS
from jmoe.models.huggingface import family_of, model_config
from tests.models.test_config_fields import fields_of

FOLDER = Path(families.__file__).parent


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_writes_is_in_its_table(name: str) -> None:
    """Every field that it writes is known, and it reads back the decoder that it wrote."""
    family, config = FAMILIES[name], model_config(fields_of(name))
    written = family.write(config)
    assert written.keys() - family.fields.keys() == set()
    again: ModelConfig = model_config({"model_type": name, **written})
    assert again == config or again.layers == config.layers
    assert family.fields["model_type"] == HONOURED


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_have_names_of_their_own(name: str) -> None:
    """A family lists only the parameters whose names differ from what `LAYER` has."""
    tensors = FAMILIES[name].tensors
    assert [part for part, source in tensors.items() if LAYER.get(part) == source] == []


def test_model_types() -> None:
    names = [alias for family in FAMILIES.values() for alias in (*family.same_as,)]
    assert len({*names, *FAMILIES}) == len(names) + len(FAMILIES)
    assert [family_of({"model_type": name}) for name in FAMILIES] == list(FAMILIES)
    with pytest.raises(ValueError, match="model_type = 'llama': must be one of mixtral, qwen3_moe"):
        family_of({"model_type": "llama"})


def lines_table() -> str:
    """Return the table of docs/families.md: a row a family, with the lines of its file."""
    rows = ["| family | also read as | lines of its file |", "| --- | --- | --- |"]
    for name, family in FAMILIES.items():
        lines = len((FOLDER / f"{name}.py").read_text().splitlines())
        rows.append(
            f"| `{name}` | {', '.join(f'`{alias}`' for alias in family.same_as)} | {lines} |"
        )
    return "\n".join(rows).replace("|  |", "| |") + "\n"


def test_the_page_lists_the_families() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    assert lines_table() in page, f"docs/families.md needs this table:\n{lines_table()}"


@pytest.mark.parametrize("kind", [*MISSING_PARTS, "gemma4_text"])
def test_a_known_family_that_is_not_supported_names_what_is_missing(kind: str) -> None:
    """Once jmoe supports the family, its entry in the table has to go."""
    missing = MISSING_PARTS[kind.removesuffix("_text")]
    with pytest.raises(ValueError, match=f"model_type = '{kind}': must be one of mixtral, .*") as e:
        family_of({"model_type": kind})
    assert str(e.value).endswith(f"; jmoe lacks {missing}")
