"""The ONNX Runtime family: light, exact in float32, the default."""
