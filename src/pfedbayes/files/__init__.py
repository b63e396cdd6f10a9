"""Files that are written and read back: whole or not at all, with a checksum, and checked before they are believed."""
