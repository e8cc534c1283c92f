"""The base of request bodies, and the types of fields that more than one module of bodies has."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from jmoe.serving.errors import UNKNOWN, replace_surrogates
from jmoe.types import Json

T = TypeVar("T")
# report only the first error: a list may have a million
FastList = Annotated[list[T], Field(fail_fast=True)]
Hint = Json  # accepted and ignored: no answer depends on it


class RequestBody(BaseModel):
    """Base of request bodies: strict types, and unknown parameters are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_known_fields(cls, data: Json) -> Json:
        """Drop null values; raise an error that names the first unknown parameter."""
        if not isinstance(data, dict):
            return data
        present = {name: value for name, value in data.items() if value is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in present:
            if name not in known:
                raise PydanticCustomError(
                    UNKNOWN,
                    "is not a parameter that this server supports",
                    {"name": replace_surrogates(name)},
                )
        return present
