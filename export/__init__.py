"""Checkpoint folders in, ONNX graphs out."""
