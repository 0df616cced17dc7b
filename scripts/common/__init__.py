"""What all benchmarks and experiments are made with: options, a clock, provenance, results files, tables and plots.

A script starts with `sys.path.insert(0, str(Path(__file__).parents[1]))`, and finds it in its own checkout.
"""
