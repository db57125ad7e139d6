"""Texts of columns of Parquet files, for src/data/parquet.cpp, which starts this with a socket as stdin and stdout.

A request is a path and a column: two lengths (uint64), and their bytes. An answer is frames: a kind (a byte), a count
and a number of bytes (uint64), and those bytes.

    R  pyarrow is there
    T  `count` texts: count + 1 offsets (int64), of which the first may be more than 0, and the bytes that they delimit
    E  the end of the file
    X  an error; `count` is its row, counted from 1, or 0
"""
import os
import struct
import sys

FRAME = struct.Struct("<cQQ")
MOST_ROWS = 256  # of a batch: few, since a text may be a book
BATCH_BYTES = 16 << 20  # of a batch of texts of the usual length
MOST_NAMES = 20
TEXTS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


class Refused(Exception):
    """A file that is not read, with the reason and perhaps the row."""

    def __init__(self, text, row=0):
        super().__init__(text)
        self.row = row


def listed(schema):
    """The columns with their types."""
    if not schema.names:
        return "it has no columns"
    shown = ", ".join(f"`{field.name[:80]}` ({str(stored_type(field.type))[:40]})" for field in list(schema)[:MOST_NAMES])
    has_texts = any(str(stored_type(field.type)) in TEXTS for field in schema)
    advice = "name one of texts by --text-key" if has_texts else "none of them has texts"
    return f"its columns are {shown}{', …' if len(schema) > MOST_NAMES else ''}: {advice}"


def stored_type(kind):
    """The type of the values: not that of the numbers that stand for them."""
    if hasattr(kind, "storage_type"):
        return stored_type(kind.storage_type)
    return stored_type(kind.value_type) if pyarrow.types.is_dictionary(kind) else kind


def check_column(schema, column):
    """Throws Refused where `column` is none that has texts."""
    found = schema.get_all_field_indices(column)
    if not found:
        raise Refused(f"there is no column `{column}`; {listed(schema)}")
    if len(found) > 1:
        raise Refused(f"{len(found)} columns are called `{column}`; give each a name of its own")
    kind = stored_type(schema.field(found[0]).type)
    if str(kind) in TEXTS:
        return
    fix = ""
    if pyarrow.types.is_nested(kind):
        has_tokens = pyarrow.types.is_integer(getattr(kind, "value_type", pyarrow.null()))
        fix = ("; tokens are read from .npy files, which numpy.save() writes" if has_tokens else
               "; texts within it have to be a column of their own")
    raise Refused(f"`{column}` is {str(kind)[:200]}, not a text; {listed(schema)}{fix}")


def rows_of_batch(metadata):
    """How many rows are read at a time, by the mean length of rows. What is told of a single column is not asked for:
    where the column is encrypted, the library ends the process."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    longest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(MOST_ROWS, BATCH_BYTES // max(longest, 1)))


def plain(values):
    """An array of large_binary."""
    while True:
        if hasattr(values, "storage"):
            values = values.storage
        elif hasattr(values, "dictionary_decode"):
            values = values.dictionary_decode()
        else:
            return values.cast(pyarrow.large_binary())


def batches(path, column):
    """Arrays of large_binary without nulls: the whole column, never more of it than some rows at a time."""
    with open(path, "rb") as stream:
        file = parquet.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
        check_column(file.schema_arrow, column)
        row = 0
        for batch in file.iter_batches(rows_of_batch(file.metadata), columns=[column], use_threads=False):
            values = plain(batch.column(batch.schema.get_field_index(column)))
            if values.null_count:
                null = values.is_null().to_pylist().index(True)
                raise Refused(f"`{column}` is null, not a text; leave such rows out, such as by "
                              f"Python's pandas: pandas.read_parquet(\"{os.fsdecode(path)}\").dropna(subset=[\"{column}\"])"
                              ".to_parquet(\"whole.parquet\")", row + null + 1)
            row += len(values)
            if len(values):
                yield values
        if row != file.metadata.num_rows:
            raise Refused(f"it has {row} rows of the {file.metadata.num_rows} that it tells of; copy or download it again")


def reason_of(error):
    """The sentence for an error of pyarrow."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
    if isinstance(error, MemoryError):
        return f"there is not enough memory to read it ({text}); write it again with smaller row groups"
    if isinstance(error, OSError) and error.errno:
        return f"it cannot be read ({text}); give a file that can be"
    if any(word in text.lower() for word in ("encrypt", "decrypt", "crypto")):
        return f"it is encrypted ({text}); give a file that is not"
    if "codec" in text.lower() and not isinstance(error, UnicodeError) or isinstance(error, NotImplementedError):
        return f"pyarrow {pyarrow.__version__} does not read it ({text}); write it again, compressed as snappy or zstd"
    return f"it is damaged ({text}); copy or download it again"


def serve(requests, answers):
    def send(kind, count, *parts):
        answers.write(FRAME.pack(kind, count, sum(len(part) for part in parts)))
        for part in parts:
            answers.write(part)
        answers.flush()

    def refuse(text, row=0):
        send(b"X", row, text.encode(errors="replace"))

    global pyarrow, parquet
    try:
        import pyarrow
        from pyarrow import parquet
        if int(pyarrow.__version__.split(".")[0]) < 14:
            raise ImportError(f"pyarrow {pyarrow.__version__} is older than 14")
    except Exception as error:  # also of libraries that pyarrow needs
        refuse(str(error))
        return
    send(b"R", 0)
    while header := requests.read(16):
        path, column = (requests.read(size) for size in struct.unpack("<QQ", header))
        try:
            for values in batches(path, column.decode(errors="replace")):
                _, offsets, data = values.buffers()
                offsets = memoryview(offsets)[8 * values.offset:8 * (values.offset + len(values) + 1)]
                first, last = offsets[:8].cast("q")[0], offsets[-8:].cast("q")[0]
                send(b"T", len(values), offsets, memoryview(data)[first:last] if last > first else b"")
            send(b"E", 0)
        except BrokenPipeError:
            return
        except Refused as refused:
            refuse(str(refused), refused.row)
        except Exception as error:
            refuse(reason_of(error))


sys.path[:] = [folder for folder in sys.path if folder]  # no module comes from the folder of the run
OUTPUT = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what a library prints is no answer
try:
    serve(os.fdopen(os.dup(0), "rb"), OUTPUT)
except BrokenPipeError:
    os._exit(1)
