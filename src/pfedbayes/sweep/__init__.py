"""A sweep: many runs described by one file, each kept as a small result that can be merged with others.

A cell is one run with all its seeds, or with those that it was given later. While it is under way it has a run folder,
so that it can be interrupted at any moment; when it is done, what is left of it are its scores, a list of records:

    DIR/runs/CELL        the run folder, gone once the cell is done
    DIR/cells/CELL.json  the records of a cell, see `scores.records`

In the names of files a very long CELL is cut and ends in a digest.
"""
