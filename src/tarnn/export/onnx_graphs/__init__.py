"""Programs as ONNX graphs: the graph in the making, and what each instruction becomes."""
