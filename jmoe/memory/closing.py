"""The base class of objects that a `with` statement closes."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Context manager that calls its `close` on exit."""

    @abstractmethod
    def close(self) -> None:
        """Release the object's resources; the object must not be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
