"""The experiments' scripts, run in this process with tiny sizes; real data where they are beside the repository."""

from support.scripts import data_of, folder, pictures, script  # noqa: F401  fixtures
