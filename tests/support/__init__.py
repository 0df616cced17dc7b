"""What the suite needs beside its tests: drawn calls, definitions, models and programs to run."""
