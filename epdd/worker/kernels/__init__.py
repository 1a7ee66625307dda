"""What computes faster than torch's own: compiled kernels, oneDNN, norms; and the only file that calls CUDA."""
