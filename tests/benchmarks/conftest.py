"""The benchmark scripts, run in this process with tiny sizes."""

from support.scripts import data_of, folder, pictures, script  # noqa: F401  fixtures
