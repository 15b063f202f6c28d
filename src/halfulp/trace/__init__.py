"""A trace on disk: what every grid would do to every step of a run.

A folder, readable at any moment::

    manifest.json                what was recorded: grids, tensors, optimizer, environment; its digest
    parts/000000/                some steps; the folder appears whole, by a rename
        tables.safetensors       the columns of tables: grids (step, tensor, grid -> counts), tensors (step,
                                 tensor -> sums, rate), run (step -> loss)
        part.json                which trace and place it belongs to; bytes, rows and SHA-256 of the files
    state/000000.safetensors     what a resumed recording needs, and the scores, as of the newest part
    shards/000000500.1.safetensors  the same of the shards of rank 1 at step 500, where tensors are sharded
    trouble.json                 why the recording stopped before the run, if it did
    .lock                        held by the process that records, while it does

A crash loses at most the steps of the part that was open. Parts never change, so a trace can be read while it
is written. :class:`Memory` is the same without a disk.

Every file opens with the safetensors library; there is no pickle anywhere. :mod:`~halfulp.trace.columns` has
the tables, :mod:`~halfulp.trace.schema` says what is believed.
"""

from halfulp.trace.columns import Array, Columns
from halfulp.trace.layout import free_folder, newest_folder
from halfulp.trace.memory import Memory
from halfulp.trace.reader import Trace
from halfulp.trace.recorded import Recorded, Scope
from halfulp.trace.schema import FORMAT, MOST_ROWS, STATE, TABLES
from halfulp.trace.writer import TraceWriter

__all__ = [
    "FORMAT", "MOST_ROWS", "STATE", "TABLES", "Array", "Columns", "Memory", "Recorded", "Scope", "Trace",
    "TraceWriter", "free_folder", "newest_folder",
]  # fmt: skip
