"""Detection of binary file formats by their first bytes, and advice on converting them to text or
JSONL. `stored_files` reads gzip, zstd and Parquet.
"""

import re
from typing import BinaryIO

_RECORDS = "write its records as JSONL"
_PANDAS = "pandas.read_{}(FILE).to_json(OUT, orient='records', lines=True)"
_UNPACKS = "{} FILE unpacks it"
# (regex for the first bytes, name of the format, conversion advice)
_FORMATS = (
    (
        rb"PAR1.*[\x00-\x08\x0e-\x1f\x80-\xff]",
        "Parquet that was cut",
        "get the whole file",
    ),
    (rb"ARROW1\0", "Arrow", f"{_RECORDS}: {_PANDAS.format('feather')}"),
    (rb"\xff{4}", "an Arrow stream", f"{_RECORDS}: datasets.Dataset.from_file(FILE).to_json(OUT)"),
    (rb"Obj\x01", "Avro", _RECORDS),
    (rb"SQLite format 3\0", "a SQLite database", _RECORDS),
    (rb"\x89HDF\r\n", "HDF5", _RECORDS),
    (rb"\x80[\x02-\x05][\x95}\]c(K]", "a pickle", _RECORDS),
    (rb"\x93NUMPY", "a NumPy array", "python -m jmoe.data makes token shards of text"),
    (rb"\x1f\x8b", "compressed twice, with gzip inside", _UNPACKS.format("gunzip -k")),
    (rb"\x28\xb5\x2f\xfd", "compressed twice, with zstd inside", _UNPACKS.format("unzstd")),
    (rb"\xfd7zXZ\0", "compressed with xz", _UNPACKS.format("unxz -k")),
    (rb"\x04\x22\x4d\x18", "compressed with lz4", _UNPACKS.format("unlz4")),
    (rb"BZh[1-9]1AY&SY", "compressed with bzip2", _UNPACKS.format("bunzip2 -k")),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACKS.format("7z x")),
    (rb"PK\x03\x04", "a zip archive", _UNPACKS.format("unzip")),
    (rb".{257}ustar", "a tar archive", _UNPACKS.format("tar xf")),
    (rb"%PDF-", "PDF", "pdftotext FILE writes its text"),
    (rb"\x7fELF", "a program", "leave it out"),
    (rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a", "an image", "leave it out"),
)
_HEAD_BYTES = 512


def binary_format_advice(file: BinaryIO) -> str | None:
    """Return the name of a file's binary format with advice on converting it; None if its first
    bytes are not of a known binary format.

    file: at its beginning.
    """
    head = file.read(_HEAD_BYTES)
    return next(
        (
            f"{what}, not text; {way}"
            for start, what, way in _FORMATS
            if re.match(start, head, re.DOTALL)
        ),
        None,
    )
