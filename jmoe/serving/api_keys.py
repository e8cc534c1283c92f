"""API keys from a file with one key a line, reloaded while the server runs."""

import hashlib
import hmac
import logging
import re
from pathlib import Path

from jmoe.config import check

RELOAD_S = 1.0  # interval between two reads of the file
_PRINTABLE = re.compile(r"[ -~]+")

log = logging.getLogger(__name__)


class ApiKeys:
    """The current keys of a key file. Without a file (`path` None), the object is false and every
    client is accepted.

    Raises `ValueError` if the file holds no key, or a key that is not printable ASCII.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path).expanduser()
        self._seen = b"" if self._path is None else self._path.read_bytes()
        self._taken, self._error = self._seen, ""
        self._digests = (
            [] if self._path is None else _parse_key_digests(self._seen, str(self._path))
        )

    def __bool__(self) -> bool:
        return self._path is not None

    def match(self, key: str) -> bool:
        """Return whether `key` is one of the keys, comparing against every key in constant time."""
        digest = digest_of_key(key)
        return bool(sum(hmac.compare_digest(digest, known) for known in self._digests))

    def reload(self) -> None:
        """Adopt changed content of the file once two consecutive reads agree, as a writer may be
        half-way.

        If the file cannot be read or holds invalid keys, the previous keys stay and the error is
        logged.
        """
        assert self._path is not None
        try:
            before, self._seen = self._seen, self._path.read_bytes()
            if self._seen == before != self._taken:
                self._taken = before
                self._digests, self._error = _parse_key_digests(before, str(self._path)), ""
                log.info(
                    "api_key_file = %r: read again: %d keys", str(self._path), len(self._digests)
                )
        except (OSError, ValueError) as error:
            if str(error) != self._error:
                self._error = str(error)
                log.error("%s; the keys before stay", error)


def _parse_key_digests(content: bytes, path: str) -> list[bytes]:
    lines = [line.strip() for line in content.decode("utf-8-sig", errors="replace").splitlines()]
    check(any(lines), "api_key_file", path, "must hold a key, one a line")
    for number, line in enumerate(lines, 1):
        printable = not line or _PRINTABLE.fullmatch(line) is not None
        check(
            printable,
            "api_key_file",
            path,
            f"line {number}: a key must be of printable ASCII characters",
        )
    return [digest_of_key(line) for line in lines if line]


def digest_of_key(key: str) -> bytes:
    """Return the SHA-256 digest of a key. Keys are compared as digests, which hide even their
    length.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
