"""What several benchmarks share: the methods compared, cells and their costs, reports and goals, a GPU's clock and compiler."""
