"""Sweeps: many runs described by one file. Their results are small files that can be merged.

A cell is one run with all its seeds. An unfinished cell has a run folder, so it can be interrupted at any moment. A
finished cell has a list of records, see `scores`:

    DIR/runs/CELL        the run folder, deleted when the cell is done
    DIR/cells/CELL.json  the records of a cell
    DIR/locks/CELL       empty; locked by the worker that runs the cell, so that several workers can share DIR

In file names a very long CELL is cut and ends in a digest.
"""
