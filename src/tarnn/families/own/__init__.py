"""Programs of tarnn's own models: texts (`model_type` tarnn) and images (tarnn_image)."""
