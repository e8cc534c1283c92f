"""A base class for objects that a `with` statement closes."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Context manager that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; the object is not used any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
