"""A federation of your own data and network. What to change is in task.py."""
