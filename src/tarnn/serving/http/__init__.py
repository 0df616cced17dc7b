"""The HTTP server over engines and stores: one file for each group of routes."""
