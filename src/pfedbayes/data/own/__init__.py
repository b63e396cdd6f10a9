"""Your own data: tables, arrays and folders of images."""
