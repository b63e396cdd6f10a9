"""Data of users: tables, arrays and trees of images."""
