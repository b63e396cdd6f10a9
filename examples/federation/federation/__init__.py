"""A federation with your own data and network: edit task.py."""
