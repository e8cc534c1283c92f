"""The keys of those who may be served: a file, one a line, which is read again while the server
runs.
"""

import hashlib
import hmac
import logging
import re
from pathlib import Path

from jmoe.config import check

RELOAD_S = 1.0  # between two looks at the file
_PRINTABLE = re.compile(r"[ -~]+")

log = logging.getLogger(__name__)


class ApiKeys:
    """The keys of a file as they are now; path None: there are none, and everyone is let in.

    Raises `ValueError` if the file has no key, or one that cannot stand in a header.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path).expanduser()
        self._seen = b"" if self._path is None else self._path.read_bytes()
        self._taken, self._error = self._seen, ""
        self._digests = [] if self._path is None else _digests(self._seen, str(self._path))

    def __bool__(self) -> bool:
        return self._path is not None

    def match(self, key: str) -> bool:
        """Return whether it is one of the keys; each is compared, in constant time."""
        digest = digest_of(key)
        return bool(sum(hmac.compare_digest(digest, known) for known in self._digests))

    def reload(self) -> None:
        """Take what the file has, once two looks have found the same: who is writing it may be
        half-way.

        A file that cannot be read, or has no good keys, is an error in the log, and the keys before
        stay.
        """
        assert self._path is not None
        try:
            before, self._seen = self._seen, self._path.read_bytes()
            if self._seen == before != self._taken:
                self._taken = before
                self._digests, self._error = _digests(before, str(self._path)), ""
                log.info(
                    "api_key_file = %r: read again: %d keys", str(self._path), len(self._digests)
                )
        except (OSError, ValueError) as error:
            if str(error) != self._error:
                self._error = str(error)
                log.error("%s; the keys before stay", error)


def _digests(content: bytes, path: str) -> list[bytes]:
    lines = [line.strip() for line in content.decode(errors="replace").splitlines()]
    check(any(lines), "api_key_file", path, "must hold a key, one a line")
    for number, line in enumerate(lines, 1):
        printable = not line or _PRINTABLE.fullmatch(line) is not None
        check(
            printable,
            "api_key_file",
            path,
            f"line {number}: a key must be of printable ASCII characters",
        )
    return [digest_of(line) for line in lines if line]


def digest_of(key: str) -> bytes:
    """Return a digest of a key, by which it is compared, so that not even its length shows."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
