"""What several benchmarks share: the methods compared, cells and their costs, reports and goals."""
