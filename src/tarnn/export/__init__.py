"""Models in forms that other programs run: a file per format, listed in `formats.py`."""
