"""A checkpoint's weights to a torch module, dequantised where they are quantised."""
